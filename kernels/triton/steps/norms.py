"""Norms of the tokens of a step, RMS and layer norms with torch's roundings: inside of kernels, or by themselves."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.step_functions import Norm
from compress.kernels.triton.planar_gemm import INTERPRET, TRITON_DTYPE
from compress.kernels.tuning.table import bucket


class RowNorm(NamedTuple):
    """A norm over rows: weight and bias [size] in any float dtype, or None."""

    variant: Norm
    weight: Tensor | None
    bias: Tensor | None
    epsilon: float


NO_NORM = -1
NO_NORM_PARTS = RowNorm(Norm.RMS, None, None, 0.0)
NORM_CHUNK = 4096  # numbers that a program of 4 warps loads at once
_RMS = tl.constexpr(int(Norm.RMS))
_RMS_PLUS_ONE = tl.constexpr(int(Norm.RMS_PLUS_ONE))
LAYER = tl.constexpr(int(Norm.LAYER))


@triton.jit
def row_statistics(x_ptr, K, epsilon, CHUNK: tl.constexpr, NORM: tl.constexpr):
    """(Mean, or 0 for an RMS norm, and 1 / deviation), fp32, of K numbers."""
    k = tl.arange(0, CHUNK)
    mean = 0.0
    if NORM == LAYER:
        sums = tl.zeros((CHUNK,), tl.float32)
        for start in range(0, K, CHUNK):
            sums += tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        mean = tl.sum(sums, 0) / K
    squares = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, K, CHUNK):
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        x = tl.where(start + k < K, x - mean, 0.0)
        squares += x * x
    return mean, tl.rsqrt(tl.sum(squares, 0) / K + epsilon)


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


@triton.jit
def norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    K,
    epsilon,
    CHUNK: tl.constexpr,
    NORM: tl.constexpr,
    DT: tl.constexpr,
):
    """x and out [rows, K] contiguous. Grid: (rows,)."""
    x_ptr += tl.program_id(0).to(tl.int64) * K
    out_ptr += tl.program_id(0).to(tl.int64) * K
    mean, inverse = row_statistics(x_ptr, K, epsilon, CHUNK, NORM)
    zero = tl.zeros((1,), tl.float32)
    for start in range(0, K, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < K
        x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = normalize(x, zero + mean, zero + inverse, weight_ptr, bias_ptr, column, inside, NORM, DT)
        tl.store(out_ptr + column[None, :], x.to(out_ptr.dtype.element_ty), mask=inside[None, :])


def norm_rows(x_MK: Tensor, norm: RowNorm) -> Tensor:
    """The rows of x, fp16 or bf16, contiguous, normalized."""
    M, K = x_MK.shape
    out_MK = torch.empty_like(x_MK)
    norm_kernel[(M,)](
        x_MK,
        norm.weight,
        norm.bias,
        out_MK,
        K,
        norm.epsilon,
        CHUNK=min(NORM_CHUNK, bucket(K)),
        NORM=int(norm.variant),
        DT=tl.float32 if INTERPRET else TRITON_DTYPE[x_MK.dtype],
        num_warps=4,
    )
    return out_MK
