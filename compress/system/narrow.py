"""Tables on a terminal that is too narrow for them: no cell is cut and no word is broken.

A table that fits stays as it is. One that does not is transposed, where that fits (few models, many figures). Otherwise
every row becomes a name and, below it, the other cells with their headings.
"""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table

INDENT = 2
UNBOUNDED = 1 << 16  # columns


def fitted(table: Table, console: Console) -> Iterator[RenderableType]:
    """Renderables that show a table on this console. A title wider than its table comes first, as a line of its own:
    rich would break it at the table's width."""
    title = table.title
    if title is not None and len(str(title)) > min(natural_width(table, console), console.width):
        table.title = None
        yield title
    if natural_width(table, console) <= console.width:
        yield table
        return
    if table.title is not None:
        yield table.title
    turned = transposed(table)
    if natural_width(turned, console) <= console.width:
        yield turned
    else:
        yield from stacked(table)


def natural_width(table: Table, console: Console) -> int:
    """The least width of a terminal, in columns, at which no cell is wrapped."""
    return Measurement.get(console, console.options.update(width=UNBOUNDED), table).maximum


def cells_of(table: Table) -> list[tuple[str, ...]]:
    """The cells, row by row."""
    return list(zip(*(map(str, column.cells) for column in table.columns), strict=True))


def transposed(table: Table) -> Table:
    """The table with rows and columns exchanged. The cells of the first column become the headings."""
    first, *others = table.columns
    turned = Table(str(first.header))
    for row, (name, *_) in zip(table.rows, cells_of(table), strict=True):
        turned.add_column(name, justify="right", style=row.style or "", header_style="bold")
    for column in others:
        turned.add_row(str(column.header), *map(str, column.cells))
    return turned


def stacked(table: Table) -> Iterator[RenderableType]:
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
