"""Rounding for the loss of the model instead of a layer's own: an option of the passes that solve column by column.

With g the gradient by a layer's output of the KL to the original, drawn from its own softmax
(`engine.walk.output_gradients`), the pass minimises tr(H_O E H E^T) for H_O = E g g^T, where tokens count in H by |g|^2
(three quarters, less as few tokens make noise of H_O: the rest all alike). Outputs make up for each other's errors in
runs of 1024, in the sweep, in `refit` and in descent (`solvers.output_feedback`). Close relatives: YAQA (arXiv
2505.22988), GuidedQuant (arXiv 2505.07004).

It takes a backward pass through the original, a block at a time. Convolutions, stacked experts and pruned layers are
rounded for what they return; the run says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Literal, get_args

import torch
from torch import Tensor

from compress.base.errors import check_least, one_of
from compress.passes.options.second_order import SecondOrder, Target
from compress.passes.protocol.sites import Site
from compress.passes.protocol.solve import solve_stacked
from compress.passes.protocol.stages import Decide
from compress.solvers.hessian_with_drift import Problem
from compress.solvers.output_feedback import relied_curvature
from compress.weights.decision import Figures
from compress.weights.matrix import Matrix, moved

Objective = Literal["layer", "loss"]
CPU = torch.device("cpu")
# Rounds of refit and descent for the loss, for each round that a layer's own error has.
COUPLED_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class LossAware(SecondOrder):
    """A pass that rounds for the error of what a layer returns, or for the loss of the model. Its `solve_rows` takes
    `outputs_NS`, H_O in runs of S outputs."""

    refit: int = 2
    """0 or more: rounds of fitting scales to the codes, once the sweep is over."""

    sweeps: int = 2
    """0 or more: rounds of coordinate descent on single codes, once the sweep is over."""

    objective: Objective = "layer"
    """Least error of what a layer returns, or of the model's predictions as far as their curvature tells (loss)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 0, "refit", "sweeps", unit=" rounds")
        one_of("objective", self.objective, get_args(Objective))

    @property
    def decide_stage(self) -> Decide:
        return replace(super().decide_stage, curvature=self.objective == "loss")

    def solve_targets(self, site: Site, targets: Mapping[str, Tensor], problem: Problem) -> dict[str, Matrix]:
        """Layers of which the curvature is known each by itself, runs of their rows together; the others as ever."""
        solved: dict[str, Matrix] = {}
        for name in coupled_layers(site):
            rows = self.rows(site, name, targets[name], problem)
            rows["outputs_NS"] = relied_curvature(site.stats["curvature"][name].of_outputs).to(targets[name])
            together = lcm(rows["outputs_NS"].shape[1], self.together)
            solve = partial(self._solve_coupled, site, problem)
            solved |= solve_stacked(site.rows({name: slice(None)}), {name: rows}, solve, together)
        rest = {name: slice(None) for name in targets if name not in solved}
        return solved | (super().solve_targets(site.rows(rest), {n: targets[n] for n in rest}, problem) if rest else {})

    def _solve_coupled(self, site: Site, problem: Problem, scale_dtype: torch.dtype, **rows: Tensor) -> Matrix:
        """`solve_rows`, with more rounds, by the loops that are compiled for float32 on a CPU: one output after
        another."""
        longer = replace(self, refit=COUPLED_ROUNDS * self.refit, sweeps=COUPLED_ROUNDS * self.sweeps)
        device, problem = rows["weight_NK"].device, problem.converted(CPU, torch.float32)
        here = {name: t.to(CPU, torch.float32 if t.is_floating_point() else t.dtype) for name, t in rows.items()}
        return moved(longer.solve_rows(site, problem, scale_dtype, **here), device)

    def figures(self, site: Site, name: str, weight: Matrix, target: Target, problem: Problem) -> Figures:
        figures = super().figures(site, name, weight, target, problem)
        if self.objective == "layer":
            return figures
        why = "no gradient of its outputs" if name not in site.stats.get("curvature", ()) else "pruned"
        return {**figures, "objective": "loss" if name in coupled_layers(site) else f"layer: {why}"}


def coupled_layers(site: Site) -> list[str]:
    """The layers whose outputs are decided together: their curvature is known, and no weight is pruned."""
    pruned = any(site.kept(name) is not None for name in site.weights)
    return [] if pruned else [name for name in site.weights if name in site.stats.get("curvature", ())]
