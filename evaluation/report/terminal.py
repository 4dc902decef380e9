"""A report's content on a terminal: tables drawn by rich, and sentences. Names in it are shown as they are."""

from typing import Literal

import rich.table

from compress.base.terminal import console, lines_printed, say
from compress.evaluation.report.content import ReportTable

SHORT = 32  # characters: where a table is too wide, a column of such names stays whole and others are folded


def show(*blocks: ReportTable | str) -> None:
    """Print tables and sentences on standard output, from top to bottom."""
    out = console()
    for block in blocks:
        if isinstance(block, ReportTable):
            out.print(rich_table(block))
        else:
            say(block)


def as_lines(*blocks: ReportTable | str) -> list[str]:
    """The lines that `show` prints where no terminal is."""
    return lines_printed(*(rich_table(block) if isinstance(block, ReportTable) else block for block in blocks))


def rich_table(block: ReportTable) -> rich.table.Table:
    """A table for rich. Cells too wide for their column are folded; columns of short names stay whole. A row whose
    first cell is empty belongs to the row above; where there are such rows, rules separate the groups."""
    drawn = rich.table.Table(title=block.title or None, title_justify="left")
    for i, heading in enumerate(block.columns):
        side: Literal["left", "right"] = "left" if block.is_words(i) else "right"
        whole = side == "left" and all(len(row[i]) <= SHORT for row in block.rows)
        drawn.add_column(heading, justify=side, overflow="fold", no_wrap=whole)
    grouped = any(row and not row[0] for row in block.rows)
    for i, row in enumerate(block.rows):
        if grouped and i and row[0]:
            drawn.add_section()
        drawn.add_row(*row, style="bold" if i in block.strong else "dim" if i in block.faint else None)
    return drawn
