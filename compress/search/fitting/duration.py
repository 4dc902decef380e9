"""The time that `fit` takes, before it begins: from the rates of this machine (`jobs.forecast.duration`)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from compress.passes.protocol.base import Pass
from compress.search.candidate import Candidate
from compress.search.fitting.request import FitAsked

# The time of a forward of the whole model over that of its blocks, which a plan tells, at most.
OF_A_FORWARD = 2.0
GRADIENTS = 3  # forwards that a backward pass takes, with the forward before it
LONGEST_START = 20.0  # seconds
STARTS = 2  # of a process, in a recipe: one that verifies the output, and what opens models beside it


@dataclass(frozen=True)
class FitCost:
    """Seconds. score: of measuring all layers; run: of one recipe, with its evaluation."""

    score: float
    run: float

    @property
    def least(self) -> float:
        """Seconds to measure all layers and to run one recipe."""
        return self.score + self.run

    def said(self, runs: int) -> str:
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
    asked: FitAsked, scored: Sequence[Candidate], full: Sequence[Candidate], tries: int = 0
) -> FitCost | None:
    """The seconds; None where they are not known before, as on a GPU. scored, full: candidates as layers are measured
    with them, and as they are run. tries: measurements of one scheme before the others."""
    (samples, length), held = asked.texts.windows, len(asked.texts.rows)

    def seconds(p: Pass, count: int) -> float | None:
        return asked.planned(p, samples=count, length=length).seconds

    alone = {c.passes[0].name: c.passes[0].without_reference() for c in scored}  # widths take much the same time
    solving = {name: seconds(p, 1) for name, p in alone.items()}
    run = [seconds(p, samples) for p in {c.passes[0].name: c.passes[0] for c in full}.values()]
    once = seconds(alone[scored[0].passes[0].name], samples)
    known = [each for each in (once, *solving.values(), *run) if each is not None]
    if once is None or len(known) <= len(solving) + len(run):
        return None
    of_each = [solving[c.passes[0].name] or 0.0 for c in scored]
    forward = (once - of_each[0]) / max(1, samples - 1) * OF_A_FORWARD  # of a window, with its statistics
    held_out = forward * held * (2 + len(scored) + 2 * tries)
    start = STARTS * min(time.process_time(), LONGEST_START)  # most of what a process has done by now is importing
    return FitCost(
        (1 + tries) * (once + GRADIENTS * forward * min(samples, 8)) + sum(of_each[1:]) + held_out + start,
        max(each for each in run if each is not None) + 2 * forward * held + start,
    )
