"""The kernels over sparse rows (`entries.Entries`): a product of few tokens, and entries added to a dense block.

A program takes one row, so that its sum has one order whatever the others hold, and walks over its entries BLOCK_E at
a time. In a product every token gathers its numbers of x, which stay in the cache. Columns within a row differ: the
entries of a step never meet at one place of a dense block.
"""

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.layouts.entries import Entries
from compress.kernels.tuning.table import bucket, cdiv

BLOCK_E = 64
WARPS = 1
# Tokens of a program of the product.
MAX_BLOCK_M = 16


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x_ptr,
    row_start_ptr,
    column_ptr,
    value_ptr,
    out_ptr,
    M,
    N,
    stride_xm,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """out [M, N], contiguous, += x [M, K] times the entries of each row. Grid: (N, M tiles)."""
    n = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    m_read = tl.where(m < M, m, 0).to(tl.int64)
    first = tl.load(row_start_ptr + n)
    last = tl.load(row_start_ptr + n + 1)
    sums = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for start in range(first, last, BLOCK_E):
        inside = start + e < last
        column = tl.load(column_ptr + start + e, mask=inside, other=0).to(tl.int32)
        value = tl.load(value_ptr + start + e, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + m_read[:, None] * stride_xm + column[None, :], mask=inside[None, :], other=0.0)
        sums += x.to(tl.float32) * value[None, :]
    out_ptrs = out_ptr + m.to(tl.int64) * N + n
    before = tl.load(out_ptrs, mask=m < M, other=0.0).to(tl.float32)
    tl.store(out_ptrs, (before + tl.sum(sums, 1)).to(out_ptr.dtype.element_ty), mask=m < M)


@triton.jit
def add_kernel(
    row_start_ptr,
    column_ptr,
    value_ptr,
    out_ptr,
    first_row,
    first_column,
    last_column,
    stride_on,
    BLOCK_E: tl.constexpr,
):
    """out [rows, columns], of a weight's rows from first_row on and of its columns from first_column to last_column,
    += the entries there. Grid: (rows,)."""
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    first = tl.load(row_start_ptr + first_row + row)
    last = tl.load(row_start_ptr + first_row + row + 1)
    for start in range(first, last, BLOCK_E):
        inside = start + e < last
        column = tl.load(column_ptr + start + e, mask=inside, other=-1).to(tl.int32)
        value = tl.load(value_ptr + start + e, mask=inside, other=0.0).to(tl.float32)
        here = inside & (column >= first_column) & (column < last_column)
        ptrs = out_ptr + row.to(tl.int64) * stride_on + (column - first_column)
        sums = tl.load(ptrs, mask=here, other=0.0).to(tl.float32) + value
        tl.store(ptrs, sums.to(out_ptr.dtype.element_ty), mask=here)


def add_product(x_MK: Tensor, entries: Entries, out_MN: Tensor) -> Tensor:
    """out + x entries^T, written to `out`: sums in fp32, rounded once to its dtype."""
    (M, N) = out_MN.shape
    assert x_MK.stride(-1) == 1
    assert out_MN.is_contiguous()
    if M == 0 or N == 0:
        return out_MN
    block_m = min(MAX_BLOCK_M, bucket(M))
    product_kernel[(N, cdiv(M, block_m))](
        x_MK, *entries, out_MN, M, N, x_MK.stride(0), BLOCK_M=block_m, BLOCK_E=BLOCK_E, num_warps=WARPS
    )
    return out_MN


def add_entries(entries: Entries, rows: range, columns: range, out: Tensor) -> None:
    """Add the entries of some rows and columns to a matrix of that size."""
    if len(rows) == 0:
        return
    add_kernel[(len(rows),)](
        *entries,
        out,
        rows.start,
        columns.start,
        columns.stop,
        out.stride(0),
        BLOCK_E=BLOCK_E,
        num_warps=WARPS,
    )
