"""Results of a sweep: a row for each recipe, with the Pareto front of size and KL marked."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from compress.base.shown import Shown
from compress.evaluation.document import Evaluation, TaskResult
from compress.evaluation.report.pareto import undominated

FORMAT = 1


@dataclass(frozen=True)
class SweepRow:
    """The figures of one recipe.

    bytes: of the weight files. tasks: {name: {accuracy, difference}}, difference being accuracy minus the original's.
    decode: tokens per second. front: no other recipe beats it in both bytes and KL. evaluation: path of the file,
    relative to the index. problem: the reason why there are no figures.
    """

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


@dataclass(frozen=True, repr=False)
class Sweep(Shown):
    """All rows, ordered by bytes; rows without figures come last."""

    model: str
    text: str
    rows: list[SweepRow]
    format: int = FORMAT

    @property
    def failed(self) -> list[SweepRow]:
        """Rows of recipes that failed."""
        return [row for row in self.rows if row.problem is not None]

    def _rows(self) -> list[dict[str, Any]]:
        """A row for each recipe; each task's accuracy has a column of its name."""
        found = ((row.tasks, asdict(row)) for row in self.rows)
        return [row | {name: task["accuracy"] for name, task in tasks.items()} for tasks, row in found]


def row_of(name: str, recipe: dict[str, Any], found: Evaluation, place: str) -> SweepRow:
    """The row for an evaluation. place: path of its file, relative to the index."""
    return SweepRow(
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


def rank(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Rows ordered by bytes, with those on the Pareto front marked."""
    measured = [(row.bytes, row.kl_mean, row) for row in rows if row.bytes is not None and row.kl_mean is not None]
    best = undominated([(size, kl) for size, kl, _ in measured])
    front = {id(row) for i, (_, _, row) in enumerate(measured) if i in best}
    found = [replace(row, front=id(row) in front) for row in rows]
    return sorted(found, key=lambda row: (row.bytes is None, row.bytes or 0, row.name))
