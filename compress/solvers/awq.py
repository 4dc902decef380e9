"""AWQ as functions of tensors: scales of input channels by which a weight rounds better (Lin et al., arXiv 2306.00978).

Shapes: N outputs, K inputs of a layer, C channels of what makes its input (K = C, but for heads that are shared). H
[K, K] is the mean of x x^T over the layer's inputs x.

    minimise over s    tr(E H E^T),    E = Q(W diag(s)) diag(s)^-1 - W                                  (equations 4, 5)
    s = mean|X|^a   or   mean|X|^a / mean|W|^(1 - a),        a = 0, 1/20, ..., 19/20,     or s = 1
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.solvers.candidates import least_loss
from compress.weights.grid import Grid, Quantized, fake_quantize, fit_matrix, quantize

POWERS = tuple(a / 20 for a in range(20))
# Scales below this are set to it, relative to their geometric mean (the authors' code).
SMALLEST = 1e-4


def awq(
    weight_NK: Tensor, hessian_KK: Tensor, mean_K: Tensor, *, grid: Grid, scale_dtype: torch.dtype | None = None
) -> tuple[Tensor, str, float]:
    """The scales [K] of one layer, float64; the power that they are of; their loss beside that of s = 1. Pure: no rank,
    no device, no state.

    mean: of |x| for each input, at least 0. scale_dtype: that of the grid's stored scales (the weight's own, if not
    given). `round_rows(weight * s, ...)` is what is stored, and x / s what the layer is given.
    """
    work, dtype = weight_NK.to(hessian_KK.dtype), weight_NK.dtype if scale_dtype is None else scale_dtype
    plain = grid.plain
    tried = candidates(mean_K.double(), weight_NK.double().abs().mean(0))
    losses = [scaled_loss(work, s_K.to(work.dtype), hessian_KK, plain, dtype).sum().double() for s_K in tried.values()]
    return best(tried, torch.stack(losses))


def candidates(mean_C: Tensor, size_C: Tensor) -> dict[str, Tensor]:
    """{name: scales [C]}, those of no scaling first. mean: of |x| of each channel; size: of |w| that multiplies it."""
    found = {"none": torch.ones_like(mean_C)}
    found |= {f"{a:g}": balance(mean_C**a) for a in POWERS[1:]}
    found |= {f"{a:g} with weights": balance(mean_C**a / size_C ** (1 - a)) for a in POWERS}
    return found


def best(tried: Mapping[str, Tensor], losses: Tensor) -> tuple[Tensor, str, float]:
    """(The scales of least loss, their name, their loss as a part of that of the first.)"""
    least, share = least_loss(losses)
    return list(tried.values())[least], list(tried)[least], share


def scaled_loss(
    weight_NK: Tensor,
    s_K: Tensor,
    hessian_KK: Tensor,
    grid: Grid,
    scale_dtype: torch.dtype,
    rows: slice = slice(None),
) -> Tensor:
    """[N, K] whose sum is tr(E H E^T) where W is rounded behind a scaling, of some rows. All of these tensors have the
    Hessian's dtype."""
    whole = grid.granularity == "tensor"  # one scale for all rows
    given = weight_NK if whole else weight_NK[rows]
    values = fake_quantize(given * s_K, grid, scale_dtype)
    error = (values / s_K - given)[rows if whole else slice(None)]
    return (error @ hessian_KK) * error


def balance(s_C: Tensor) -> Tensor:
    """s with its largest and smallest value around 1; channels without a finite, positive scale get 1."""
    usable = torch.isfinite(s_C) & (s_C > 0)
    if not usable.any():
        return torch.ones_like(s_C)
    live = s_C[usable]
    s_C = (s_C / (live.amax() * live.amin()).sqrt()).clamp(min=SMALLEST)
    return torch.where(usable, s_C, torch.ones_like(s_C))


def round_rows(
    weight_NK: Tensor, hessian_KK: Tensor, grid: Grid, scale_dtype: torch.dtype, clip: bool = True
) -> Quantized:
    """Each row to the nearest codes of its whole range or (clip) of the one that `grid` searches, whichever has the
    smaller error; all rows alike where they share a scale."""
    whole = quantize(weight_NK, grid.plain, scale_dtype)
    if not (clip and grid.searches) or len(weight_NK) == 0:
        return Quantized(whole.codes, whole.scale, whole.zero_point, grid)
    scale, zero_point = fit_matrix(weight_NK, grid, scale_dtype, hessian_KK.diagonal())
    clipped = quantize(weight_NK, grid, scale_dtype, scale, zero_point)
    loss_N = []
    for found in (whole, clipped):
        error = found.dequantize(weight_NK.dtype) - weight_NK
        loss_N.append(((error @ hessian_KK) * error).sum(1))
    better = loss_N[1] < loss_N[0]
    if grid.granularity == "tensor":
        better = (loss_N[1].sum() < loss_N[0].sum()).expand(len(weight_NK))
    pick = better.unsqueeze(1)
    chosen = pick[: len(whole.scale)]
    zero = None
    if whole.zero_point is not None and clipped.zero_point is not None:
        zero = torch.where(chosen, clipped.zero_point, whole.zero_point)
    return Quantized(
        torch.where(pick, clipped.codes, whole.codes), torch.where(chosen, clipped.scale, whole.scale), zero, grid
    )
