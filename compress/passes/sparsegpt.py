"""SparseGPT: prune column by column, survivors making up for what became zero (arXiv 2301.00774).

Shapes: N outputs, K inputs, B inputs of one block. X_q [T, K] is the layer's input behind the pruned prefix, X the same
input in the original model; H = X_q^T X_q = U D U^T, a mean over tokens.

    minimise over a mask and Q of zeros where it is    |X W^T - X_q Q^T|^2  =  tr((W* - Q) H (W* - Q)^T) + const

When the sweep comes to a block (M inputs for N:M, 128 for a share), the weights w that carry all feedback so far are
scored by what zeroing each would cost, if the later ones made up for it,

    w_j^2 / [H_F^-1]_jj  =  w_j^2 D_j        F: the inputs j ... K

(`sweep` has the proof), and the lowest scores become zero. A survivor takes its target, whose error is none.

Paper -> code: the column update -> `sweep.sweep`; adaptive mask selection, M_(:, j:(j+B_s)) ->
`solvers.sparsegpt.MaskRule.begin`; its blocksize B_s -> BLOCK or M; the percentile of a block -> `per`
(the paper ranks a block of all outputs: per=layer); joint quantization -> a pass that rounds after this one, to which a
mask is given: `sparsegpt` then `gptq` in a recipe.

Departs from the paper:
- `drift`, `shrink` and what very few tokens bear out are those of gptq (`passes.gptq` has the equations); where nothing
  is borne out, a layer gets the mask of wanda, and its survivors stay.
- a survivor of the sweep makes up for the zeros before it, not for those behind. Once the mask is whole, `steps` of
  conjugate gradients move the survivors to the optimum in it (`sparsegpt.fit_survivors`).
- of each block just so many become zero as make the share of all inputs up to there right; equals by their order.
- `allocate` shares one budget of zeros out between layers (`passes.options.sparsity_budget`); `permute` lets inputs
  change groups of N:M beforehand, by the scores of wanda (`solvers.permutation`).
Departs from the authors' code:
- the share is by output unless `per` says layer, so that outputs are independent and every rank prunes its own.
- dead inputs cost the mean diagonal, and are not zeroed for being dead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.base.errors import InputError, check_least
from compress.passes.options.second_order import SecondOrder, Solution
from compress.passes.options.sparsity_budget import SparsityBudget
from compress.passes.protocol.sites import Site
from compress.passes.protocol.solve import Rows, Solve, solve_rows
from compress.solvers.hessian_with_drift import Problem
from compress.solvers.scores import wanda
from compress.solvers.sparsegpt import STEPS, prune_by_sweep
from compress.solvers.statistics.hessian import HessianResult
from compress.weights.decision import Decision
from compress.weights.masks import Choice
from compress.weights.matrix import Matrix
from compress.weights.survivors import Survivors


@dataclass(frozen=True, kw_only=True)
class SparseGPT(SparsityBudget, SecondOrder):
    """The weights that cost least become zero, and the others make up for them."""

    name: ClassVar[str] = "sparsegpt"
    nearest_loss: ClassVar[str] = "wanda_loss"
    called: ClassVar[Mapping[Solution, str]] = {
        "rounding": "wanda",
        "gptq without drift": "sparsegpt without drift",
        "gptq": "sparsegpt",
    }

    steps: int = STEPS
    """0 or more: at most so many steps of conjugate gradients, in which survivors move once the mask is whole, until a
    step gains little; 0 is the paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 0, "steps")
        if self.of_each is not None and self.act_order == "static":
            raise InputError(
                f"act_order static visits inputs apart that {self.pattern} prunes together; allowed: none, group"
            )

    @property
    def group_length(self) -> int | None:
        return None if self.of_each is None else self.of_each.length

    def apply(self, site: Site) -> dict[str, Decision]:
        decisions = {}
        for name, (weight, figures) in self.solve_site(site).items():
            assert isinstance(weight, Survivors)
            decisions[name] = weight.decision(figures)
        return decisions

    def nearest(self, site: Site, name: str, dtype: torch.dtype) -> Survivors:
        statistics: HessianResult = site.stats["hessian"]
        norm_K = statistics.hessian.diagonal().clamp(min=0).sqrt()
        return self.by_score(site, name, wanda(site.weights[name], norm_K))

    def rows(self, site: Site, name: str, target_NK: Tensor, problem: Problem) -> dict[str, Tensor]:
        rows = {"weight_NK": target_NK}
        if any(site.kept(n) is not None for n in site.weights):
            earlier = site.kept(name)
            rows["earlier_NK"] = torch.ones_like(target_NK, dtype=torch.bool) if earlier is None else earlier
        return rows

    def solve_rows(self, site: Site, problem: Problem, scale_dtype: torch.dtype, **rows: Any) -> Matrix:
        prune = partial(prune_by_sweep, how=self.choice(""), steps=self.steps)
        return prune(problem=problem, scale_dtype=scale_dtype, **rows)

    def solve_targets(self, site: Site, targets: Mapping[str, Tensor], problem: Problem) -> dict[str, Matrix]:
        if self.per == "row" and not self.sparsities:
            return super().solve_targets(site, targets, problem)
        solved = {}
        for name, target in targets.items():
            prune = partial(prune_by_sweep, problem=problem, how=self.choice(name), steps=self.steps)
            solve = partial(prune, scale_dtype=site.scale_dtypes[name])
            solved[name] = self._solve_alone(site, self.rows(site, name, target, problem), solve)
        return solved

    def _solve_alone(self, site: Site, rows: Rows, solve: Solve) -> Matrix:
        """One layer; where its outputs compete every rank solves all of them."""
        return solve_rows(site.comm, rows, solve) if self.per == "row" else solve(**rows)

    def trial(self, site: Site, statistics: HessianResult) -> Callable[[str, float], Tensor]:
        problem = replace(self, drift=0.0).problem(statistics)

        def prune(name: str, share: float) -> Tensor:
            how = Choice(None, share, together=self.per == "layer")
            solve = partial(prune_by_sweep, problem=problem, how=how, scale_dtype=torch.float64)
            return self._solve_alone(site, {"weight_NK": site.weights[name].double()}, solve).dequantize()

        return prune
