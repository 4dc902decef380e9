"""The time that `fit` takes, before it begins: from the rates of this machine (`api.forecast.duration`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from compress.api.forecast.forecast import plan
from compress.passes.gptq import GPTQ
from compress.search.candidate import Candidate

# The time of a forward of the whole model over that of its blocks, which a plan tells, at most.
OF_A_FORWARD = 2.0
GRADIENTS = 3  # forwards that a backward pass takes, with the forward before it


@dataclass(frozen=True)
class FitCost:
    """Seconds. score: of measuring all layers; run: of one recipe, with its evaluation."""

    score: float
    run: float

    def said(self, runs: int) -> str:
        """The estimate in words, for so many recipes."""
        total = self.score + runs * self.run
        return (
            f"about {in_words(total)}: {in_words(self.score)} to measure layers, {in_words(self.run)} for each recipe"
        )


def in_words(seconds: float) -> str:
    """A length of time to two digits."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def cost_of_fit(
    model: str, candidates: Sequence[Candidate], full: GPTQ, ignore: Sequence[str], windows: tuple[int, int], held: int
) -> FitCost | None:
    """The seconds; None where they are not known before, as on a GPU. windows: (number, tokens) of calibration data;
    held: windows of held-out text, as long."""
    samples, length = windows
    scored = candidates[0].passes[0].without_reference()
    seconds = [
        plan(model, p, ignore=ignore, samples=s, length=length).seconds
        for p, s in ((scored, samples), (scored, 1), (full, samples))
    ]
    once, solving, run = seconds
    if once is None or solving is None or run is None:
        return None
    forward = (once - solving) / max(1, samples - 1) * OF_A_FORWARD  # of a window, with its statistics
    held_out = forward * held * (2 + len(candidates))
    return FitCost(
        once + (len(candidates) - 1) * solving + GRADIENTS * forward * min(samples, 8) + held_out,
        run + 2 * forward * held,
    )
