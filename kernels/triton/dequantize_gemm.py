"""The weight-only GEMM for many tokens and for groups that the fused kernel does not take: dequantize, then cuBLAS.

A block of rows of the weight at a time is written to a workspace of at most WORKSPACE_BYTES, and multiplied from there
(mostly from the L2 cache) by torch.mm. The input gradient, grad W, does the same by blocks of columns, so that every
element of it is one sum too. Values are those of `layouts.words.planar_weight`, rounded once to the dtype of the
scales; the entries of sparse rows are added to them there, rounded once more.

The kernel is bound by what it writes, 2 or 4 bytes per weight: masking and shifting in plain Triton keeps up, so that
there is no inline assembly here; a table of levels is read from the nearest cache. Any group size: a plane of 32
columns that lies in one group reads one scale per row, any other plane one per weight, from cache.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.words import PLANE, Planar, planar_block, planar_words
from compress.kernels.triton.sparse_kernels import add_entries
from compress.kernels.tuning.table import cdiv

WORKSPACE_BYTES = 64 * 2**20
# Blocks are multiples of this, so that cuBLAS gets whole tiles.
GRAIN = 128
BLOCK_ROWS = 32
DEQUANTIZE_WARPS = 4
_POWER = tl.constexpr(2.0**23)
_POWER_BITS = tl.constexpr(0x4B000000)


@triton.jit
def dequantize_kernel(
    words_ptr,
    scale_ptr,
    zero_ptr,
    table_ptr,
    out_ptr,
    first_row,
    first_block,
    rows,
    N,
    K,
    stride_wn,
    stride_on,
    BITS: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    TABLE: tl.constexpr,
):
    """words [N, W], scale and zero [G, N], table [17] -> out [rows, ...]: rows from first_row on, columns to K from
    those of first_block on. Grid: (blocks of words, tiles of rows)."""
    PLANES: tl.constexpr = 16 // BITS
    MIDDLE: tl.constexpr = 2 ** (BITS - 1)
    block = first_block + tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, PLANE)
    n = (first_row + row).to(tl.int64)
    inside = row < rows
    words = tl.load(words_ptr + n[:, None] * stride_wn + (block * PLANE + k)[None, :], mask=inside[:, None], other=0)
    wide = words.to(tl.int32)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * stride_on + (tl.program_id(0) * PLANES * PLANE + k)[None, :]
    for plane in tl.static_range(PLANES):
        column = (block * PLANES + plane) * PLANE
        if TABLE:
            code = tl.load(table_ptr + (wide >> (BITS * plane) & (2**BITS - 1)))
        else:
            # A code in the mantissa of 2^23 is an fp32 number without a conversion instruction.
            code = (wide >> (BITS * plane) & (2**BITS - 1) | _POWER_BITS).to(tl.float32, bitcast=True) - _POWER
        if GROUP == -1 or GROUP % PLANE == 0:
            group = 0 if GROUP == -1 else min(column, K - 1) // GROUP
            scale = tl.load(scale_ptr + group * N + n, mask=inside, other=0.0)[:, None]
            if HAS_ZERO:
                code -= tl.load(zero_ptr + group * N + n, mask=inside, other=0).to(tl.float32)[:, None]
        else:
            at = (tl.minimum(column + k, K - 1) // GROUP)[None, :] * N + n[:, None]
            scale = tl.load(scale_ptr + at, mask=inside[:, None], other=0.0)
            if HAS_ZERO:
                code -= tl.load(zero_ptr + at, mask=inside[:, None], other=0).to(tl.float32)
        if TABLE:
            value = (code * (scale.to(tl.float32) * tl.load(table_ptr + 16))).to(scale_ptr.dtype.element_ty)
        else:
            if not HAS_ZERO:
                code -= MIDDLE
            # The product of an integer below 2^8 and a half-precision scale is exact in fp32, so it is rounded once.
            value = (code * scale.to(tl.float32)).to(scale_ptr.dtype.element_ty)
        kept = inside[:, None] & ((column + k) < K)[None, :]
        tl.store(out_ptrs + plane * PLANE, value.to(out_ptr.dtype.element_ty), mask=kept)


def dequantize(weight: Planar, K: int, rows: range, columns: range, out: Tensor) -> None:
    """Write rows and columns (from the beginning of a block of words on) of a weight of K columns to `out`."""
    block = planar_block(weight.bits)
    assert columns.start % block == 0
    assert weight.words.shape[1] == planar_words(K, weight.bits)
    assert weight.scale.is_contiguous()
    grid = (cdiv(len(columns), block), cdiv(len(rows), BLOCK_ROWS))
    dequantize_kernel[grid](
        weight.words,
        weight.scale,
        weight.zero,
        None if weight.table is None else weight.table.values,
        out,
        rows.start,
        columns.start // block,
        len(rows),
        len(weight.words),
        columns.stop,
        weight.words.stride(0),
        out.stride(0),
        BITS=weight.bits,
        PLANE=PLANE,
        GROUP=weight.group_size,
        BLOCK_N=BLOCK_ROWS,
        HAS_ZERO=weight.zero is not None,
        TABLE=weight.table is not None,
        num_warps=DEQUANTIZE_WARPS,
    )


def blocks(length: int, width: int, itemsize: int) -> list[range]:
    """`length` rows (or columns) of `width` elements, in equal multiples of GRAIN that fit the workspace."""
    most = max(1, WORKSPACE_BYTES // (width * itemsize * GRAIN))
    count = cdiv(length, most * GRAIN)
    step = cdiv(cdiv(length, count), GRAIN) * GRAIN
    return [range(start, min(start + step, length)) for start in range(0, length, step)]


def work_dtype(x: Tensor, weight: Planar) -> torch.dtype:
    """The dtype of the product: that of x, or the wider one where scales are wider than x. Levels times a scale are
    rounded to the dtype of x."""
    if weight.table is not None:
        return x.dtype
    return torch.promote_types(x.dtype, weight.scale.dtype)


# Writes rows and columns of a weight to a matrix of that size.
Write = Callable[[range, range, Tensor], None]


def block_product(
    x_MK: Tensor, N: int, work: torch.dtype, bias_N: Tensor | None, write: Write, entries: Entries | None = None
) -> Tensor:
    """[M, N] = x (weight + entries)^T + bias by blocks of rows of a weight [N, K], products in `work`; in the dtype of
    x."""
    M, K = x_MK.shape
    x = x_MK.to(work)
    out_MN = torch.empty(M, N, dtype=work, device=x.device)
    if out_MN.numel() == 0:
        return out_MN.to(x_MK.dtype)
    parts = blocks(N, K, work.itemsize)
    space = torch.empty(len(parts[0]), K, dtype=work, device=x.device)
    for rows in parts:
        dense = space[: len(rows)]
        write(rows, range(K), dense)
        if entries is not None:
            add_entries(entries, rows, range(K), dense)
        part = out_MN[:, rows.start : rows.stop]
        if bias_N is None:
            torch.mm(x, dense.t(), out=part)
        else:
            torch.addmm(bias_N[rows.start : rows.stop].to(work), x, dense.t(), out=part)
    return out_MN.to(x_MK.dtype)


def block_gradient(grad_MN: Tensor, K: int, work: torch.dtype, write: Write) -> Tensor:
    """[M, K] = grad weight by blocks of columns of a weight [N, K], products in `work`; in the dtype of grad."""
    M, N = grad_MN.shape
    grad = grad_MN.to(work)
    out_MK = torch.empty(M, K, dtype=work, device=grad.device)
    if out_MK.numel() == 0:
        return out_MK.to(grad_MN.dtype)
    if N == 0:
        return out_MK.zero_().to(grad_MN.dtype)
    parts = blocks(K, N, work.itemsize)
    space = torch.empty(N * len(parts[0]), dtype=work, device=grad.device)
    for columns in parts:
        dense = space[: N * len(columns)].view(N, len(columns))
        write(range(N), columns, dense)
        torch.mm(grad, dense, out=out_MK[:, columns.start : columns.stop])
    return out_MK.to(grad_MN.dtype)


def dequantize_gemm(
    x_MK: Tensor, weight: Planar, bias_N: Tensor | None = None, entries: Entries | None = None
) -> Tensor:
    """[M, N] = x (weight + entries)^T + bias on a GPU (or under the interpreter), in the dtype of x."""
    write = partial(dequantize, weight, x_MK.shape[1])
    return block_product(x_MK, len(weight.words), work_dtype(x_MK, weight), bias_N, write, entries)


def input_gradient(grad_MN: Tensor, weight: Planar, K: int) -> Tensor:
    """[M, K] = grad weight on a GPU (or under the interpreter), in the dtype of grad."""
    return block_gradient(grad_MN, K, work_dtype(grad_MN, weight), partial(dequantize, weight, K))
