"""SparseGPT as functions of tensors: a weight and the Hessian of its input in, survivors out (arXiv 2301.00774).

Shapes: N outputs, K inputs, g inputs of one block. H [K, K] is the mean of x x^T over the layer's inputs x, U D U^T its
factor. When the sweep comes to a block, the weights w that carry all feedback so far are scored by what zeroing each
would cost if the later ones made up for it (equation 3 of the paper, in the LDLQ form of `sweep`),

    w_j^2 / [H_F^-1]_jj  =  w_j^2 D_j        F: the inputs j ... K

and the lowest scores become zero. A survivor takes its target, whose error is none.

It makes up for the zeros before it, not for those behind. `fit_survivors` finds, of every row w with the mask m, the v
that is zero where m is and minimises (w - v) H (w - v)^T, H positive definite. Rows have different masks, so a
factorization serves one row alone. Conjugate gradients (Hestenes and Stiefel 1952), preconditioned by the diagonal of
H, take one product with H per step for all rows. No step raises the loss: it falls by a |r|^2, a being the step and r
the preconditioned residual. A row is done once a step gains less than a part of what all its steps have gained. With v
at its optimum, anything else in the mask, q, has the loss of v plus (v - q) H (v - q)^T: rounding the survivors can aim
at v, and has its own errors to make up for, not those of the zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.solvers.column_sweep import BLOCK, ColumnRule, sweep
from compress.solvers.hessian_with_drift import DAMP, POLISH_DAMP, ActOrder, Problem
from compress.weights.masks import Choice
from compress.weights.survivors import Survivors, survivors

STEPS = 64
# A step that gains less than this part of what a row has gained so far is its last.
LEAST_GAIN = 0.01


def sparsegpt(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    *,
    how: Choice,
    damp: float = DAMP,
    act_order: ActOrder = "none",
    steps: int = STEPS,
    polish_damp: float = POLISH_DAMP,
    scale_dtype: torch.dtype | None = None,
    earlier_NK: Tensor | None = None,
) -> Survivors:
    """Prune a weight for the least tr(E H E^T). Pure: no rank, no device, no state.

    how: a pattern N:M or a share of zeros (`weights.masks.Choice`). steps: at most so many of conjugate gradients, in
    which survivors move once the mask is whole; 0 is the paper. scale_dtype: that of the result (the weight's own, if
    not given). earlier: bool, what an earlier mask has left. The others are as in `gptq.gptq`. Raises CompressError
    where H is not finite.
    """
    length = None if how.pattern is None else how.pattern.length
    problem = Problem.of(hessian_KK, damp, act_order, length, polish_damp)
    dtype = weight_NK.dtype if scale_dtype is None else scale_dtype
    work = weight_NK.to(hessian_KK.dtype)
    return prune_by_sweep(work, problem, how=how, scale_dtype=dtype, steps=steps, earlier_NK=earlier_NK)


@dataclass
class MaskRule(ColumnRule):
    """Zero, or the target. The mask of a block is chosen when the sweep comes to it; all [K, N] in sweep order.

    earlier: what a mask before this one has left. kept: of blocks that have begun, what stays.
    """

    how: Choice
    group: int
    cost_K: Tensor
    kept: Tensor
    earlier: Tensor | None = None

    def begin(self, column: int, updated_gN: Tensor) -> None:
        block = slice(column, column + len(updated_gN))
        score_Ng = (updated_gN.square() * self.cost_K[block].unsqueeze(1)).t()
        earlier = None if self.earlier is None else self.earlier[block].t()
        self.kept[block] = self.how.kept(score_Ng, earlier, column).t()

    def decide(self, column: int, target_N: Tensor) -> Tensor:
        return torch.where(self.kept[column], target_N, 0.0)


def prune_by_sweep(
    weight_NK: Tensor,
    problem: Problem,
    *,
    how: Choice,
    scale_dtype: torch.dtype,
    steps: int = 0,
    earlier_NK: Tensor | None = None,
) -> Survivors:
    """`sparsegpt` of rows of a weight, [N, K] in its own column order and the Hessian's dtype."""
    group = BLOCK if how.pattern is None else how.pattern.length
    weight = weight_NK[:, problem.order]
    earlier_KN = None if earlier_NK is None else earlier_NK[:, problem.order].t().contiguous()
    kept_KN = torch.zeros(weight.t().shape, dtype=torch.bool, device=weight.device)
    rule = MaskRule(how, group, problem.diagonal, kept_KN, earlier_KN)
    values, _ = sweep(weight, problem, rule)
    if steps:
        values = fit_survivors(weight, values, problem.polish_hessian(), kept_KN.t(), steps)
    return survivors(problem.restore(values), problem.restore(kept_KN.t()), scale_dtype)


def fit_survivors(
    weight_NK: Tensor, values_NK: Tensor, hessian_KK: Tensor, kept_NK: Tensor, steps: int = STEPS
) -> Tensor:
    """[N, K] values in the mask after at most so many steps from `values`, which are zero where nothing is kept."""
    mask = kept_NK.to(weight_NK.dtype)
    scale_K = hessian_KK.diagonal().reciprocal()
    fitted = values_NK.clone()
    residual = (weight_NK - values_NK) @ hessian_KK * mask
    downhill = residual * scale_K
    direction, slope_N = downhill, (residual * downhill).sum(1, keepdim=True)
    gained_N, rows_N = torch.zeros_like(slope_N), torch.arange(len(fitted), device=fitted.device)
    for _ in range(steps):
        product = direction @ hessian_KK * mask
        step_N = _divide(slope_N, (direction * product).sum(1, keepdim=True))
        fitted[rows_N] += step_N * direction
        gain_N = step_N * slope_N
        gained_N = gained_N + gain_N
        # Each row by itself, whichever rows a rank has beside it.
        going = (gain_N > LEAST_GAIN * gained_N).squeeze(1)
        if not bool(going.all()):
            rows_N, mask, gained_N, slope_N, step_N = (t[going] for t in (rows_N, mask, gained_N, slope_N, step_N))
            residual, product, direction = (t[going] for t in (residual, product, direction))
        if not len(rows_N):
            break
        residual = residual - step_N * product
        downhill = residual * scale_K
        before_N, slope_N = slope_N, (residual * downhill).sum(1, keepdim=True)
        direction = downhill + _divide(slope_N, before_N) * direction
    return fitted


def _divide(above: Tensor, below: Tensor) -> Tensor:
    """The quotient; 0 of a row that has arrived."""
    return torch.where(below > 0, above / below.clamp(min=torch.finfo(below.dtype).tiny), 0.0)
