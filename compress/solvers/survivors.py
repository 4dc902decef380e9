"""The best values of weights whose mask is given: least squares in the mask, by conjugate gradients.

Shapes: N outputs, K inputs. Of every row w with the mask m

    minimise over v, zero where m is      (w - v) H (w - v)^T          H [K, K] positive definite

Rows have different masks, so a factorization serves one row alone; conjugate gradients (Hestenes and Stiefel 1952),
preconditioned by the diagonal of H, take a product with H per step for all rows at once. No step raises the loss: it
falls by a |r|^2, a being the step and r the preconditioned residual. A row is done once a step gains less than a part
of what all its steps have gained.

With v at its optimum, the loss of anything else in the mask, q, is that of v plus (v - q) H (v - q)^T: what rounds
the survivors can aim at v, and has its own errors to make up for, not those of the zeros.
"""

import torch
from torch import Tensor

STEPS = 64
# A step that gains less than this part of what a row has gained so far is its last.
LEAST_GAIN = 0.01


def settled(weight_NK: Tensor, values_NK: Tensor, hessian_KK: Tensor, kept_NK: Tensor, steps: int = STEPS) -> Tensor:
    """[N, K] values in the mask after at most so many steps from `values`, which are zero where nothing is kept."""
    kept = kept_NK.to(weight_NK.dtype)
    scale_K = hessian_KK.diagonal().reciprocal()
    found = values_NK.clone()
    residual = (weight_NK - values_NK) @ hessian_KK * kept
    downhill = residual * scale_K
    direction, slope_N = downhill, (residual * downhill).sum(1, keepdim=True)
    gained_N, rows_N = torch.zeros_like(slope_N), torch.arange(len(found), device=found.device)
    for _ in range(steps):
        product = direction @ hessian_KK * kept
        step_N = _over(slope_N, (direction * product).sum(1, keepdim=True))
        found[rows_N] += step_N * direction
        gain_N = step_N * slope_N
        gained_N = gained_N + gain_N
        # Each row by itself, whichever rows a rank has beside it.
        going = (gain_N > LEAST_GAIN * gained_N).squeeze(1)
        if not bool(going.all()):
            rows_N, kept, gained_N, slope_N, step_N = (t[going] for t in (rows_N, kept, gained_N, slope_N, step_N))
            residual, product, direction = (t[going] for t in (residual, product, direction))
        if not len(rows_N):
            break
        residual = residual - step_N * product
        downhill = residual * scale_K
        before_N, slope_N = slope_N, (residual * downhill).sum(1, keepdim=True)
        direction = downhill + _over(slope_N, before_N) * direction
    return found


def _over(above: Tensor, below: Tensor) -> Tensor:
    """The quotient; 0 of a row that has arrived."""
    return torch.where(below > 0, above / below.clamp(min=torch.finfo(below.dtype).tiny), 0.0)
