"""GPTQ: round column by column, each column making up for the errors before it (arXiv 2210.17323).

Shapes: N outputs, K inputs, G groups, T tokens. X_q [T, K] is the layer's input behind the quantized prefix, X the same
input in the original model. H = X_q^T X_q and M = (X - X_q)^T X_q, both means over tokens.

    minimise over Q on the grid     |X W^T - X_q Q^T|^2  =  tr((W* - Q) H (W* - Q)^T) + const,    W* = W + W M H^-1

Paper -> code: the algorithm, a function of tensors -> `solvers.gptq.gptq`; H^-1's Cholesky rows -> `Problem.upper`
(LDLQ form, same codes); percdamp -> `damp`; act_order -> `act_order`; lazy batch updates -> the blocks of
`column_sweep.sweep`.

Departs from the paper:
- `drift` aims at W* rather than W: it repairs, in this layer, what quantizing the layers before it did to its input.
  The target W + a W D, D = M (H + damp)^-1, is GPTQ at a = 0 and the exact optimum at a = 1. Close relatives are GPTAQ
  (arXiv 2504.02692) and Qronos (arXiv 2505.11695).
- `shrink`: H and D are estimates from T tokens. With few of them (T < 4 K, say) the codes fit what these tokens happen
  to have in common, and do worse than rounding on others. Three closed forms, which fade as T / K grows, prevent it:
  H is shrunk towards its diagonal by as much as lowers its expected squared error the most (Ledoit and Wolf 2004; see
  `solvers.statistics.hessian.Hessian`). D is a ridge regression, whose best damping is K / T over the ratio of signal
  to noise (Dobriban and Wager 2018, arXiv 1507.03003): K / T is added. Of that D, a layer aims at the share a that is
  no noise. Z, which is D from the difference between two halves of the tokens (`contrast`), has the noise of D and
  nothing else:

      E tr(W D H D^T W^T) = signal + noise,  E tr(W Z H Z^T W^T) = noise,  a = signal / (signal + noise)

  This is a James-Stein factor whose noise is measured, for tokens of one text are not independent. Last, with very few
  tokens (`solvers.statistics.hessian.FEW`) a layer gets only what they bear out: its codes are solved by each half of
  them and judged on the other. The drift correction, then GPTQ as a whole, have to win on both, or the layer goes
  without; figure `solution` says what it got, and the run how many layers got less than was asked for.
- `act_order`: "static" visits columns by falling diag(H) with scales fixed beforehand, "group" orders columns inside
  each group and then the groups (GAR, arXiv 2505.14638). Neither needs an index at inference.
- `refit` recomputes each scale in closed form for the codes it has; `sweeps` of cyclic coordinate descent then move
  single codes while that lowers the loss (`solvers.column_sweep`). Free to move every code, they fit noise more than
  the sweep does: H is damped by K / T for them, too, of the part of H off its diagonal that is left.
- `objective=loss` rounds for the predictions of the model (`passes.options.loss_aware`).
- `clip` searches each group's range for the least squared error, weighted by diag(H).
- a weight that an earlier pass has pruned has the code of 0, and no say in a range; survivors make up for it before
  they are rounded (`sparsegpt.fit_survivors`; SparseGPT, arXiv 2301.00774, does both in one sweep).
Departs from the authors' code:
- a group's scale is fitted from weights that carry all feedback so far (the code leaves out the current block's);
- dead channels (never active) get the mean diagonal, are left out of that mean, and keep their rounded weight;
- damping that is too small is raised and reported, never replaced by plain rounding.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.base.errors import InputError, check_least
from compress.passes.options.loss_aware import LossAware
from compress.passes.options.quantize import QuantizeWeights
from compress.passes.protocol.sites import Site
from compress.solvers.gptq import outlier_prices, solve_on_grid
from compress.solvers.hessian_with_drift import Problem
from compress.solvers.outliers import nearest
from compress.solvers.sparsegpt import STEPS
from compress.weights.decision import Decision
from compress.weights.grid import fit_matrix
from compress.weights.matrix import Matrix


@dataclass(frozen=True, kw_only=True)
class GPTQ(LossAware, QuantizeWeights):
    """GPTQ with input-drift correction."""

    name: ClassVar[str] = "gptq"
    keeps_zeros: ClassVar[bool] = True
    nearest_by_whole_range: ClassVar[bool] = True  # where codes are not solved for, `clip` has no say

    clip: bool = True
    """Search each group's range for the least error weighted by diag(H) (fp8: also wider ones)."""

    steps: int = STEPS
    """0 or more: steps in which the remaining weights of a pruned layer compensate for its zeros before rounding; 0:
    while rounding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 0, "steps", unit=" steps")
        grid = self.weight_grid()
        if self.objective == "loss" and grid.type != "int" and grid.levels is None:
            raise InputError(
                f"objective=loss (--effort best) decides integers and floats of 4 or 6 bits; {self.scheme} has float8 "
                "weights: leave it out"
            )
        if self.per_tensor and self.refit:
            raise InputError("refit needs a scale per channel or group; set refit=0 with per_tensor")

    @property
    def group_length(self) -> int | None:
        return self.weight_grid().group_size

    def apply(self, site: Site) -> dict[str, Decision]:
        inputs = self.input_codes(site)
        return {name: replace(made, inputs=inputs.get(name)) for name, made in super().apply(site).items()}

    def nearest(self, site: Site, name: str, dtype: torch.dtype) -> Matrix:
        grid = site.reached(self.weight_grid())
        if self.nearest_by_whole_range:
            grid = grid.plain
        return nearest(site.weights[name].to(dtype), grid, site.scale_dtypes[name], self.outliers)

    def rows(self, site: Site, name: str, target_NK: Tensor, problem: Problem) -> dict[str, Tensor]:
        rows, survivors, dtype = {"weight_NK": target_NK}, target_NK, site.scale_dtypes[name]
        grid = site.reached(self.weight_grid())
        if any(site.kept(n) is not None for n in site.weights):
            kept = site.kept(name)
            rows["kept_NK"] = torch.ones_like(target_NK, dtype=torch.bool) if kept is None else kept
            survivors = target_NK * rows["kept_NK"]
        if self.per_tensor:
            scale, zero = fit_matrix(survivors, grid, dtype)
            rows |= {"scale_NG": scale.expand(len(target_NK), 1), "zero_NG": zero.expand(len(target_NK), 1)}
        if (price_N := outlier_prices(survivors, problem, grid, dtype, self.outliers)) is not None:
            rows["price_N"] = price_N
        return rows

    def solve_rows(self, site: Site, problem: Problem, scale_dtype: torch.dtype, **rows: Any) -> Matrix:
        rows |= {"problem": problem, "grid": site.reached(self.weight_grid()), "scale_dtype": scale_dtype}
        return solve_on_grid(**rows, refit=self.refit, sweeps=self.sweeps, steps=self.steps).weight
