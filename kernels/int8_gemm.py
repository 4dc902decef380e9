"""8-bit kernels: bytes of a weight-only weight in registers, int8 x int8 products, and rows of x to int8.

`unpack8`: a word of two bytes (see `pack`) becomes two half-precision numbers, u + 1024 in fp16 by placing the byte in
the mantissa of 1024 (`prmt` puts 0x64 above it); bf16 has too few bits for that trick, so a byte is placed in the
mantissa of 2^23 in fp32, 2^23 + 128 is subtracted exactly, and the upper half of the result, which holds every bit of
an integer below 256, is the bf16 number u - 128.

`w8a8_kernel`: out^T = W x^T as in `planar_gemm`; 8-bit matrix instructions need both operands contiguous along K, as
they are stored. int32 sums are exact; the epilogue is `reference.rescale`.

`quantize_tokens_kernel`: one row per program, values as `compress.grid` rounds them, in one read of the row from
memory (the second is served by cache).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.shapes import W8A8_BLOCK_K, choose_w8a8, device_of

# Elements of a row that one program holds at a time, and the warps that share them.
ROW_BLOCK = 8192
ROW_WARPS = 8

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

# Adding and subtracting 1.5 * 2^23 rounds an fp32 below 2^22 to the nearest integer, ties to even.
_ROUND = tl.constexpr(12582912.0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.constexpr_function
def power8(DT: tl.dtype) -> float:
    """What `unpack8` adds to the bytes."""
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


@triton.jit(do_not_specialize=["M", "stride_sm"])
def w8a8_kernel(
    x_ptr,
    x_scale_ptr,
    x_zero_ptr,
    weight_ptr,
    weight_scale_ptr,
    row_sum_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_sm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """x int8 [M, K], weight int8 [N, K], x_scale fp32 and x_zero int32 [M] (stride_sm 0: one for all tokens),
    weight_scale fp32 [N], row_sum int32 [N], bias [N], out [M, N] contiguous. Grid: (N tiles, M tiles)."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_read = tl.where(m < M, m, 0).to(tl.int64)
    n_read = tl.where(n < N, n, 0).to(tl.int64)
    x_ptrs = x_ptr + m_read[None, :] * stride_xm + k[:, None]
    weight_ptrs = weight_ptr + n_read[:, None] * stride_wn + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(start + k)[:, None] < K, other=0)
            weight = tl.load(weight_ptrs, mask=(start + k)[None, :] < K, other=0)
        acc = tl.dot(weight, x, acc, out_dtype=tl.int32)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if HAS_ZERO:
        row_sum = tl.load(row_sum_ptr + n, mask=n < N, other=0)
        acc -= row_sum[:, None] * tl.load(x_zero_ptr + m_read * stride_sm)[None, :]
    out = acc.to(tl.float32) * tl.load(x_scale_ptr + m_read * stride_sm)[None, :]
    out *= tl.load(weight_scale_ptr + n, mask=n < N, other=0.0)[:, None]
    if HAS_BIAS:
        out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


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
    """x [M, K] -> codes int8 [M, K], scale fp32 [M], zero int32 [M] (asymmetric). Grid: (M,).

    Divisions are correctly rounded: a reciprocal would move values across a rounding boundary.
    """
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


def w8a8_gemm(
    x_MK: Tensor,
    x_scale_M: Tensor,
    x_zero_M: Tensor | None,
    weight_NK: Tensor,
    weight_scale_N: Tensor,
    row_sum_N: Tensor | None,
    bias_N: Tensor | None,
    dtype: torch.dtype,
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
    shape = choose_w8a8(M, device_of(x_MK.device)[1])
    w8a8_kernel[(triton.cdiv(N, shape.block_n), triton.cdiv(M, shape.block_m))](
        x_MK,
        x_scale_M,
        x_zero_M,
        weight_NK,
        weight_scale_N,
        row_sum_N,
        bias_N,
        out_MN,
        M,
        N,
        K,
        x_MK.stride(0),
        weight_NK.stride(0),
        0 if len(x_scale_M) == 1 else 1,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=W8A8_BLOCK_K,
        HAS_ZERO=x_zero_M is not None,
        HAS_BIAS=bias_N is not None,
        EVEN_K=K % W8A8_BLOCK_K == 0,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,
    )
    return out_MN


def quantize_tokens(x_MK: Tensor, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """`reference.quantize_tokens` on a GPU (or under the interpreter): the same codes, scales and zero points."""
    M, K = x_MK.shape
    assert x_MK.stride(1) == 1
    codes_MK = torch.empty(M, K, dtype=torch.int8, device=x_MK.device)
    scale_M = torch.empty(M, dtype=torch.float32, device=x_MK.device)
    zero_M = None if symmetric else torch.empty(M, dtype=torch.int32, device=x_MK.device)
    if M > 0:
        block_k = min(triton.next_power_of_2(K), ROW_BLOCK)
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
