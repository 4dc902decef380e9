"""Products with codes in tiles (`layouts.tiles.TileWords`): a fused kernel for few tokens, dequantization for many.

Both kernels decode a block of words at a time, 16 / bits planes of 32 columns. Of a plane's two halves of 16 columns,
each in one group, they read the codes of scale and zero point and the range of the tile [BLOCK_N, 2], and spread them
over the half: value = (code - zero) * scale, in fp32, rounded to the dtype of the product.

The fused kernel computes out^T = W x^T, as `planar_gemm` does, whose tiles, split of K and epilogue it has. Not tuned,
and slower than a dense product on an H100.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.tiles import NIBBLE, TileWords
from compress.kernels.layouts.words import PLANE, planar_block
from compress.kernels.triton.dequantize_gemm import BLOCK_ROWS, DEQUANTIZE_WARPS, block_gradient, block_product
from compress.kernels.triton.planar_gemm import INTERPRET, TRITON_DTYPE
from compress.kernels.triton.split_k import finish, partials
from compress.kernels.tuning.choose import device_of, fused
from compress.kernels.tuning.table import Shape, cdiv


@triton.jit
def plane_values(
    code,
    levels_ptr,
    ranges_ptr,
    n,
    column,
    N,
    K,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    LEVEL_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Codes (int32 [BLOCK_N, PLANE]) of rows n < N and of the columns from `column` on -> fp32 values."""
    HALF: tl.constexpr = PLANE // 2
    groups = K // GROUP
    group = tl.minimum((column + tl.arange(0, 2) * HALF) // GROUP, groups - 1)
    at = n[:, None] * groups + group[None, :]
    scale_code = tl.load(levels_ptr + at).to(tl.int32)
    if LEVEL_BITS == 4:
        zero_code = scale_code >> 4
        scale_code = scale_code & 15
    else:
        zero_code = tl.load(levels_ptr + (n + N)[:, None] * groups + group[None, :]).to(tl.int32)
    ranges = ranges_ptr + (n // TILE_ROWS)[:, None] * 4 * groups + group[None, :]
    scale = tl.load(ranges + groups).to(tl.float32) + tl.load(ranges).to(tl.float32) * scale_code.to(tl.float32)
    zero = tl.load(ranges + 3 * groups).to(tl.float32)
    zero += tl.load(ranges + 2 * groups).to(tl.float32) * zero_code.to(tl.float32)
    halves = tl.reshape(code.to(tl.float32), (BLOCK_N, 2, HALF))
    return tl.reshape((halves - zero[:, :, None]) * scale[:, :, None], (BLOCK_N, PLANE))


@triton.jit(do_not_specialize=["M", "blocks_per_split"])
def tile_kernel(
    x_ptr,
    words_ptr,
    levels_ptr,
    ranges_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    blocks_per_split,
    BITS: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    LEVEL_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """x [M, K], words [N, W] int16, levels [.., N, G] uint8, ranges [T, 4, G], bias [N], out [M, N] contiguous.

    Grid: (N tiles, M tiles, SPLIT_K). DT: the dtype of the products; fp32 under the interpreter."""
    PLANES: tl.constexpr = 16 // BITS
    BLOCK_K: tl.constexpr = PLANES * PLANE
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, PLANE)
    m_read = tl.where(m < M, m, 0).to(tl.int64)
    n_read = tl.where(n < N, n, 0).to(tl.int64)
    first = tl.program_id(2) * blocks_per_split
    last = min(first + blocks_per_split, tl.cdiv(K, BLOCK_K))
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(first, last):
        words = tl.load(words_ptr + n_read[:, None] * stride_wn + (block * PLANE + k)[None, :]).to(tl.int32)
        for plane in tl.static_range(PLANES):
            column = block * BLOCK_K + plane * PLANE
            code = words >> (BITS * plane) & (2**BITS - 1)
            weight = plane_values(
                code, levels_ptr, ranges_ptr, n_read, column, N, K, PLANE, GROUP, TILE_ROWS, LEVEL_BITS, BLOCK_N
            )
            inside = (column + k)[:, None] < K
            x = tl.load(x_ptr + m_read[None, :] * stride_xm + (column + k)[:, None], mask=inside, other=0.0)
            acc = tl.dot(weight.to(DT), x.to(DT), acc)
    finish(acc, m, n, out_ptr, bias_ptr, partial_ptr, counter_ptr, M, N, BLOCK_M, BLOCK_N, SPLIT_K, HAS_BIAS)


@triton.jit
def dequantize_tiles_kernel(
    words_ptr,
    levels_ptr,
    ranges_ptr,
    out_ptr,
    first_row,
    first_block,
    rows,
    last_column,
    N,
    K,
    stride_wn,
    stride_on,
    BITS: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    LEVEL_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows from first_row on and columns from those of first_block to last_column -> out [rows, ...]. Grid: (blocks of
    words, tiles of rows)."""
    PLANES: tl.constexpr = 16 // BITS
    block = first_block + tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, PLANE)
    inside = row < rows
    n = (first_row + tl.where(inside, row, 0)).to(tl.int64)
    words = tl.load(words_ptr + n[:, None] * stride_wn + (block * PLANE + k)[None, :]).to(tl.int32)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * stride_on + (tl.program_id(0) * PLANES * PLANE + k)[None, :]
    for plane in tl.static_range(PLANES):
        column = (block * PLANES + plane) * PLANE
        code = words >> (BITS * plane) & (2**BITS - 1)
        value = plane_values(
            code, levels_ptr, ranges_ptr, n, column, N, K, PLANE, GROUP, TILE_ROWS, LEVEL_BITS, BLOCK_N
        ).to(ranges_ptr.dtype.element_ty)
        kept = inside[:, None] & ((column + k) < last_column)[None, :]
        tl.store(out_ptrs + plane * PLANE, value.to(out_ptr.dtype.element_ty), mask=kept)


def _constants(weight: TileWords) -> dict[str, int]:
    level_bits = NIBBLE if len(weight.levels) == 1 else 2 * NIBBLE
    return {
        "BITS": weight.bits,
        "PLANE": PLANE,
        "GROUP": weight.group_size,
        "TILE_ROWS": weight.tile_rows,
        "LEVEL_BITS": level_bits,
    }


def dequantize(weight: TileWords, K: int, rows: range, columns: range, out: Tensor) -> None:
    """Write rows and columns (from the beginning of a block of words on) of a weight of K columns to `out`."""
    block = planar_block(weight.bits)
    assert columns.start % block == 0
    assert all(part.is_contiguous() for part in (weight.words, weight.levels, weight.ranges))
    dequantize_tiles_kernel[(cdiv(len(columns), block), cdiv(len(rows), BLOCK_ROWS))](
        *weight[:3],
        out,
        rows.start,
        columns.start // block,
        len(rows),
        columns.stop,
        len(weight.words),
        K,
        weight.words.stride(0),
        out.stride(0),
        **_constants(weight),
        BLOCK_N=BLOCK_ROWS,
        num_warps=DEQUANTIZE_WARPS,
    )


def tile_dequantize_gemm(
    x_MK: Tensor, weight: TileWords, bias_N: Tensor | None = None, entries: Entries | None = None
) -> Tensor:
    """[M, N] = x (weight + entries)^T + bias by dense blocks, on a GPU (or under the interpreter). Values are rounded
    to the dtype of x, as in the fused kernel, whatever that of the ranges."""
    write = partial(dequantize, weight, x_MK.shape[1])
    return block_product(x_MK, len(weight.words), x_MK.dtype, bias_N, write, entries)


def input_gradient(grad_MN: Tensor, weight: TileWords, K: int) -> Tensor:
    """[M, K] = grad weight on a GPU (or under the interpreter), in the dtype of grad."""
    return block_gradient(grad_MN, K, grad_MN.dtype, partial(dequantize, weight, K))


def tile_gemm(x_MK: Tensor, weight: TileWords, bias_N: Tensor | None = None, shape: Shape | None = None) -> Tensor:
    """[M, N] = x weight^T + bias on a GPU (or under the interpreter), in the dtype of x, fp16 or bf16."""
    (M, K), N = x_MK.shape, len(weight.words)
    assert x_MK.stride(-1) == 1
    assert all(part.is_contiguous() for part in (weight.words, weight.levels, weight.ranges))
    out_MN = torch.empty(M, N, dtype=x_MK.dtype, device=x_MK.device)
    if M == 0 or N == 0:
        return out_MN
    if shape is None:
        shape = fused(M, N, K, weight.bits, PLANE, device_of(x_MK.device))
    partial, counters = partials(out_MN, shape)
    tile_kernel[(cdiv(N, shape.block_n), cdiv(M, shape.block_m), shape.split_k)](
        x_MK,
        *weight[:3],
        bias_N,
        out_MN,
        partial,
        counters,
        M,
        N,
        K,
        x_MK.stride(0),
        weight.words.stride(0),
        cdiv(cdiv(K, planar_block(weight.bits)), shape.split_k),
        **_constants(weight),
        DT=tl.float32 if INTERPRET else TRITON_DTYPE[x_MK.dtype],
        HAS_BIAS=bias_N is not None,
        **shape.constants(),
    )
    return out_MN
