"""SmoothQuant as functions of tensors: the strength with which inputs' ranges move into weights (Xiao et al., arXiv
2211.10438).

Shapes: N outputs, K inputs of a layer, C channels of what makes its input (K = C, but for heads that are shared), M
tokens.

    Y = (X diag(s)^-1) (diag(s) W^T)       s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)                      (equation 4)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.solvers.candidates import least_loss
from compress.weights.grid import Grid, fake_quantize, scale_of_range
from compress.weights.rounding import ActivationCodes

# Strengths that are tried: from little to nearly all of the input's range.
ALPHAS = tuple(a / 20 for a in range(6, 20))


def smoothquant(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    grid: Grid,
    input_grid: Grid,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, float | str, float]:
    """The scales [K] of one layer, float32; their alpha, or "none"; their loss beside that of s = 1. Pure: no rank, no
    device, no state.

    x: sampled inputs, of which the whole range counts. grid: of the weight. input_grid: of x / s, one range for each
    token (granularity "token") or a fixed one, in `scale_dtype`. Round x / s and weight * s afterwards.
    """
    x, weight = x_MK.float(), weight_NK.float()
    lowest, highest = x.amin(0), x.amax(0)
    tried = candidates(torch.maximum(lowest.abs(), highest.abs()), weight.abs().amax(0))
    losses = [
        scaled_loss(x, weight, s_K, input_codes((lowest, highest), s_K, input_grid, scale_dtype), grid) for s_K in tried
    ]
    return best(tried, torch.stack(losses))


def smoothing(largest_C: Tensor, heaviest_C: Tensor, alpha: float) -> Tensor:
    """s [C] = max|X|^alpha / max|W|^(1 - alpha), around 1; 1 for channels that are never active or never used."""
    live = (largest_C > 0) & (heaviest_C > 0)
    s = largest_C.clamp(min=torch.finfo(torch.float32).tiny).log() * alpha
    s = s - heaviest_C.clamp(min=torch.finfo(torch.float32).tiny).log() * (1 - alpha)
    if live.any():
        s = s - s[live].mean()
    return torch.where(live, s, torch.zeros_like(s)).exp()


def candidates(largest_C: Tensor, heaviest_C: Tensor) -> list[Tensor]:
    """No scaling, then that of each of `ALPHAS`, [C] each."""
    return [torch.ones_like(largest_C), *(smoothing(largest_C, heaviest_C, a) for a in ALPHAS)]


def best(tried: Sequence[Tensor], losses: Tensor) -> tuple[Tensor, float | str, float]:
    """(The scales of least loss, their alpha or "none", their loss as a part of that of the first.)"""
    least, share = least_loss(losses)
    return tried[least], ALPHAS[least - 1] if least else "none", share


def scaled_loss(x_MK: Tensor, weight_NK: Tensor, s_K: Tensor, inputs: ActivationCodes, grid: Grid) -> Tensor:
    """Squared error of a layer's outputs, float64, where inputs and weight are rounded behind a scaling."""
    rounded = inputs.fake_quantize(x_MK / s_K)
    values = fake_quantize(weight_NK * s_K, grid, torch.float32)
    return (rounded @ values.t() - x_MK @ weight_NK.t()).double().square().sum()


def input_codes(extremes: tuple[Tensor, Tensor], s_K: Tensor, grid: Grid, scale_dtype: torch.dtype) -> ActivationCodes:
    """The rounding of x / s: a range for each token or group of it, a fixed one for each input (granularity "channel")
    or for all of them. extremes: the lowest and the highest of x, [K] each."""
    if grid.granularity in ("token", "group"):
        return ActivationCodes(grid)
    lowest, highest = (extreme / s_K for extreme in extremes)
    if grid.granularity != "channel":
        lowest, highest = lowest.amin(), highest.amax()
    lo, hi = lowest.clamp(max=0).reshape(1, -1), highest.clamp(min=0).reshape(1, -1)
    scale, zero_point = scale_of_range(lo, hi, grid, scale_dtype)
    return ActivationCodes(grid, scale, None if grid.symmetric else zero_point.to(torch.int8))
