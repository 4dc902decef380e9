"""SparseGPT as functions of tensors: a weight and the Hessian of its input in, survivors out (arXiv 2301.00774).

Shapes: N outputs, K inputs, g inputs of one block. H [K, K] is the mean of x x^T over the layer's inputs x, U D U^T its
factor. When the sweep comes to a block, the weights w that carry all feedback so far are scored by what zeroing each
would cost if the later ones made up for it (equation 3 of the paper, in the LDLQ form of `sweep`),

    w_j^2 / [H_F^-1]_jj  =  w_j^2 D_j        F: the inputs j ... K

and the lowest scores become zero. A survivor takes its target, whose error is none.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.solvers.column_sweep import BLOCK, DAMP, ActOrder, ColumnRule, Ordered, damped, ordered, sweep
from compress.solvers.gptq import POLISH_DAMP
from compress.solvers.targets import STEPS, settled
from compress.weights.masks import Choice
from compress.weights.survivors import Survivors, survivors


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

    how: a pattern N:M or a share of zeros (`weights.masks.Choice`). H is permuted, damped (`damp` times its mean
    diagonal, more where that is not enough) and factorized here. steps: at most so many of conjugate gradients, in
    which survivors move once the mask is whole; 0 is the paper. polish_damp: damping of H in those; K / T more where T
    tokens are few. scale_dtype: that of the result (the weight's own, if not given). earlier: bool, what an earlier
    mask has left. Raises CompressError where H is not finite.
    """
    seen = ordered(hessian_KK, damp, act_order, None if how.pattern is None else how.pattern.length)
    dtype = weight_NK.dtype if scale_dtype is None else scale_dtype
    work = weight_NK.to(hessian_KK.dtype)
    pruned = partial(prune_ordered, work, seen, how=how, scale_dtype=dtype, earlier_NK=earlier_NK)
    return pruned(steps=steps, polish_damp=polish_damp)


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


def prune_ordered(
    weight_NK: Tensor,
    seen: Ordered,
    *,
    how: Choice,
    scale_dtype: torch.dtype,
    earlier_NK: Tensor | None = None,
    steps: int = 0,
    polish_damp: float = 0.0,
) -> Survivors:
    """`sparsegpt` of rows of a weight, [N, K] in its own column order and the Hessian's dtype. how: what is to be zero.
    earlier: bool, what an earlier mask has left. scale_dtype: that of what is stored."""
    group = BLOCK if how.pattern is None else how.pattern.length
    weight = weight_NK[:, seen.order_K]
    earlier_KN = None if earlier_NK is None else earlier_NK[:, seen.order_K].t().contiguous()
    kept_KN = torch.zeros(weight.t().shape, dtype=torch.bool, device=weight.device)
    rule = MaskRule(how, group, seen.factor.diagonal, kept_KN, earlier_KN)
    values, _ = sweep(weight, seen.factor, rule)
    if steps:
        values = settled(weight, values, damped(seen.hessian_KK, polish_damp), kept_KN.t(), steps)
    return survivors(seen.back(values), seen.back(rule.kept.t()), scale_dtype)
