"""LQS: quantized weights, a low-rank correction and sparse outliers (W = Q + L R + S), solved for alternately.

LQER (arXiv 2402.02446) adds to codes the low rank that the layer's outputs miss most; CALDERA (arXiv 2405.18886) makes
codes and low rank in turns, each of what the other leaves.

Shapes: N outputs, K inputs, r ranks. W* and H are those of gptq: what the codes aim at, the Hessian they go by.

    minimise over Q on the grid, L [N, r], R [r, K], S sparse     tr(E H E^T),    E = W* - Q - L R - S

    Q, S     of W* alone: gptq, with its `outliers`
    L R      of W* - Q - S: the exact optimum (`whitened.spectrum`)
    Q, S     of W* - L R: gptq again

and so on, `iterations` times the last two. What is kept, of each layer, is the turn of least loss, and gptq alone is
one of them: it is never worse than that in this loss. Figure `codes_loss` is that of gptq alone.

Paper -> code: whitening by the diagonal (LQER), by H (CALDERA) -> by H; LDLQ -> the sweep of gptq; LPLR, factors of few
bits -> `factor_bits`, the right factor fitted to the left one as stored.

Departs from the papers:
- codes and exact weights are those of gptq with all that it has: drift correction, range search, refit, descent,
  shrinkage. With iterations=0 and without outliers this is LQER under the full Hessian;
- `allocate` shares ranks out between layers by what each takes off the loss of plain rounding in the original model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import InputError, check_least
from compress.passes.gptq import GPTQ
from compress.passes.options.rank_budget import RankBudget
from compress.passes.options.second_order import Result, Solution, Target
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Stage
from compress.solvers.hessian_with_drift import Problem, quadratic
from compress.solvers.low_rank import approximate
from compress.solvers.lqs import Parts, best_turn, in_turns
from compress.weights.decision import Figures
from compress.weights.formats.lowrank import LowRankFactors
from compress.weights.matrix import Matrix
from compress.weights.scheme import Scheme
from compress.weights.terms import Tensors


@dataclass(frozen=True, kw_only=True)
class LQS(RankBudget, GPTQ):
    """Codes, a low rank and exact weights."""

    name: ClassVar[str] = "lqs"
    objective: ClassVar[str] = "layer"  # type: ignore[misc]  # a low rank has no such curvature
    keeps_zeros: ClassVar[bool] = False

    rank: int = 8
    """0 or more: rank of every layer, or with `allocate` what all of them have to share; 0 is no low rank."""

    iterations: int = 4
    """0 or more: rounds of codes and low rank once each has been made; 0 is LQER."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 0, "iterations", unit=" rounds")
        if not self.rank and not self.ranks:
            raise InputError("rank 0 leaves nothing beside what gptq finds; give a rank, or use gptq")

    @property
    def stages(self) -> tuple[Stage, ...]:
        return *self.survey, *super().stages

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        scheme, rank = super().stored(layer, shape, table), self.rank_of(layer, shape)
        if not rank or scheme is None:
            return scheme
        return replace(scheme, terms=(*scheme.terms, LowRankFactors(rank=rank, bits=self.factor_bits)))

    def to_approximate(self, site: Site, name: str) -> Tensor:
        weight = site.weights[name].double()
        return weight - self.nearest(site, name, torch.float64).dequantize()

    def solve(
        self, site: Site, problem: Problem, targets: Mapping[str, Target], solution: Solution
    ) -> dict[str, Result]:
        alone = super().solve(site, problem, targets, solution)
        if solution == "rounding":
            return alone
        values = {name: target for name, (target, _) in targets.items()}
        first = {name: codes for name, (codes, _) in alone.items()}
        codes_of = partial(self.solve_targets, site, problem=problem)
        turns = in_turns(values, first, codes_of, partial(self._low_ranks, site, problem), self.iterations)
        return {name: self._best(site, problem, target, turns[name]) for name, target in values.items()}

    def _low_ranks(self, site: Site, problem: Problem, rests: Mapping[str, Tensor]) -> dict[str, Tensors | None]:
        """The best low rank for the errors of codes and exact weights."""
        owners = site.comm.assign({name: float(min(rest.shape)) for name, rest in rests.items()})
        low: dict[str, Tensors | None] = {}
        for name, rest in rests.items():
            rank, dtype = self.rank_of(name, (len(rest), rest.shape[1])), site.scale_dtypes[name]
            how = (problem.hessian, rank, dtype, self.factor_bits)
            low[name] = approximate(site.comm, owners[name], rest, *how) if rank else None
        return low

    def _best(self, site: Site, problem: Problem, target: Tensor, turns: Sequence[Parts]) -> Result:
        """The turn of least loss of a layer, with the loss of gptq alone and the rank beside its codes."""
        best, codes_loss = best_turn(target, turns, lambda error: quadratic(site.comm, error, problem.hessian))
        energy = quadratic(site.comm, target, problem.hessian) or 1.0
        rank = 0 if best.low is None else best.low.held["left"].shape[1]
        return best.weight, {"codes_loss": codes_loss / energy, "rank": rank}

    def figures(self, site: Site, name: str, weight: Matrix, target: Target, problem: Problem) -> Figures:
        figures = super().figures(site, name, weight, target, problem)
        return {**figures, "codes_loss": figures["loss"], "rank": 0}  # of rounding, which has nothing else
