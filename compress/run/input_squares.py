"""The squares of every layer's inputs in the original model, summed in one walk that changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from torch import Tensor

from compress.calibration.stats import SquareSum
from compress.model.calls import without_cache
from compress.passes.protocol.base import Pass
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Finding, Settled, Stage, Survey
from compress.run.pipeline import captured
from compress.run.walk.state import Run
from compress.run.walk.survey import surveyed

Squares = tuple[Tensor, int]  # (their sums [K], float64; tokens)


@dataclass(frozen=True, kw_only=True)
class InputSquares(Pass):
    """Look at the inputs of layers, and decide nothing. found: takes what was seen, by layers."""

    name: ClassVar[str] = "input-squares"

    found: dict[str, Squares] = field(default_factory=dict, compare=False, repr=False)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Survey({"squares": SquareSum}, self._look, self._settle),)

    def _look(self, site: Site) -> Mapping[str, Squares]:
        return dict.fromkeys(site.weights, site.stats["squares"])

    def _settle(self, findings: Mapping[str, Finding]) -> Settled:
        self.found.update({name: finding.parts[0] for name, finding in findings.items()})
        return Settled(self)


def input_squares(this: Run) -> dict[str, Squares]:
    """{layer: squares of its inputs} of a run whose only pass is `InputSquares`."""
    (looking,) = this.plan.passes
    assert isinstance(looking, InputSquares)
    this.steps.begin()
    with without_cache(this.model):
        surveyed(this, partial(captured, this))
    return looking.found
