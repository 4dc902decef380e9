"""The weight-only product of experts, one launch for all of them: out_p = x_token(p) W_expert(p)^T + bias_expert(p).

Pairs of a token and an expert that it goes to are sorted by expert (`grouped.Routing`). A tile of the output holds
pairs of one expert, so that it reads one weight: expert e with c_e pairs has ceil(c_e / BLOCK_M) tiles, none where no
token goes to it. How many pairs each has is known to the GPU alone; the grid holds the most tiles that there can be
(`choose.most_tiles`), and every program finds the expert of its tile in the sums of c_e, or that it has none. So
nothing waits for the CPU, and the launch can be captured. The loop over K, its split and the epilogue are those of
`planar_gemm`; x is read through the pairs, never gathered.

Pairs whose expert is none (beyond the last: transformers' mark of tokens that another rank serves) come last, and get
zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.layouts.words import Planar, planar_block
from compress.kernels.triton.planar_gemm import INTERPRET, TRITON_DTYPE, planar_constants, planar_sums
from compress.kernels.triton.split_k import finish, tile_partials
from compress.kernels.tuning.choose import device_of, fused, grouped, most_tiles
from compress.kernels.tuning.table import Shape, bucket, cdiv


@triton.jit
def pairs_of_tile(tile, start_ptr, pairs, E, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """(expert, first pair, end of the expert's pairs) of a tile. Expert E: pairs without expert; E + 1: no tile.

    start int32 [E + 1]: the first pair of each expert, and of those without. EXPERTS: a power of two above E.
    """
    e = tl.arange(0, EXPERTS)
    start = tl.load(start_ptr + e, mask=e <= E, other=pairs)
    end = tl.load(start_ptr + e + 1, mask=e < E, other=pairs)
    tiles = tl.cdiv(end - start, BLOCK_M)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    mine = e == expert
    begin = tl.sum(tl.where(mine, start + (tile - after + tiles) * BLOCK_M, 0), 0)
    return min(expert, E + 1), begin, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def store_zeros(m, n, out_ptr, last, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zeros for pairs m up to `last`."""
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    zeros = tl.zeros((BLOCK_N, BLOCK_M), out_ptr.dtype.element_ty)
    tl.store(out_ptrs, zeros, mask=(m[None, :] < last) & (n[:, None] < N))


@triton.jit(do_not_specialize=["pairs", "blocks_per_split"])
def grouped_kernel(
    x_ptr,
    token_ptr,
    start_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    pairs,
    E,
    N,
    K,
    G,
    stride_xm,
    stride_we,
    stride_wn,
    blocks_per_split,
    BITS: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """x [M, K], token int32 [pairs] (its rows), start int32 [E + 1], words [E, N, W] int16, scale and zero [E, G, N],
    bias [E, N], out [pairs, N]; all but x and words contiguous. Grid: (N tiles, most tiles of pairs, SPLIT_K). The
    rest as in `planar_kernel`."""
    expert, begin, end = pairs_of_tile(tl.program_id(1), start_ptr, pairs, E, BLOCK_M, EXPERTS)
    if expert > E:
        return
    m = begin + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if expert == E:
        store_zeros(m, n, out_ptr, end, N, BLOCK_M, BLOCK_N)
        return
    m_read = tl.load(token_ptr + m, mask=m < end, other=0).to(tl.int64)
    wide = expert.to(tl.int64)
    words_ptr += wide * stride_we
    scale_ptr += wide * G * N
    if HAS_ZERO:
        zero_ptr += wide * G * N
    if HAS_BIAS:
        bias_ptr += wide * N
    acc = planar_sums(
        x_ptr,
        m_read,
        stride_xm,
        words_ptr,
        stride_wn,
        scale_ptr,
        zero_ptr,
        n,
        N,
        K,
        blocks_per_split,
        BITS,
        PLANE,
        GROUP,
        BLOCK_M,
        BLOCK_N,
        DT,
        HAS_ZERO,
        SCALE_SUMS,
        EVEN_K,
        ASM,
    )
    finish(acc, m, n, out_ptr, bias_ptr, partial_ptr, counter_ptr, end, N, BLOCK_M, BLOCK_N, SPLIT_K, HAS_BIAS)


def _shape(pairs: int, weight: Planar, K: int) -> Shape:
    """The derived configuration."""
    (E, N, _), device = weight.words.shape, device_of(weight.words.device)
    single = fused(cdiv(pairs, min(E, pairs)), N, K, weight.bits, weight.group_size, device)
    return grouped(single, pairs, E, N, cdiv(K, planar_block(weight.bits)), device)


def grouped_gemm(
    x_MK: Tensor,
    token_P: Tensor,
    start_E: Tensor,
    weight: Planar,
    bias_EN: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """[P, N] on a GPU (or under the interpreter), in the dtype of x: fp16 or bf16 [M, K], contiguous along K.

    token int32 [P], the rows of x; start int32 [E + 1]; the parts of the weight have a leading dimension [E].
    """
    (E, N, _), K, pairs = weight.words.shape, x_MK.shape[1], len(token_P)
    assert x_MK.stride(-1) == 1
    assert weight.scale.dtype == x_MK.dtype
    assert weight.scale.is_contiguous()
    assert weight.words.stride(-1) == 1
    out_PN = torch.empty(pairs, N, dtype=x_MK.dtype, device=x_MK.device)
    if pairs == 0 or N == 0:
        return out_PN
    shape = shape or _shape(pairs, weight, K)
    tiles = most_tiles(pairs, E, shape.block_m)
    partial, counters = tile_partials(tiles * cdiv(N, shape.block_n), out_PN, shape, torch.float32)
    grouped_kernel[(cdiv(N, shape.block_n), tiles, shape.split_k)](
        x_MK,
        token_P,
        start_E,
        weight.words,
        weight.scale,
        weight.zero,
        bias_EN,
        out_PN,
        partial,
        counters,
        pairs,
        E,
        N,
        K,
        weight.scale.shape[1],
        x_MK.stride(0),
        weight.words.stride(0),
        weight.words.stride(1),
        cdiv(cdiv(K, planar_block(weight.bits)), shape.split_k),
        DT=tl.float32 if INTERPRET else TRITON_DTYPE[x_MK.dtype],
        HAS_BIAS=bias_EN is not None,
        SCALE_SUMS=shape.scales_sums(weight.group_size, weight.bits),
        EXPERTS=bucket(E + 1),
        **planar_constants(weight, K, shape),
    )
    return out_PN
