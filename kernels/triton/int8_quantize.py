"""Activations to int8, rounded as `reference` rounds them: one row at a time by its own scale, or all by a given one.

`quantize_tokens_kernel`: one row per program, in one read of the row from memory (the second is served by cache).

`quantize_static_kernel`: one piece of a row per program; scale and zero point come from calibration and are read from
memory, so that a captured graph follows them.

Divisions are correctly rounded: a reciprocal would move values across a rounding boundary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.tuning.table import bucket, cdiv

# Elements of a row that one program holds at a time, and the warps that share them.
ROW_BLOCK = 8192
ROW_WARPS = 8
STATIC_BLOCK = 2048
STATIC_WARPS = 4

# Adding and subtracting 1.5 * 2^23 rounds an fp32 below 2^22 to the nearest integer, ties to even.
_ROUND = tl.constexpr(12582912.0)
_ROUND_LIMIT = tl.constexpr(4194304.0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def round_even(x):
    """fp32 to the nearest integer, ties to even. Beyond 2^22 the result only has the right sign and is as large."""
    return (tl.minimum(tl.maximum(x, -_ROUND_LIMIT), _ROUND_LIMIT) + _ROUND) - _ROUND


@triton.jit
def quantize_tokens_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    K,
    stride_xm,
    BLOCK_K: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """x [M, K] -> codes int8 [M, K], scale fp32 [M], zero int32 [M] (asymmetric). Grid: (M,)."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    low = tl.zeros((BLOCK_K,), tl.float32)
    high = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + m * stride_xm + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        low = tl.minimum(low, x)
        high = tl.maximum(high, x)
    lo = tl.min(low, 0)
    hi = tl.max(high, 0)
    if SYMMETRIC:
        scale = tl.maximum(tl.div_rn(tl.maximum(-lo, hi), 127.5), _SMALLEST_NORMAL)
        zero = 0.0
    else:
        scale = tl.maximum(tl.div_rn(hi - lo, 255.0), _SMALLEST_NORMAL)
        zero = -128.0 - tl.div_rn(lo, scale)
        zero = tl.minimum(tl.maximum((zero + _ROUND) - _ROUND, -128.0), 127.0)
        tl.store(zero_ptr + m, zero.to(tl.int32))
    tl.store(scale_ptr + m, scale)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + m * stride_xm + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        code = (tl.div_rn(x, scale + tl.zeros((BLOCK_K,), tl.float32)) + _ROUND) - _ROUND + zero
        code = tl.minimum(tl.maximum(code, -128.0), 127.0)
        tl.store(codes_ptr + m * K + start + k, code.to(tl.int8), mask=start + k < K)


@triton.jit
def quantize_static_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    K,
    stride_xm,
    BLOCK_K: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """x [M, K] -> codes int8 [M, K] by scale fp32 [1] and zero int32 [1]. Grid: (M, pieces of a row)."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + m * stride_xm + k, mask=k < K, other=0.0).to(tl.float32)
    code = round_even(tl.div_rn(x, tl.load(scale_ptr) + tl.zeros((BLOCK_K,), tl.float32)))
    if HAS_ZERO:
        code += tl.load(zero_ptr).to(tl.float32)
    code = tl.minimum(tl.maximum(code, -128.0), 127.0)
    tl.store(codes_ptr + m * K + k, code.to(tl.int8), mask=k < K)


def quantize_tokens(x_MK: Tensor, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """`reference.quantize_tokens` on a GPU (or under the interpreter): the same codes, scales and zero points."""
    M, K = x_MK.shape
    assert x_MK.stride(1) == 1
    codes_MK = torch.empty(M, K, dtype=torch.int8, device=x_MK.device)
    scale_M = torch.empty(M, dtype=torch.float32, device=x_MK.device)
    zero_M = None if symmetric else torch.empty(M, dtype=torch.int32, device=x_MK.device)
    if M > 0:
        block_k = min(bucket(K), ROW_BLOCK)
        quantize_tokens_kernel[(M,)](
            x_MK,
            codes_MK,
            scale_M,
            zero_M,
            K,
            x_MK.stride(0),
            BLOCK_K=block_k,
            SYMMETRIC=symmetric,
            num_warps=ROW_WARPS,
        )
    return codes_MK, scale_M, zero_M


def quantize_static(x_MK: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """`reference.quantize_static` on a GPU (or under the interpreter): the same codes."""
    M, K = x_MK.shape
    assert x_MK.stride(1) == 1
    codes_MK = torch.empty(M, K, dtype=torch.int8, device=x_MK.device)
    if M > 0 and K > 0:
        block_k = min(bucket(K), STATIC_BLOCK)
        quantize_static_kernel[(M, cdiv(K, block_k))](
            x_MK,
            codes_MK,
            scale,
            zero,
            K,
            x_MK.stride(0),
            BLOCK_K=block_k,
            HAS_ZERO=zero is not None,
            num_warps=STATIC_WARPS,
        )
    return codes_MK
