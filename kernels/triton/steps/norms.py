"""Norms of rows inside of other kernels: RMS and layer norms of one step's tokens, with torch's roundings."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.step_functions import Norm


class RowNorm(NamedTuple):
    """A norm over rows: weight and bias [size] in any float dtype, or None."""

    variant: Norm
    weight: Tensor | None
    bias: Tensor | None
    epsilon: float


NO_NORM = -1
NO_NORM_PARTS = RowNorm(Norm.RMS, None, None, 0.0)
_RMS = tl.constexpr(int(Norm.RMS))
_RMS_PLUS_ONE = tl.constexpr(int(Norm.RMS_PLUS_ONE))
LAYER = tl.constexpr(int(Norm.LAYER))


@triton.jit
def row_statistics(x_ptr, rows, inside, K, epsilon, ROWS: tl.constexpr, CHUNK: tl.constexpr, NORM: tl.constexpr):
    """(Mean, or 0 for an RMS norm, and 1 / deviation), fp32 [ROWS], of rows of K numbers that begin at x_ptr + rows."""
    k = tl.arange(0, CHUNK)
    mean = tl.zeros((ROWS,), tl.float32)
    if NORM == LAYER:
        for start in range(0, K, CHUNK):
            kept = inside[:, None] & (start + k < K)[None, :]
            x = tl.load(x_ptr + rows[:, None] + (start + k)[None, :], mask=kept, other=0.0)
            mean += tl.sum(x.to(tl.float32), 1)
        mean /= K
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, K, CHUNK):
        kept = inside[:, None] & (start + k < K)[None, :]
        x = tl.load(x_ptr + rows[:, None] + (start + k)[None, :], mask=kept, other=0.0).to(tl.float32)
        x = tl.where(kept, x - mean[:, None], 0.0)
        squares += tl.sum(x * x, 1)
    return mean, tl.rsqrt(squares / K + epsilon)


@triton.jit
def normalize(x, mean, inverse, weight_ptr, bias_ptr, k, inside, NORM: tl.constexpr, DT: tl.constexpr):
    """Columns k of rows x, fp32 [rows, columns], normalized, in DT."""
    x = (x - mean[:, None]) * inverse[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        if NORM == _RMS:
            x = x.to(DT).to(tl.float32) * weight
        elif NORM == _RMS_PLUS_ONE:
            x = x * (weight + 1)
        else:
            x = x * weight
    if bias_ptr is not None:
        x += tl.load(bias_ptr + k, mask=inside, other=0.0).to(tl.float32)[None, :]
    return x.to(DT)
