"""float8 x float8 products with scales of blocks, and inputs rounded for them (`fp8_blocks`, which has the equations).

`fp8_block_kernel`: out^T = W x^T as in `int8_gemm`. A step of the loop is one block of columns: its sums start from
zero, are multiplied by the scale of the token and that of the weight's block, and are added in float32. So Hopper's
tensor cores, which sum float8 products in fewer bits than float32, do so over 128 columns at most, the interval of
DeepSeek-V3. A tile's rows lie within one block of the weight, so that a step has one scale of it.

`quantize_blocks_kernel`: some blocks of a row per program, read once. Divisions are correctly rounded, as in `fp8`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.layouts.scale_blocks import BLOCK
from compress.kernels.triton.split_k import finish, partials
from compress.kernels.tuning.choose import device_of, fused_fp8_blocks
from compress.kernels.tuning.table import Shape, bucket, cdiv

# Blocks of a row that one program rounds, and its warps.
BLOCKS_AT_ONCE = 16
QUANTIZE_WARPS = 4

_E4M3_MAX = tl.constexpr(448.0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_LEAST_POWER = tl.constexpr(2.0**-6)
_STEPS = tl.constexpr(1.5 * 2.0**20)


@triton.jit
def round_e4m3(x):
    """fp32 |x| <= 448 to the nearest value of e4m3, ties to the even code, -0 for what is negative; converting that
    changes nothing. Adding and subtracting 1.5 * 2^23 steps rounds to a multiple of the step, which is 2^-3 of the
    power of two below x."""
    bits = x.to(tl.int32, bitcast=True)
    magic = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), _LEAST_POWER) * _STEPS
    rounded = ((x + magic) - magic).to(tl.int32, bitcast=True)
    return (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def quantize_blocks_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    K,
    blocks,
    stride_xm,
    stride_sm,
    stride_sb,
    BLOCK_K: tl.constexpr,
    COUNT: tl.constexpr,
):
    """x [M, K] -> codes float8 [M, K], scale fp32 [M, blocks] in any strides. Grid: (M, ceil(blocks / COUNT))."""
    m = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    k = b[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(x_ptr + m * stride_xm + k, mask=k < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    scale = tl.maximum(tl.div_rn(largest, _E4M3_MAX + tl.zeros((COUNT,), tl.float32)), _SMALLEST_NORMAL)
    tl.store(scale_ptr + m * stride_sm + b * stride_sb, scale, mask=b < blocks)
    code = tl.div_rn(x, scale[:, None] + tl.zeros((COUNT, BLOCK_K), tl.float32))
    code = round_e4m3(tl.minimum(tl.maximum(code, -_E4M3_MAX), _E4M3_MAX))
    tl.store(codes_ptr + m * K + k, code.to(codes_ptr.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["M", "stride_sb", "steps_per_split"])
def fp8_block_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    blocks,
    stride_xm,
    stride_wn,
    stride_sm,
    stride_sb,
    steps_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """x float8 [M, K], x_scale fp32 [M, blocks] in any strides, weight float8 [N, K], weight_scale [., blocks], bias
    [N], out [M, N] contiguous. BLOCK_N divides BLOCK_K. Grid: (N tiles, M tiles, SPLIT_K)."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_read = tl.where(m < M, m, 0).to(tl.int64)
    n_read = tl.where(n < N, n, 0).to(tl.int64)
    first = tl.program_id(2) * steps_per_split
    x_ptrs = x_ptr + m_read[None, :] * stride_xm + (first * BLOCK_K + k)[:, None]
    weight_ptrs = weight_ptr + n_read[:, None] * stride_wn + (first * BLOCK_K + k)[None, :]
    x_scale_ptrs = x_scale_ptr + m_read * stride_sm
    of_rows = weight_scale_ptr + (tl.program_id(0) * BLOCK_N // BLOCK_K).to(tl.int64) * blocks
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, min(first + steps_per_split, blocks)):
        if EVEN_K:
            x = tl.load(x_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(step * BLOCK_K + k)[:, None] < K, other=0.0)
            weight = tl.load(weight_ptrs, mask=(step * BLOCK_K + k)[None, :] < K, other=0.0)
        scale = tl.load(x_scale_ptrs + step * stride_sb) * tl.load(of_rows + step).to(tl.float32)
        acc += tl.dot(weight, x, out_dtype=tl.float32) * scale[None, :]
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    finish(acc, m, n, out_ptr, bias_ptr, partial_ptr, counter_ptr, M, N, BLOCK_M, BLOCK_N, SPLIT_K, HAS_BIAS)


def quantize_blocks(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_blocks.quantize_token_blocks` on a GPU (or under the interpreter): the same codes and scales, the scales of
    one block of columns beside each other."""
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    M, K = x_MK.shape
    blocks = cdiv(K, BLOCK)
    codes_MK = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scale_MB = torch.empty(blocks, M, dtype=torch.float32, device=x_MK.device).t()
    if M > 0 and K > 0:
        count = min(bucket(blocks), BLOCKS_AT_ONCE)
        quantize_blocks_kernel[(M, cdiv(blocks, count))](
            x_MK,
            codes_MK,
            scale_MB,
            K,
            blocks,
            x_MK.stride(0),
            *scale_MB.stride(),
            BLOCK_K=BLOCK,
            COUNT=count,
            num_warps=QUANTIZE_WARPS,
        )
    return codes_MK, scale_MB


def fp8_block_gemm(
    x_MK: Tensor,
    x_scale_MB: Tensor,
    weight_NK: Tensor,
    weight_scale: Tensor,
    bias_N: Tensor | None,
    dtype: torch.dtype,
    shape: Shape | None = None,
) -> Tensor:
    """[M, N] of `dtype` on a GPU (or under the interpreter): float8 codes contiguous along K, x_scale fp32 [M, B] in
    any strides, weight_scale [ceil(N / 128), B] contiguous, any float. shape: rows of a tile that divide 128."""
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    blocks = cdiv(K, BLOCK)
    assert x_MK.stride(1) == 1
    assert weight_NK.stride(1) == 1
    assert weight_scale.is_contiguous()
    out_MN = torch.empty(M, N, dtype=dtype, device=x_MK.device)
    if M == 0 or N == 0:
        return out_MN
    shape = fused_fp8_blocks(M, N, K, device_of(x_MK.device)) if shape is None else shape
    assert BLOCK % shape.block_n == 0
    partial, counters = partials(out_MN, shape)
    fp8_block_kernel[(cdiv(N, shape.block_n), cdiv(M, shape.block_m), shape.split_k)](
        x_MK,
        x_scale_MB,
        weight_NK,
        weight_scale,
        bias_N,
        out_MN,
        partial,
        counters,
        M,
        N,
        K,
        blocks,
        x_MK.stride(0),
        weight_NK.stride(0),
        *x_scale_MB.stride(),
        cdiv(blocks, shape.split_k),
        BLOCK_K=BLOCK,
        HAS_BIAS=bias_N is not None,
        EVEN_K=K % BLOCK == 0,
        **shape.constants(),
    )
    return out_MN
