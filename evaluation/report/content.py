"""What a report is made of, whatever it is written as: sections of tables, pictures, texts and continuations.

All of it is plain text (pictures aside, which are SVG of our own drawing): who writes it escapes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

FOOTNOTE = (
    "± is one standard error, over windows of text; intervals are 1.96 of them to either side. "
    "KL is KL(original ‖ this model)."
)


@dataclass(frozen=True)
class Words:
    """A paragraph. style: `note` for what explains, `warning` for what a reader must know."""

    kind: ClassVar[str] = "words"
    text: str
    style: str = ""


@dataclass(frozen=True)
class Table:
    """rows of as many cells as there are columns; the first `names` columns and those `left` are words, the others
    figures.

    faint: rows that are of less interest. folded: shown when asked for. title: what it is, one line. links: of every
    row the anchor of the picture that shows it, empty where none does.
    """

    kind: ClassVar[str] = "table"
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str = ""
    names: int = 1
    left: frozenset[int] = frozenset()
    faint: frozenset[int] = frozenset()
    folded: bool = False
    links: Sequence[str] = ()

    def is_words(self, column: int) -> bool:
        """Whether a column holds words, which begin at the left."""
        return column < self.names or column in self.left


@dataclass(frozen=True)
class Picture:
    """svg: drawn by `compress.evaluation.report.drawing`. title: what it shows; caption: how to read it. anchor: what
    rows of tables link to."""

    kind: ClassVar[str] = "picture"
    title: str
    svg: str
    caption: str = ""
    anchor: str = ""


@dataclass(frozen=True)
class Continuation:
    """What two models make of a prompt: what they agree on, and where each goes on its own way."""

    kind: ClassVar[str] = "continuation"
    prompt: str
    shared: str
    reference: str | None
    model: str


@dataclass(frozen=True)
class Tile:
    """A figure that is seen first. detail: what it is held against."""

    label: str
    value: str
    detail: str = ""


Block = Words | Table | Picture | Continuation


@dataclass(frozen=True)
class Section:
    """A heading and what is under it."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Article:
    """One run: what it came to in a sentence, the figures that are seen first, and the rest."""

    name: str
    recipe: str
    verdict: str
    tiles: list[Tile]
    sections: list[Section]


@dataclass(frozen=True)
class Report:
    """overview: of all runs together, where there are several. articles: a run each. command: of `compress`, that wrote
    it. footnote: how all of its figures are to be read."""

    title: str
    verdict: str
    articles: list[Article]
    overview: list[Section] = field(default_factory=list)
    command: str = "report"
    footnote: str = FOOTNOTE
