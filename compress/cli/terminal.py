"""What a terminal is given: tables and lines in which names, reasons and other people's words stand as they are.

They come from files that anybody may have written. Rich would read brackets in them as markup and :words: as emoji, and
a terminal obeys control characters.
"""

from typing import Any

from rich.console import Console
from rich.text import Text

WIDTH = 160  # columns where standard output is no terminal


def visible(text: str) -> str:
    """`text` with escapes, as Python writes them, for all that is not printed: control characters, overrides of the
    direction of writing, bytes that are no characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class PlainConsole(Console):
    """Every string that is printed, alone, in a cell or as a title, is text and nothing else."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **{**options, "markup": False, "emoji": False})


def console(stderr: bool = False) -> Console:
    """Standard output (or standard error); wide enough for whole tables when it is no terminal."""
    out = PlainConsole(stderr=stderr)
    return out if out.is_terminal else PlainConsole(stderr=stderr, width=WIDTH)
