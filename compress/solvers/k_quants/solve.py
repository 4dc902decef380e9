"""K-quants as functions of tensors: a weight and the Hessian of its input in, the bytes of super-blocks out.

Shapes: N outputs, K inputs. `passes.k_quants` has the equations, and says where this departs from GPTQ.
"""

from functools import partial

import torch
from torch import Tensor

from compress.solvers.column_sweep import DAMP, Ordered, damped, ordered, sweep
from compress.solvers.gptq import POLISH_DAMP, Solved
from compress.solvers.k_quants.rule import KRule, refit_blocks
from compress.solvers.polish import Polish
from compress.weights.formats.k_quants import KQuant


def k_quant(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    *,
    format_: KQuant,
    damp: float = DAMP,
    refit: int = 0,
    sweeps: int = 0,
    polish_damp: float = POLISH_DAMP,
) -> Solved:
    """Quantize a weight to super-blocks for the least tr(E H E^T). Pure: no rank, no device, no state.

    H is damped (`damp` times its mean diagonal, more where that is not enough) and factorized here. refit, sweeps:
    rounds of each once the sweep is over. polish_damp: damping of H in those; K / T more where T tokens are few. Raises
    CompressError where H is not finite.
    """
    work = weight_NK.to(hessian_KK.dtype)
    seen = ordered(hessian_KK, damp, "none", format_.layout.group)
    return solve_blocks(work, seen, format_=format_, refit=refit, sweeps=sweeps, polish_damp=polish_damp)


def solve_blocks(
    weight_NK: Tensor,
    seen: Ordered,
    *,
    format_: KQuant,
    scale_dtype: torch.dtype | None = None,
    refit: int = 0,
    sweeps: int = 0,
    polish_damp: float = POLISH_DAMP,
) -> Solved:
    """Super-blocks for the least tr(E H E^T): as `gptq.solve_ordered`. scale_dtype: not looked at, as the format has
    its own."""
    weight = weight_NK[:, seen.order_K]
    rule = KRule.of(weight, seen.order_K, seen.factor.diagonal, format_)
    values, loss = sweep(weight, seen.factor, rule)
    if refit or sweeps:
        state = Polish(weight, values, rule, damped(seen.hessian_KK, polish_damp))
        loss = state.rounds(partial(refit_blocks, state, rule), refit, sweeps)
    return Solved(rule.stored(seen.back(rule.codes.t())), loss, seen.factor.damp)
