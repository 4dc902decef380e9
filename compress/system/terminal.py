"""Prints tables and lines on a terminal, with names, reasons and quoted text exactly as they are.

Such text comes from files that anybody may have written. Rich would read brackets in it as markup and :words: as emoji,
and a terminal obeys control characters. A terminal may also lack characters: the C locale has ASCII alone.
"""

import codecs
import io
import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compress.system.narrow import fitted

WIDTH = 160  # columns where standard output is no terminal
SPELLED = "compress.spelled"  # an error handler of encodings
ASCII = {"\u00b1": "+/-"}  # our own characters that are not in every encoding


def visible(text: str) -> str:
    """`text` with Python escapes in the place of unprintable characters: control characters, overrides of the direction
    of writing, and bytes that are no characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _spelled(error: UnicodeError) -> tuple[str | bytes, int]:
    """The error handler for characters that an encoding lacks: those of ASCII as spelled there, others as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(ASCII.get(c) or c.encode("ascii", "backslashreplace").decode("ascii") for c in lacking), error.end


codecs.register_error(SPELLED, _spelled)


def open_closed_streams() -> None:
    """Open those of the three standard streams that a program has started us without, on nothing. Otherwise Python has
    no such stream, and the next file that is opened gets its number and what others print."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process


def is_closed(stream: Any) -> bool:
    """True for a standard stream that we were started without."""
    return isinstance(getattr(stream, "name", None), int)


def spell_what_streams_lack() -> None:
    """Make standard output and standard error write escapes for characters that their encoding lacks. By default they
    would raise UnicodeEncodeError, after all the work."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SPELLED)


class PlainConsole(Console):
    """A console that prints every string (alone, in a cell or as a title) as plain text in its own encoding, without
    markup or emoji. On a terminal, tables are made to fit (`compress.system.narrow`)."""

    def print(self, *objects: Any, **options: Any) -> None:
        shown: list[Any] = []
        for each in objects:
            shown += fitted(each, self) if self.is_terminal and isinstance(each, Table) else [each]
        super().print(*shown, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        shown = visible(text).encode(self.encoding, SPELLED).decode(self.encoding)
        return super().render_str(shown, **{**options, "markup": False, "emoji": False})


def console(stderr: bool = False) -> Console:
    """Standard output (or standard error); wide enough for whole tables when it is no terminal."""
    out = PlainConsole(stderr=stderr)
    return out if out.is_terminal else PlainConsole(stderr=stderr, width=WIDTH)
