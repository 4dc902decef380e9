"""What a terminal is given: tables and lines in which names, reasons and other people's words stand as they are.

They come from files that anybody may have written. Rich would read brackets in them as markup and :words: as emoji, and
a terminal obeys control characters. Nor can every terminal show every character: in the C locale there is ASCII alone.
"""

import codecs
import io
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
    """`text` with escapes, as Python writes them, for all that is not printed: control characters, overrides of the
    direction of writing, bytes that are no characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _spelled(error: UnicodeError) -> tuple[str | bytes, int]:
    """An encoding's answer to characters that it lacks: ours in ASCII, others as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(ASCII.get(c) or c.encode("ascii", "backslashreplace").decode("ascii") for c in lacking), error.end


codecs.register_error(SPELLED, _spelled)


def spell_what_streams_lack() -> None:
    """Make standard output and standard error write escapes for characters that their encoding lacks, where they would
    have raised UnicodeEncodeError after all the work."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SPELLED)


class PlainConsole(Console):
    """Every string that is printed, alone, in a cell or as a title, is text and nothing else, and can be encoded. On a
    terminal a table fits (`compress.system.narrow`)."""

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
