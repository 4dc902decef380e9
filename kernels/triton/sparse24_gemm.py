"""The GEMM of 4-bit 2:4 weights, out = x (codes - zero)^T scale + bias, over the words of `pack24`.

Like `planar_gemm`: out^T = W x^T with the weights as the left operand, in registers; deterministic split K; scales on
the sums where tokens are few. The two codes of a quad are converted, centred and scaled first; `expand` then puts them
into their columns and zeros elsewhere, so that a pruned weight never meets the zero point.

Triton has no sparse matrix instruction, so the products with zeros are computed: only memory traffic is saved, 3 bits
per weight instead of 4. The price is about 14 integer instructions per 8 weights on top of the conversion, more than a
dense 4-bit weight takes (`tests/support/compiled/aot.py` counts them).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.layouts.words import PLANE
from compress.kernels.layouts.words24 import BLOCK, QUARTER, Words24
from compress.kernels.triton.planar_gemm import ASSEMBLY, INTERPRET, TRITON_DTYPE, finish, load_groups
from compress.kernels.triton.split_k import partials
from compress.kernels.triton.unpack import power4, unpack4
from compress.kernels.tuning.choose import choose_shape, device_of, kind_of
from compress.kernels.tuning.table import Shape, cdiv

CODE_BITS = 4


@triton.constexpr_function
def expand_ptx(quarter: int) -> str:
    """Columns 0 to 3 ($0 to $3) of two quads from their v0 ($4), v1 ($5) and words of kept bits ($6).

    prmt copies the top bit of a byte over 16 bits: 0xbb99 that of the upper byte of each half, 0xaa88 of the lower.
    lop3 0xca is a ? b : c, bit by bit.
    """
    return f"""
{{ .reg .b32 a, b, kept, v;
  shl.b32 a, $6, {2 * quarter};
  shl.b32 b, $6, {2 * quarter + 1};
  prmt.b32 kept, a, a, 0xbb99;
  and.b32 $0, $4, kept;
  lop3.b32 v, kept, $5, $4, 0xca;
  prmt.b32 kept, a, a, 0xaa88;
  and.b32 $1, v, kept;
  prmt.b32 kept, b, b, 0xaa88;
  and.b32 $3, $5, kept;
  lop3.b32 v, kept, $4, $5, 0xca;
  prmt.b32 kept, b, b, 0xbb99;
  and.b32 $2, v, kept; }}
"""


@triton.jit
def expand(v0, v1, kept, QUARTER: tl.constexpr, DT: tl.constexpr, ASM: tl.constexpr):
    """Tiles [N, 32] of the codes of a quarter and its words of kept bits -> its four columns. Same bits both ways."""
    if ASM and DT == tl.float16:
        return tl.inline_asm_elementwise(
            expand_ptx(QUARTER),
            "=&r,=&r,=&r,=&r,r,r,r",
            [v0, v1, kept],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif ASM and DT == tl.bfloat16:  # noqa: RET505  a constexpr branch must be an else to stay uncompiled
        return tl.inline_asm_elementwise(
            expand_ptx(QUARTER),
            "=&r,=&r,=&r,=&r,r,r,r",
            [v0, v1, kept],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = kept.to(tl.int32)
        m0 = (bits >> (15 - 2 * QUARTER) & 1) != 0
        m1 = (bits >> (7 - 2 * QUARTER) & 1) != 0
        m2 = (bits >> (14 - 2 * QUARTER) & 1) != 0
        m3 = (bits >> (6 - 2 * QUARTER) & 1) != 0
        zero = tl.zeros_like(v0)
        return (
            tl.where(m0, v0, zero),
            tl.where(m1, tl.where(m0, v1, v0), zero),
            tl.where(m2, tl.where(m3, v0, v1), zero),
            tl.where(m3, v1, zero),
        )


# Tokens only bound loads and stores: a compilation per number of tokens would buy nothing.
@triton.jit(do_not_specialize=["M", "blocks_per_split"])
def sparse24_kernel(
    x_ptr,
    codes_ptr,
    kept_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    stride_xm,
    blocks,
    blocks_per_split,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    ASM: tl.constexpr,
):
    """x [M, 512 blocks] (`quad_planar`), codes [N, 64 blocks], kept [N, 32 blocks] int16, scale and zero [G, N],
    bias [N], out [M, N] contiguous. K: columns before filling up, only to bound the groups. Grid: (N tiles, M tiles,
    SPLIT_K). DT: the dtype of the products; fp32 under the interpreter, whose bf16 arithmetic is wrong."""
    QUARTER: tl.constexpr = 4 * PLANE
    BLOCK: tl.constexpr = 4 * QUARTER
    # One scale per row and quarter; groups that end inside of a quarter have one per quad.
    PER_QUARTER: tl.constexpr = GROUP != -1 and GROUP % QUARTER == 0
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    q = tl.arange(0, PLANE)
    m_read = tl.where(m < M, m, 0).to(tl.int64)
    n_read = tl.where(n < N, n, 0).to(tl.int64)
    first = tl.program_id(2) * blocks_per_split
    last = min(first + blocks_per_split, blocks)
    x_ptrs = x_ptr + m_read[None, :] * stride_xm + (first * BLOCK + q)[:, None]
    kept_row = n_read * (blocks * PLANE)
    kept_ptrs = kept_ptr + kept_row[:, None] + (first * PLANE + q)[None, :]
    codes_ptrs = codes_ptr + 2 * kept_row[:, None] + (first * 2 * PLANE + q)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == -1:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
        if HAS_ZERO:
            zero = tl.load(zero_ptr + n, mask=n < N, other=0).to(DT)[:, None]
    if PER_QUARTER:
        next_scale = load_groups(scale_ptr, first * 4, n, N, K, QUARTER, GROUP, 1)[0]
        if HAS_ZERO:
            next_zero = load_groups(zero_ptr, first * 4, n, N, K, QUARTER, GROUP, 1)[0]
    for block in range(first, last):
        kept = tl.load(kept_ptrs, eviction_policy="evict_first")
        for quarter in tl.static_range(4):
            if quarter % 2 == 0:
                words = tl.load(codes_ptrs + quarter // 2 * PLANE, eviction_policy="evict_first")
                pairs = unpack4(words, DT, ASM)
            if PER_QUARTER:
                scale = next_scale[:, None]
                next_scale = load_groups(scale_ptr, block * 4 + quarter + 1, n, N, K, QUARTER, GROUP, 1)[0]
                if HAS_ZERO:
                    zero = next_zero.to(DT)[:, None]
                    next_zero = load_groups(zero_ptr, block * 4 + quarter + 1, n, N, K, QUARTER, GROUP, 1)[0]
            elif GROUP != -1:
                column = tl.minimum(block * BLOCK + quarter * QUARTER + 4 * q, K - 1)
                at = (column // GROUP)[None, :] * N + n_read[:, None]
                scale = tl.load(scale_ptr + at)
                if HAS_ZERO:
                    zero = tl.load(zero_ptr + at).to(DT)
            # Planes 0 and 2 have the same power, and so have 1 and 3 (`power4`).
            if HAS_ZERO:
                v0 = pairs[quarter % 2 * 2] - (zero + power4(0, DT))
                v1 = pairs[quarter % 2 * 2 + 1] - (zero + power4(1, DT))
            else:
                v0 = pairs[quarter % 2 * 2] - (8 + power4(0, DT))
                v1 = pairs[quarter % 2 * 2 + 1] - (8 + power4(1, DT))
            if GROUP != -1 and not SCALE_SUMS:
                v0 *= scale.to(DT)
                v1 *= scale.to(DT)
            columns = expand(v0, v1, kept, quarter, DT, ASM)
            if SCALE_SUMS:
                sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for p in tl.static_range(4):
                x = tl.load(x_ptrs + quarter * QUARTER + p * PLANE).to(DT)
                if SCALE_SUMS:
                    sums = tl.dot(columns[p], x, sums)
                else:
                    acc = tl.dot(columns[p], x, acc)
            if SCALE_SUMS:
                acc += sums * scale.to(tl.float32)
        x_ptrs += BLOCK
        kept_ptrs += PLANE
        codes_ptrs += 2 * PLANE
    if GROUP == -1:
        acc *= scale.to(tl.float32)
    finish(acc, m, n, out_ptr, bias_ptr, partial_ptr, counter_ptr, M, N, BLOCK_M, BLOCK_N, SPLIT_K, HAS_BIAS)


def scales_sums(shape: Shape, group_size: int, zero: bool) -> bool:
    """True where sums are scaled instead of weights: fewer instructions, but more registers, of which there are enough
    only for 16 tokens without zero points. Groups have to be whole quarters."""
    return group_size != -1 and group_size % QUARTER == 0 and shape.block_m <= 16 and not zero


def sparse24_gemm(
    x_MK: Tensor, K: int, weight: Words24, bias_N: Tensor | None = None, shape: Shape | None = None
) -> Tensor:
    """[M, N] = x weight^T + bias on a GPU (or under the interpreter), in the dtype of x.

    x fp16 or bf16 [M, 512 blocks], contiguous, K columns in the order of `layouts.words24.quad_planar`; weight with
    scales of the same dtype.
    """
    M, N, blocks = len(x_MK), len(weight.codes), x_MK.shape[1] // BLOCK
    for tensor, words in ((x_MK, BLOCK), (weight.codes, 2 * PLANE), (weight.kept, PLANE)):
        assert tensor.is_contiguous()
        assert tensor.shape[1] == blocks * words
    assert weight.scale.dtype == x_MK.dtype
    assert weight.scale.is_contiguous()
    out_MN = torch.empty(M, N, dtype=x_MK.dtype, device=x_MK.device)
    if M == 0 or N == 0:
        return out_MN
    if shape is None:
        kind = kind_of("sparse24", CODE_BITS, weight.group_size, weight.zero is not None, x_MK.dtype)
        shape = choose_shape(kind, M, N, K, device_of(x_MK.device))
    partial, counters = partials(out_MN, shape)
    sparse24_kernel[(cdiv(N, shape.block_n), cdiv(M, shape.block_m), shape.split_k)](
        x_MK,
        weight.codes,
        weight.kept,
        weight.scale,
        weight.zero,
        bias_N,
        out_MN,
        partial,
        counters,
        M,
        N,
        K,
        x_MK.stride(0),
        blocks,
        cdiv(blocks, shape.split_k),
        PLANE=PLANE,
        GROUP=weight.group_size,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        SPLIT_K=shape.split_k,
        DT=tl.float32 if INTERPRET else TRITON_DTYPE[x_MK.dtype],
        HAS_ZERO=weight.zero is not None,
        HAS_BIAS=bias_N is not None,
        SCALE_SUMS=scales_sums(shape, weight.group_size, weight.zero is not None),
        ASM=ASSEMBLY,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,
    )
    return out_MN
