"""The time that `fit` takes: what it may take, and an estimate from the rates of this machine before it begins
(`jobs.forecast.duration`)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compress.base.errors import CompressError, InputError
from compress.base.progress import Reporter
from compress.passes.protocol.base import Pass
from compress.search.candidate import Candidate
from compress.search.fitting.measure import as_measured
from compress.search.fitting.recipe_space import RecipeSpace
from compress.search.fitting.request import FitRequest

MARGIN = 1.1  # of a time that was measured: what the next may take
# The time of a forward of the whole model over that of its blocks, which a plan tells, at most.
OF_A_FORWARD = 2.0
GRADIENTS = 3  # forwards that a backward pass takes, with the forward before it
LONGEST_START = 20.0  # seconds
STARTS = 2  # of a process, in a recipe: one that verifies the output, and what opens models beside it


class OutOfTimeError(CompressError):
    """The time is up, and there is a result without what was being done."""


class Deadline:
    """A clock that began when it was made. hours: the most; None for as long as it takes."""

    def __init__(self, hours: float | None) -> None:
        if hours is not None and not 0 < hours < float("inf"):
            raise InputError(f"hours {hours}; allowed: above 0, the most that the work may take, like 0.5")
        self.began = time.monotonic()
        self.limit = None if hours is None else 3600 * hours

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        """True once the time is up."""
        return self.limit is not None and self.seconds > self.limit

    def allows(self, seconds: float) -> bool:
        """True where work of this length, as it was measured, can still be done."""
        return self.limit is None or self.seconds + MARGIN * seconds <= self.limit

    def check(self, seconds: float) -> None:
        """Raise InputError for less time than the least work is told to take."""
        if self.limit is not None and seconds > self.limit:
            raise InputError(
                f"hours {self.limit / 3600:.3g}; measuring the layers and running one recipe take about "
                f"{seconds / 3600:.2g} here: give that or more, or fewer --samples"
            )


class Watched:
    """A reporter that ends the work between two steps, once the time is up."""

    def __init__(self, reporter: Reporter, watch: Deadline) -> None:
        self.reporter, self.watch = reporter, watch

    def step(self, done: int, total: int, what: str) -> None:
        if self.watch.is_over:
            raise OutOfTimeError("the time is up")
        self.reporter.step(done, total, what)

    def note(self, message: str) -> None:
        self.reporter.note(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reporter, name)  # tokens, outline: where it shows them


@dataclass(frozen=True)
class FitCost:
    """Seconds. score: of measuring all layers; run: of one recipe, with its evaluation."""

    score: float
    run: float

    @property
    def least(self) -> float:
        """Seconds to measure all layers and to run one recipe."""
        return self.score + self.run

    def words(self, runs: int) -> str:
        """The estimate in words, for so many recipes."""
        measuring = f"{in_words(self.score)} to measure layers"
        if not runs:
            return f"about {measuring}"
        total = self.score + runs * self.run
        return f"about {in_words(total)}: {measuring}, {in_words(self.run)} for each recipe"


def in_words(seconds: float) -> str:
    """A length of time to two digits."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def cost_of_fit(
    request: FitRequest, scored: Sequence[Candidate], full: Sequence[Candidate], tries: int = 0
) -> FitCost | None:
    """The seconds; None where they are not known before, as on a GPU. scored, full: candidates as layers are measured
    with them, and as they are run. tries: measurements of one scheme before the others."""
    (samples, length), row_count = request.data.windows, len(request.data.rows)

    def seconds(p: Pass, count: int) -> float | None:
        return request.plan(p, samples=count, length=length).seconds

    alone = {c.passes[0].name: c.passes[0].without_reference() for c in scored}  # widths take much the same time
    solving = {name: seconds(p, 1) for name, p in alone.items()}
    run = [seconds(p, samples) for p in {c.passes[0].name: c.passes[0] for c in full}.values()]
    once = seconds(alone[scored[0].passes[0].name], samples)
    known = [each for each in (once, *solving.values(), *run) if each is not None]
    if once is None or len(known) <= len(solving) + len(run):
        return None
    of_each = [solving[c.passes[0].name] or 0.0 for c in scored]
    forward = (once - of_each[0]) / max(1, samples - 1) * OF_A_FORWARD  # of a window, with its statistics
    held_out = forward * row_count * (2 + len(scored) + 2 * tries)
    start = STARTS * min(time.process_time(), LONGEST_START)  # most of what a process has done by now is importing
    return FitCost(
        (1 + tries) * (once + GRADIENTS * forward * min(samples, 8)) + sum(of_each[1:]) + held_out + start,
        max(each for each in run if each is not None) + 2 * forward * row_count + start,
    )


def within_time(request: FitRequest, space: RecipeSpace, watch: Deadline, runs: int) -> tuple[RecipeSpace, str]:
    """The recipes that there is time for, without a rotation or trellis codes, or both, where they take too long; and
    how long it takes. runs: recipes that will be run. Raises InputError where one recipe takes longer than may be
    taken."""

    def cost_of(space: RecipeSpace) -> FitCost | None:
        return cost_of_fit(request, as_measured(space.schemes), space.schemes, 2 * len(space.rotation))

    cost = cost_of(space)
    if cost is not None and not watch.allows(cost.least):
        why = f"measuring and one recipe would take {in_words(cost.least)}"
        alone = space.without_rotation(why)
        for less in (alone, space.without_trellises(why), alone.without_trellises(why)):
            space, cost = less, cost_of(less)
            if cost is None or watch.allows(cost.least):
                break
    if cost is None:
        return space, "how long this takes is not known before, away from a CPU"
    watch.check(cost.least)
    return space, cost.words(runs)
