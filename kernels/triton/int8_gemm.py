"""8-bit kernels: bytes of a weight-only weight in registers, and int8 x int8 products.

`unpack8`: a word of two bytes (`layouts.words`) becomes two half-precision numbers, u + 1024 in fp16 by placing the
byte in the mantissa of 1024 (`prmt` puts 0x64 above it); bf16 has too few bits for that trick, so a byte is placed in
the mantissa of 2^23 in fp32, 2^23 + 128 is subtracted exactly, and the upper half of the result, which holds every bit
of an integer below 256, is the bf16 number u - 128.

`w8a8_kernel`: out^T = W x^T as in `planar_gemm`; 8-bit matrix instructions need both operands contiguous along K, as
they are stored. int32 sums are exact, split (`split_k`) or not; the epilogue is `reference.rescale`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.split_k import arrives_last, collect, partials, store
from compress.kernels.tuning.choose import W8A8_BLOCK_K, choose_shape, device_of, kind_of
from compress.kernels.tuning.table import Shape, cdiv

PRMT_FP16 = """
{ prmt.b32 $0, $2, 0x64646464, 0x4240;
  prmt.b32 $1, $2, 0x64646464, 0x4341; }
"""
PRMT_BF16 = """
{ .reg .b32 a, b, c, d;
  .reg .f32 fa, fb, fc, fd;
  prmt.b32 a, $2, 0x4B000000, 0x7650;
  prmt.b32 b, $2, 0x4B000000, 0x7651;
  prmt.b32 c, $2, 0x4B000000, 0x7652;
  prmt.b32 d, $2, 0x4B000000, 0x7653;
  mov.b32 fa, a;
  mov.b32 fb, b;
  mov.b32 fc, c;
  mov.b32 fd, d;
  add.f32 fa, fa, 0fCB000080;
  add.f32 fb, fb, 0fCB000080;
  add.f32 fc, fc, 0fCB000080;
  add.f32 fd, fd, 0fCB000080;
  mov.b32 a, fa;
  mov.b32 b, fb;
  mov.b32 c, fc;
  mov.b32 d, fd;
  prmt.b32 $0, a, c, 0x7632;
  prmt.b32 $1, b, d, 0x7632; }
"""
_PRMT_FP16 = tl.constexpr(PRMT_FP16)
_PRMT_BF16 = tl.constexpr(PRMT_BF16)


@triton.constexpr_function
def power8(DT: tl.dtype) -> float:
    """The offset that `unpack8` adds to the bytes."""
    return -128.0 if DT == tl.bfloat16 else 1024.0


@triton.jit
def unpack8(words, DT: tl.constexpr, ASM: tl.constexpr):
    """int16 tile -> two tiles of DT, byte + power8. Both paths give the same bits."""
    if ASM and DT == tl.float16:
        return tl.inline_asm_elementwise(
            _PRMT_FP16, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif ASM and DT == tl.bfloat16:  # noqa: RET505  a constexpr branch must be an else to stay uncompiled
        return tl.inline_asm_elementwise(
            _PRMT_BF16, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        wide = words.to(tl.int32)
        return ((wide & 255) + power8(DT)).to(DT), ((wide >> 8 & 255) + power8(DT)).to(DT)


@triton.jit
def int8_sums(
    x_ptrs,
    weight_ptrs,
    K,
    first,
    last,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """int32 [BLOCK_N, BLOCK_M] the products of columns `first` to `last`. x_ptrs [BLOCK_K, BLOCK_M], weight_ptrs
    [BLOCK_N, BLOCK_K]: of the first of them."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for start in range(first, last, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(start + k)[:, None] < K, other=0)
            weight = tl.load(weight_ptrs, mask=(start + k)[None, :] < K, other=0)
        acc = tl.dot(weight, x, acc, out_dtype=tl.int32)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    return acc


@triton.jit
def finish_int8(
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
    M,
    N,
    stride_sm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Scale the sums acc [n, m] and store them to out [M, N]; of SPLIT_K programs the last to arrive does it, for all.
    m_read: the token of x that each m reads."""
    if SPLIT_K > 1:
        if not arrives_last(acc, partial_ptr, counter_ptr, BLOCK_M, BLOCK_N, SPLIT_K):
            return
        acc = collect(partial_ptr, counter_ptr, BLOCK_M, BLOCK_N, SPLIT_K)
    if HAS_ZERO:
        row_sum = tl.load(row_sum_ptr + n, mask=n < N, other=0)
        acc -= row_sum[:, None] * tl.load(x_zero_ptr + m_read * stride_sm)[None, :]
    out = acc.to(tl.float32) * tl.load(x_scale_ptr + m_read * stride_sm)[None, :]
    out *= tl.load(weight_scale_ptr + n, mask=n < N, other=0.0)[:, None]
    store(out, m, n, out_ptr, bias_ptr, M, N, HAS_BIAS)


@triton.jit(do_not_specialize=["M", "stride_sm", "steps_per_split"])
def w8a8_kernel(
    x_ptr,
    x_scale_ptr,
    x_zero_ptr,
    weight_ptr,
    weight_scale_ptr,
    row_sum_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    stride_xm,
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
):
    """x int8 [M, K], weight int8 [N, K], x_scale fp32 and x_zero int32 [M] (stride_sm 0: one for all tokens),
    weight_scale fp32 [N], row_sum int32 [N], bias [N], out [M, N] contiguous.
    steps_per_split: of BLOCK_K columns. Grid: (N tiles, M tiles, SPLIT_K)."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_read = tl.where(m < M, m, 0).to(tl.int64)
    n_read = tl.where(n < N, n, 0).to(tl.int64)
    first = tl.program_id(2) * steps_per_split * BLOCK_K
    x_ptrs = x_ptr + m_read[None, :] * stride_xm + (first + k)[:, None]
    weight_ptrs = weight_ptr + n_read[:, None] * stride_wn + (first + k)[None, :]
    last = min(first + steps_per_split * BLOCK_K, K)
    acc = int8_sums(x_ptrs, weight_ptrs, K, first, last, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
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
        M,
        N,
        stride_sm,
        BLOCK_M,
        BLOCK_N,
        SPLIT_K,
        HAS_ZERO,
        HAS_BIAS,
    )


def w8a8_gemm(
    x_MK: Tensor,
    x_scale_M: Tensor,
    x_zero_M: Tensor | None,
    weight_NK: Tensor,
    weight_scale_N: Tensor,
    row_sum_N: Tensor | None,
    bias_N: Tensor | None,
    dtype: torch.dtype,
    shape: Shape | None = None,
) -> Tensor:
    """[M, N] of `dtype` on a GPU (or under the interpreter): int8 codes contiguous along K, fp32 scales, int32 zero.

    x_scale and x_zero [M], or [1] for a static scale of the whole tensor. K below 2^16, so that no sum leaves int32.
    """
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    assert x_MK.stride(1) == 1
    assert weight_NK.stride(1) == 1
    assert (x_zero_M is None) or (row_sum_N is not None)
    out_MN = torch.empty(M, N, dtype=dtype, device=x_MK.device)
    if M == 0 or N == 0:
        return out_MN
    if shape is None:
        kind = kind_of("w8a8", 8, -1, x_zero_M is not None, dtype)
        shape = choose_shape(kind, M, N, K, device_of(x_MK.device))
    partial, counters = partials(out_MN, shape, torch.int32)
    w8a8_kernel[(cdiv(N, shape.block_n), cdiv(M, shape.block_m), shape.split_k)](
        x_MK,
        x_scale_M,
        x_zero_M,
        weight_NK,
        weight_scale_N,
        row_sum_N,
        bias_N,
        out_MN,
        partial,
        counters,
        M,
        N,
        K,
        x_MK.stride(0),
        weight_NK.stride(0),
        0 if len(x_scale_M) == 1 else 1,
        cdiv(cdiv(K, W8A8_BLOCK_K), shape.split_k),
        BLOCK_K=W8A8_BLOCK_K,
        HAS_ZERO=x_zero_M is not None,
        HAS_BIAS=bias_N is not None,
        EVEN_K=K % W8A8_BLOCK_K == 0,
        **shape.constants(),
        enable_fp_fusion=True,
    )
    return out_MN
