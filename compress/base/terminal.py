"""Prints tables and lines on a terminal, with names, reasons and quoted text exactly as they are.

Such text comes from files that anybody may have written. Rich would read brackets in it as markup and :words: as emoji,
and a terminal obeys control characters. A terminal may also lack characters: the C locale has ASCII alone.

A table that is too wide for a terminal is transposed, where that fits (few models, many figures). Otherwise every row
becomes a name and, below it, the other cells with their headings. No cell is cut and no word is broken.
"""

import codecs
import io
import os
import sys
from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 160  # columns where standard output is no terminal
SPELLED = "compress.spelled"  # an error handler of encodings
ASCII = {"\u00b1": "+/-"}  # our own characters that are not in every encoding


def visible(text: str) -> str:
    """`text` with Python escapes in the place of unprintable characters: control characters, overrides of the direction
    of writing, and bytes that are no characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _spell(error: UnicodeError) -> tuple[str | bytes, int]:
    """The error handler for characters that an encoding lacks: those of ASCII as spelled there, others as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(ASCII.get(c) or c.encode("ascii", "backslashreplace").decode("ascii") for c in lacking), error.end


codecs.register_error(SPELLED, _spell)


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
    markup or emoji. On a terminal, tables are made to fit (`fit_to_width`)."""

    def print(self, *objects: Any, **options: Any) -> None:
        shown: list[Any] = []
        for each in objects:
            shown += fit_to_width(each, self) if isinstance(each, Table) else [each]
        super().print(*shown, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        shown = visible(text).encode(self.encoding, SPELLED).decode(self.encoding)
        return super().render_str(shown, **{**options, "markup": False, "emoji": False})

    def on_broken_pipe(self) -> None:
        """Leave it to the command to end where nobody reads any more; rich would exit with 1."""
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """Standard output (or standard error); wide enough for whole tables when it is no terminal."""
    out = PlainConsole(stderr=stderr)
    return out if out.is_terminal else PlainConsole(stderr=stderr, width=WIDTH)


def lines_printed(*shown: RenderableType) -> list[str]:
    """The lines that a console prints which is no terminal."""
    written = io.StringIO()
    out = PlainConsole(file=written, width=WIDTH, force_terminal=False, force_jupyter=False)
    for each in shown:
        out.print(each)
    return [line.rstrip() for line in written.getvalue().splitlines()]


def say(text: str, stderr: bool = False) -> None:
    """Print a line of text, of unprintable characters escapes. A terminal breaks it between words; elsewhere it stays
    one line."""
    out = console(stderr)
    out.print(text, soft_wrap=not out.is_terminal, highlight=False)


def say_list(rows: Mapping[str, str]) -> None:
    """Print names, and beside each its text. A terminal breaks texts between words, below each other."""
    out = console()
    width, names = out.width if out.is_terminal else UNBOUNDED, max(map(len, rows)) + INDENT
    for name, text in rows.items():
        for line in wrap(f"{name:{names}}{text}", width, subsequent_indent=" " * names, break_on_hyphens=False):
            say(line)


def fill(text: str, width: int) -> str:
    """A docstring in lines of this width: paragraphs anew, what is indented (equations, lists) line by line."""
    return "\n\n".join(_paragraph(each, width) for each in text.split("\n\n"))


def _paragraph(text: str, width: int) -> str:
    items: list[str] = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if items and indent < EQUATION and indent == _hang(items[-1]) and not line.lstrip().startswith("- "):
            items[-1] += f" {line.strip()}"
        else:
            items.append(line)
    lines: list[str] = []
    for item in items:
        start, hang = item[: len(item) - len(item.lstrip())], " " * _hang(item)
        lines += wrap(item.lstrip(), width, initial_indent=start, subsequent_indent=hang, break_on_hyphens=False)
    return "\n".join(lines)


def _hang(item: str) -> int:
    """The indent of the lines of an item below its first."""
    return len(item) - len(item.lstrip()) + (INDENT if item.lstrip().startswith("- ") else 0)


EQUATION = 4  # columns of indent
INDENT = 2
UNBOUNDED = 1 << 16  # columns


def fit_to_width(table: Table, console: Console) -> Iterator[RenderableType]:
    """Renderables that show a table on this console. A title wider than its table comes first, as a line of its own:
    rich would break it at the table's width."""
    title = table.title
    if title is not None and len(str(title)) > min(natural_width(table, console), console.width):
        table.title = None
        yield title
    if natural_width(table, console) <= console.width or not console.is_terminal:
        yield table
        return
    if table.title is not None:
        yield table.title
    turned = transpose(table)
    if natural_width(turned, console) <= console.width:
        yield turned
    else:
        yield from stack(table)


def natural_width(table: Table, console: Console) -> int:
    """The least width of a terminal, in columns, at which no cell is wrapped."""
    return Measurement.get(console, console.options.update(width=UNBOUNDED), table).maximum


def cells_of(table: Table) -> list[tuple[str, ...]]:
    """The cells, row by row."""
    return list(zip(*(map(str, column.cells) for column in table.columns), strict=True))


def transpose(table: Table) -> Table:
    """The table with rows and columns exchanged. The cells of the first column become the headings."""
    first, *others = table.columns
    turned = Table(str(first.header))
    for row, (name, *_) in zip(table.rows, cells_of(table), strict=True):
        turned.add_column(name, justify="right", style=row.style or "", header_style="bold")
    for column in others:
        turned.add_row(str(column.header), *map(str, column.cells))
    return turned


def stack(table: Table) -> Iterator[RenderableType]:
    """Two paragraphs for every row: its first cell, then the others, each after its heading. Empty cells are left out;
    a row whose first cell is empty belongs to the row above it."""
    _, *headings = (str(column.header) for column in table.columns)
    for row, (name, *cells) in zip(table.rows, cells_of(table), strict=True):
        if name:
            yield Padding(name, 0, style=row.style or "none")
        said = zip(headings, cells, strict=True)
        told = "; ".join(f"{heading}: {cell}" if heading else cell for heading, cell in said if cell)
        if told:
            yield Padding(told, (0, 0, 0, INDENT), style=row.style or "none")
