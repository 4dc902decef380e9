"""Weights in planar words of 4 or 8 bits times tokens in int8 (w4a8): int8 matrix products, scales on their sums.

Computed as out^T = W x^T over the words that `planar_gemm` reads, a plane of 32 columns at a time: as many as the int8
instruction takes (m64nMk32, m16n8k32). Four words that follow each other along K are two registers, whose bytes are
picked apart into one register of four weights for every plane. Without zero points a nibble stays in the upper half of
its byte, where flipping its top bit makes it signed: 16 (u - 8), half an instruction for a weight. With them it is u -
z, four bytes by one subtraction: 128 is added before and taken off after, so that no byte borrows from its neighbour.
That is one instruction for a weight and none for an output; to correct sums by those of the tokens' codes takes more
from 64 tokens on (on sm_90a 3.9 for a weight, not 3.2), and another launch. Codes of 8 bits less a zero point do not
fit a byte: they are refused.

    sums     int32, exact, of a segment: the columns that share a scale, at most one step of the loop; of all columns
             where there is one scale per output channel and per token. RAISED times too large for signed nibbles,
             which the scale makes up for; below 2^24, so exact in fp32, unless a segment is all columns
    scales   of the weight per segment; of a token at the end, or per segment, too, where it has several

Split of K, tails and the order of tiles are those of `planar_gemm`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.layouts.words import Planar, planar_block, planar_words
from compress.kernels.triton.int8_quantize import quantize_tokens
from compress.kernels.triton.planar_gemm import load_groups, planar_constants
from compress.kernels.triton.split_k import finish, partials, pieces
from compress.kernels.tuning.table import Shape, cdiv

# What signed codes of 4 bits are multiplied by where they stand.
RAISED = 16

BYTES_4 = """
{ .reg .b32 low, high;
  prmt.b32 low, $4, $5, 0x6420;
  prmt.b32 high, $4, $5, 0x7531;
  shl.b32 $0, low, 4;
  lop3.b32 $0, $0, 0xf0f0f0f0, 0x80808080, 0x6a;
  lop3.b32 $1, low, 0xf0f0f0f0, 0x80808080, 0x6a;
  shl.b32 $2, high, 4;
  lop3.b32 $2, $2, 0xf0f0f0f0, 0x80808080, 0x6a;
  lop3.b32 $3, high, 0xf0f0f0f0, 0x80808080, 0x6a; }
"""
BYTES_4_ZERO = """
{ .reg .b32 low, high;
  prmt.b32 low, $4, $5, 0x6420;
  prmt.b32 high, $4, $5, 0x7531;
  lop3.b32 $0, low, 0x0f0f0f0f, 0x80808080, 0xea;
  shr.u32 low, low, 4;
  lop3.b32 $1, low, 0x0f0f0f0f, 0x80808080, 0xea;
  lop3.b32 $2, high, 0x0f0f0f0f, 0x80808080, 0xea;
  shr.u32 high, high, 4;
  lop3.b32 $3, high, 0x0f0f0f0f, 0x80808080, 0xea;
  sub.u32 $0, $0, $6;
  sub.u32 $1, $1, $7;
  sub.u32 $2, $2, $8;
  sub.u32 $3, $3, $9;
  xor.b32 $0, $0, 0x80808080;
  xor.b32 $1, $1, 0x80808080;
  xor.b32 $2, $2, 0x80808080;
  xor.b32 $3, $3, 0x80808080; }
"""
BYTES_8 = """
{ .reg .b32 low, high;
  prmt.b32 low, $2, $3, 0x6420;
  prmt.b32 high, $2, $3, 0x7531;
  xor.b32 $0, low, 0x80808080;
  xor.b32 $1, high, 0x80808080; }
"""
_BYTES_4_ZERO = tl.constexpr(BYTES_4_ZERO)
_BYTES_4 = tl.constexpr(BYTES_4)
_BYTES_8 = tl.constexpr(BYTES_8)
_RAISED = tl.constexpr(RAISED)


@triton.jit
def unpack_bytes(words, BITS: tl.constexpr, ASM: tl.constexpr):
    """int16 tile -> 16 / BITS int8 tiles: RAISED (u - 8) of 4 bits, u - 128 of 8. Both paths give the same."""
    if ASM and BITS == 4:
        return tl.inline_asm_elementwise(
            _BYTES_4,
            "=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    elif ASM:  # noqa: RET505  a constexpr branch must be an else to stay uncompiled
        return tl.inline_asm_elementwise(
            _BYTES_8, "=&r,=&r,r,r", [words], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        wide = words.to(tl.int32)
        if BITS == 4:
            return (
                (((wide & 15) - 8) * _RAISED).to(tl.int8),
                (((wide >> 4 & 15) - 8) * _RAISED).to(tl.int8),
                (((wide >> 8 & 15) - 8) * _RAISED).to(tl.int8),
                (((wide >> 12 & 15) - 8) * _RAISED).to(tl.int8),
            )
        else:  # noqa: RET505
            return ((wide & 255) - 128).to(tl.int8), ((wide >> 8 & 255) - 128).to(tl.int8)


@triton.jit
def unpack_less(words, zeros, ASM: tl.constexpr):
    """int16 tile -> four int8 tiles u - z of 4-bit codes, given the zero points of the planes: uint8 tiles [N, 1] of
    each. Both paths give the same."""
    a = tl.broadcast_to(zeros[0], words.shape)
    b = tl.broadcast_to(zeros[1], words.shape)
    c = tl.broadcast_to(zeros[2], words.shape)
    d = tl.broadcast_to(zeros[3], words.shape)
    if ASM:
        return tl.inline_asm_elementwise(
            _BYTES_4_ZERO,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [words, a, b, c, d],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:  # noqa: RET505
        wide = words.to(tl.int32)
        return (
            ((wide & 15) - a.to(tl.int32)).to(tl.int8),
            ((wide >> 4 & 15) - b.to(tl.int32)).to(tl.int8),
            ((wide >> 8 & 15) - c.to(tl.int32)).to(tl.int8),
            ((wide >> 12 & 15) - d.to(tl.int32)).to(tl.int8),
        )


@triton.jit
def zeros_of_planes(zeros, SEGMENTS: tl.constexpr):
    """[N, 1] the zero points of four planes, given those [N] of the segments of a block."""
    if SEGMENTS == 1:
        z = zeros[0][:, None]
        return z, z, z, z
    elif SEGMENTS == 2:  # noqa: RET505
        y, z = zeros[0][:, None], zeros[1][:, None]
        return y, y, z, z
    else:
        return zeros[0][:, None], zeros[1][:, None], zeros[2][:, None], zeros[3][:, None]


@triton.jit
def planar_int8_sums(
    x_ptrs,
    words_ptrs,
    scale_ptr,
    zero_ptr,
    x_scale_ptrs,
    n,
    N,
    K,
    first,
    last,
    BITS: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):
    """[BLOCK_N, BLOCK_M] fp32, the products of blocks `first` to `last` of K, scaled. x_ptrs [PLANE, BLOCK_M],
    words_ptrs [BLOCK_N, PLANE]: of the first of them; x_scale_ptrs [BLOCK_M]: of the first group of all."""
    PLANES: tl.constexpr = 16 // BITS
    BLOCK_K: tl.constexpr = PLANES * PLANE
    PER_SCALE: tl.constexpr = PLANES if GROUP == -1 else min(GROUP // PLANE, PLANES)
    SEGMENTS: tl.constexpr = PLANES // PER_SCALE
    # One sum of all columns.
    WHOLE: tl.constexpr = GROUP == -1 and X_GROUP == -1
    UNIT: tl.constexpr = 1.0 / _RAISED if BITS == 4 and not HAS_ZERO else 1.0
    k = tl.arange(0, PLANE)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == -1:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
        if HAS_ZERO:
            zeros = (tl.load(zero_ptr + n, mask=n < N, other=0),)
    else:
        next_scales = load_groups(scale_ptr, first, n, N, K, BLOCK_K, GROUP, SEGMENTS)
        if HAS_ZERO:
            next_zeros = load_groups(zero_ptr, first, n, N, K, BLOCK_K, GROUP, SEGMENTS)
    if WHOLE:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for block in range(first, last):
        words = tl.load(words_ptrs, eviction_policy="evict_first")
        if GROUP != -1:
            scales = next_scales
            next_scales = load_groups(scale_ptr, block + 1, n, N, K, BLOCK_K, GROUP, SEGMENTS)
            if HAS_ZERO:
                zeros = next_zeros
                next_zeros = load_groups(zero_ptr, block + 1, n, N, K, BLOCK_K, GROUP, SEGMENTS)
        if X_GROUP != -1:
            x_scale = tl.load(x_scale_ptrs + block * BLOCK_K // X_GROUP)
        if HAS_ZERO:
            weights = unpack_less(words, zeros_of_planes(zeros, SEGMENTS), ASM)
        else:
            weights = unpack_bytes(words, BITS, ASM)
        for plane in tl.static_range(PLANES):
            if EVEN_K:
                x = tl.load(x_ptrs + plane * PLANE)
            else:
                x = tl.load(x_ptrs + plane * PLANE, mask=(block * BLOCK_K + plane * PLANE + k)[:, None] < K, other=0)
            if not WHOLE and plane % PER_SCALE == 0:
                sums = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
            sums = tl.dot(weights[plane], x, sums, out_dtype=tl.int32)
            if not WHOLE and (plane + 1) % PER_SCALE == 0:
                if GROUP != -1:
                    scale = scales[plane // PER_SCALE]
                part = sums.to(tl.float32)
                if X_GROUP != -1:
                    part *= x_scale[None, :]
                acc += part * (scale.to(tl.float32) * UNIT)[:, None]
        x_ptrs += BLOCK_K
        words_ptrs += PLANE
    if WHOLE:
        acc = sums.to(tl.float32) * (scale.to(tl.float32) * UNIT)[:, None]
    if X_GROUP == -1:
        acc *= tl.load(x_scale_ptrs)[None, :]
    return acc


@triton.jit(do_not_specialize=["M", "blocks_per_split", "stride_sm"])
def int8_planar_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    x_scale_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_sm,
    blocks_per_split,
    BITS: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):
    """x int8 [M, K], words [N, W] int16, scale and zero [G, N], bias [N], x_scale fp32 [M, X groups], out
    [M, N] contiguous.

    GROUP: as in `planar_kernel`. X_GROUP: columns of a token that share a scale, whole blocks of words; -1: all. Grid:
    (N tiles, M tiles, SPLIT_K)."""
    BLOCK_K: tl.constexpr = 16 // BITS * PLANE
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, PLANE)
    m_read = tl.where(m < M, m, 0).to(tl.int64)
    n_read = tl.where(n < N, n, 0).to(tl.int64)
    first = tl.program_id(2) * blocks_per_split
    last = min(first + blocks_per_split, tl.cdiv(K, BLOCK_K))
    acc = planar_int8_sums(
        x_ptr + m_read[None, :] * stride_xm + (first * BLOCK_K + k)[:, None],
        words_ptr + n_read[:, None] * stride_wn + (first * PLANE + k)[None, :],
        scale_ptr,
        zero_ptr,
        x_scale_ptr + m_read * stride_sm,
        n,
        N,
        K,
        first,
        last,
        BITS,
        PLANE,
        GROUP,
        X_GROUP,
        BLOCK_M,
        BLOCK_N,
        HAS_ZERO,
        EVEN_K,
        ASM,
    )
    finish(acc, m, n, out_ptr, bias_ptr, partial_ptr, counter_ptr, M, N, BLOCK_M, BLOCK_N, SPLIT_K, HAS_BIAS)


def quantize_groups(x_MK: Tensor, input_group: int) -> tuple[Tensor, Tensor]:
    """(codes int8 [M, K], scale fp32 [M, X groups]) of tokens, symmetric, fitted to each or to each and so many
    columns, of which the last may be fewer."""
    M, K = x_MK.shape
    if input_group == -1 or input_group >= K:
        codes_MK, scale_M, _ = quantize_tokens(x_MK)
        return codes_MK, scale_M.unsqueeze(1)
    filled = torch.nn.functional.pad(x_MK, (0, -K % input_group)).contiguous()
    codes, scale, _ = quantize_tokens(filled.view(-1, input_group))
    return codes.view(M, -1)[:, :K], scale.view(M, -1)


def int8_planar_gemm(x_MK: Tensor, weight: Planar, bias_N: Tensor | None, input_group: int, shape: Shape) -> Tensor:
    """[M, N] = quantize(x) weight^T + bias on a GPU (or under the interpreter), in the dtype of x, which is rounded to
    int8 per token or per token and `input_group` columns.

    `int8_activation.why_not_int8` refuses other inputs, with reasons; here they are asserted.
    """
    (M, K), N = x_MK.shape, len(weight.words)
    assert weight.words.shape[1] == planar_words(K, weight.bits)
    assert weight.scale.is_contiguous()
    assert weight.zero is None or weight.bits == 4
    input_group = -1 if input_group >= K else input_group
    assert input_group == -1 or input_group % planar_block(weight.bits) == 0
    out_MN = torch.empty(M, N, dtype=x_MK.dtype, device=x_MK.device)
    if M == 0 or N == 0:
        return out_MN
    codes_MK, scale_MX = quantize_groups(x_MK, input_group)
    for tokens in pieces(M, N, shape):
        _launch(codes_MK[tokens], scale_MX[tokens], weight, bias_N, input_group, out_MN[tokens], shape)
    return out_MN


def _launch(
    codes_MK: Tensor,
    scale_MX: Tensor,
    weight: Planar,
    bias_N: Tensor | None,
    input_group: int,
    out_MN: Tensor,
    shape: Shape,
) -> None:
    (M, K), N = codes_MK.shape, out_MN.shape[1]
    partial, counters = partials(out_MN, shape)
    int8_planar_kernel[(cdiv(N, shape.block_n), cdiv(M, shape.block_m), shape.split_k)](
        codes_MK,
        weight.words,
        weight.scale,
        weight.zero,
        bias_N,
        scale_MX,
        out_MN,
        partial,
        counters,
        M,
        N,
        K,
        codes_MK.stride(0),
        weight.words.stride(0),
        scale_MX.stride(0),
        cdiv(cdiv(K, planar_block(weight.bits)), shape.split_k),
        X_GROUP=input_group,
        HAS_BIAS=bias_N is not None,
        **planar_constants(weight, K, shape),
    )
