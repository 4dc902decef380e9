"""The content of a report, independent of its format: sections of tables, pictures, texts and continuations.

All of it is plain text, except pictures, which are our own SVG: the writer of a format escapes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

FOOTNOTE = (
    "± is one standard error, over windows of text; intervals are of 95 %: 1.96 errors to either side, or by the "
    "t distribution where a table says so. "
    "KL is KL(original ‖ this model)."
)


@dataclass(frozen=True)
class Words:
    """A paragraph. style: `note` for explanations, `warning` for facts that a reader must know."""

    kind: ClassVar[str] = "words"
    text: str
    style: str = ""


@dataclass(frozen=True)
class ReportTable:
    """rows have as many cells as there are columns; the first `names` columns and those in `left` are words, the others
    figures.

    faint: rows of less interest. strong: rows of most interest, bold on a terminal. folded: hidden until opened.
    title: one line.
    """

    kind: ClassVar[str] = "table"
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str = ""
    names: int = 1
    left: frozenset[int] = frozenset()
    faint: frozenset[int] = frozenset()
    strong: frozenset[int] = frozenset()
    folded: bool = False

    def is_words(self, column: int) -> bool:
        """True for a column of words, which are aligned to the left."""
        return column < self.names or column in self.left


@dataclass(frozen=True)
class Picture:
    """svg: drawn by `compress.evaluation.report.drawing`. title: the subject; caption: how to read it."""

    kind: ClassVar[str] = "picture"
    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Continuation:
    """Two models' continuations of a prompt: the text they share, and the rest of each."""

    kind: ClassVar[str] = "continuation"
    prompt: str
    shared: str
    reference: str | None
    model: str


@dataclass(frozen=True)
class Tile:
    """A headline figure. detail: what it is compared with."""

    label: str
    value: str
    detail: str = ""


Block = Words | ReportTable | Picture | Continuation


@dataclass(frozen=True)
class Section:
    """A heading and its blocks."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Article:
    """One run: its verdict in a sentence, its headline figures, and the rest."""

    name: str
    recipe: str
    verdict: str
    tiles: list[Tile]
    sections: list[Section]


@dataclass(frozen=True)
class Report:
    """overview: of all runs together, where there are several. articles: one for each run. command: of `compress`, that
    wrote the report. footnote: how to read its figures. about: what was measured and when, in a line."""

    title: str
    verdict: str
    articles: list[Article]
    overview: list[Section] = field(default_factory=list)
    command: str = "report"
    footnote: str = FOOTNOTE
    about: str = ""
