"""What came of the recipes of a sweep, a row for each, and which of them nothing beats."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compress.evaluation.document import Evaluation, TaskResult
from compress.evaluation.report.front import undominated

FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One recipe. problem: why it has no figures. front: no other recipe has fewer bytes and a lower KL. evaluation:
    the file, beside the index. tasks: by their names accuracy and, less the original's, difference. decode: tokens a
    second."""

    name: str
    recipe: dict[str, Any]
    bytes: int | None = None
    bits_per_weight: float | None = None
    perplexity: float | None = None
    kl_mean: float | None = None
    same_top: float | None = None
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    decode: float | None = None
    front: bool = False
    evaluation: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Sweep:
    """All rows, in the order of their bytes, those without figures last."""

    model: str
    text: str
    rows: list[Row]
    format: int = FORMAT

    @property
    def failed(self) -> list[Row]:
        """Recipes that came to nothing."""
        return [row for row in self.rows if row.problem is not None]


def row_of(name: str, recipe: dict[str, Any], found: Evaluation, place: str) -> Row:
    """The figures of an evaluation that lies at a place beside the index."""
    return Row(
        name,
        recipe,
        found.bytes,
        found.bits_per_weight,
        found.perplexity,
        found.kl_mean,
        found.same_top,
        {each.name: _accuracy(each) for each in found.tasks},
        None if found.speed is None else found.speed.model.decode.value,
        evaluation=place,
    )


def _accuracy(found: TaskResult) -> dict[str, float]:
    both = {"accuracy": found.accuracy, "difference": found.difference}
    return {name: figure.value for name, figure in both.items() if figure is not None}


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Rows by their bytes, with those of the front marked."""
    measured = [(row.bytes, row.kl_mean, row) for row in rows if row.bytes is not None and row.kl_mean is not None]
    best = undominated([(size, kl) for size, kl, _ in measured])
    front = {id(row) for i, (_, _, row) in enumerate(measured) if i in best}
    found = [replace(row, front=id(row) in front) for row in rows]
    return sorted(found, key=lambda row: (row.bytes is None, row.bytes or 0, row.name))
