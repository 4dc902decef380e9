"""The w8a8 product of experts, one launch for all of them: `grouped_gemm` with the loop and epilogue of `int8_gemm`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.grouped_gemm import pairs_of_tile, store_zeros
from compress.kernels.triton.int8_gemm import finish_int8, int8_sums
from compress.kernels.triton.split_k import tile_partials
from compress.kernels.tuning.choose import W8A8_BLOCK_K, device_of, fused_w8a8, grouped, most_tiles
from compress.kernels.tuning.table import Shape, bucket, cdiv


@triton.jit(do_not_specialize=["pairs", "stride_sm", "steps_per_split"])
def grouped_int8_kernel(
    x_ptr,
    token_ptr,
    start_ptr,
    x_scale_ptr,
    x_zero_ptr,
    weight_ptr,
    weight_scale_ptr,
    row_sum_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    pairs,
    E,
    N,
    K,
    stride_xm,
    stride_we,
    stride_wn,
    stride_sm,
    steps_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """x int8 [M, K], token int32 [pairs] (its rows), start int32 [E + 1], weight int8 [E, N, K]; scales, zero points of
    x [M], weight_scale fp32, row_sum int32 and bias [E, N] as in `w8a8_kernel`; out [pairs, N]. Grid: (N tiles, most
    tiles of pairs, SPLIT_K)."""
    expert, begin, end = pairs_of_tile(tl.program_id(1), start_ptr, pairs, E, BLOCK_M, EXPERTS)
    if expert > E:
        return
    m = begin + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if expert == E:
        store_zeros(m, n, out_ptr, end, N, BLOCK_M, BLOCK_N)
        return
    k = tl.arange(0, BLOCK_K)
    m_read = tl.load(token_ptr + m, mask=m < end, other=0).to(tl.int64)
    n_read = tl.where(n < N, n, 0).to(tl.int64)
    wide = expert.to(tl.int64)
    first = tl.program_id(2) * steps_per_split * BLOCK_K
    x_ptrs = x_ptr + m_read[None, :] * stride_xm + (first + k)[:, None]
    weight_ptrs = weight_ptr + wide * stride_we + n_read[:, None] * stride_wn + (first + k)[None, :]
    last = min(first + steps_per_split * BLOCK_K, K)
    acc = int8_sums(x_ptrs, weight_ptrs, K, first, last, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
    weight_scale_ptr += wide * N
    if HAS_ZERO:
        row_sum_ptr += wide * N
    if HAS_BIAS:
        bias_ptr += wide * N
    finish_int8(
        acc,
        m,
        m_read,
        n,
        x_scale_ptr,
        x_zero_ptr,
        weight_scale_ptr,
        row_sum_ptr,
        bias_ptr,
        out_ptr,
        partial_ptr,
        counter_ptr,
        end,
        N,
        stride_sm,
        BLOCK_M,
        BLOCK_N,
        SPLIT_K,
        HAS_ZERO,
        HAS_BIAS,
    )


def _shape(pairs: int, weight_ENK: Tensor) -> Shape:
    """The derived configuration."""
    (E, N, K), device = weight_ENK.shape, device_of(weight_ENK.device)
    single = fused_w8a8(cdiv(pairs, min(E, pairs)), N, K, device)
    return grouped(single, pairs, E, N, cdiv(K, W8A8_BLOCK_K), device)


def grouped_int8_gemm(
    x_MK: Tensor,
    token_P: Tensor,
    start_E: Tensor,
    x_scale_M: Tensor,
    x_zero_M: Tensor | None,
    weight_ENK: Tensor,
    weight_scale_EN: Tensor,
    row_sum_EN: Tensor | None,
    bias_EN: Tensor | None,
    dtype: torch.dtype,
    shape: Shape | None = None,
) -> Tensor:
    """[P, N] of `dtype` on a GPU (or under the interpreter): int8 codes contiguous along K, the rest contiguous.

    token int32 [P], the rows of x; start int32 [E + 1]; x_scale fp32 and x_zero int32 [M], or [1] for a static scale.
    """
    (E, N, K), pairs = weight_ENK.shape, len(token_P)
    assert x_MK.stride(1) == 1
    assert weight_ENK.stride(2) == 1
    assert (x_zero_M is None) or (row_sum_EN is not None)
    out_PN = torch.empty(pairs, N, dtype=dtype, device=x_MK.device)
    if pairs == 0 or N == 0:
        return out_PN
    shape = shape or _shape(pairs, weight_ENK)
    tiles = most_tiles(pairs, E, shape.block_m)
    partial, counters = tile_partials(tiles * cdiv(N, shape.block_n), out_PN, shape, torch.int32)
    grouped_int8_kernel[(cdiv(N, shape.block_n), tiles, shape.split_k)](
        x_MK,
        token_P,
        start_E,
        x_scale_M,
        x_zero_M,
        weight_ENK,
        weight_scale_EN,
        row_sum_EN,
        bias_EN,
        out_PN,
        partial,
        counters,
        pairs,
        E,
        N,
        K,
        x_MK.stride(0),
        weight_ENK.stride(0),
        weight_ENK.stride(1),
        0 if len(x_scale_M) == 1 else 1,
        cdiv(cdiv(K, W8A8_BLOCK_K), shape.split_k),
        BLOCK_K=W8A8_BLOCK_K,
        HAS_ZERO=x_zero_M is not None,
        HAS_BIAS=bias_EN is not None,
        EVEN_K=K % W8A8_BLOCK_K == 0,
        EXPERTS=bucket(E + 1),
        **shape.constants(),
        enable_fp_fusion=True,
    )
    return out_PN
