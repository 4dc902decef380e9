"""A sweep over columns, descent on their codes, and the search for scales: the loops of `cpu/cpu_columns.cpp` on a GPU.

Shapes: B columns of a block, N outputs, G groups, g members of a group; every array is [columns, N].

A program owns a few outputs. It holds the targets of a tile of columns in registers, [TILE, ROWS]: column j is taken
out by a masked sum, decided, and its change is added to all later columns of the tile, times their factors. So no
register is indexed by a number that is not known beforehand, and every target is summed in the order of the columns, as
on a CPU. A later tile first adds the changes of the tiles before it, from memory.

A tile that is a group may find its own scale: what GPTQ would hold now is what the columns would aim at if each of them
was taken as it is. So all groups of a block are one launch.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.columns import RANGES, ColumnBlock, DecidedColumns, RangeSearch, Rounding, SweptBlock
from compress.kernels.cpu.arguments import TYPES
from compress.kernels.triton.column_rounding import best_range, decide
from compress.kernels.tuning.table import bucket, cdiv

# Outputs of a program, and columns of a tile that is no group. A warp holds 1,024 numbers, 32 in each thread.
ROWS, COLUMNS, WARP = 8, 64, 1024


@triton.jit(do_not_specialize=["begin", "end", "step"])
def columns_kernel(
    weight_ptr,
    target_ptr,
    value_ptr,
    change_ptr,
    matrix_ptr,
    diagonal_ptr,
    loss_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    group_ptr,
    cost_ptr,
    kept_ptr,
    exact_ptr,
    extra_ptr,
    price_ptr,
    table_ptr,
    importance_ptr,
    factors_ptr,
    N,
    begin,
    end,
    step,
    stride_before,
    stride_after,
    DESCENT: tl.constexpr,
    CODES: tl.constexpr,
    RANGE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Columns begin ... end, `step` of them at a time, each a group that finds its scale where there is importance [B].
    Grid: (cdiv(N, ROWS),)."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = n < N
    k = tl.arange(0, TILE)
    loss = tl.zeros((ROWS,), tl.float32)
    for first in range(begin, end, step):
        last = tl.minimum(first + step, end)
        here = first + k < last
        places = (first + k)[:, None] * N + n[None, :]
        inside = here[:, None] & there[None, :]
        target = tl.load(target_ptr + places, mask=inside, other=0.0)
        for i in range(begin, first):
            factor = tl.load(matrix_ptr + i * stride_before + (first + k) * stride_after, mask=here, other=0.0)
            if DESCENT:
                factor = 0.0 - factor
            moved = tl.load(change_ptr + i * N + n, mask=there, other=0.0)
            target = tl.fma(factor[:, None], moved[None, :], target)
        if importance_ptr is not None:
            x = target
            for j in range(first, last):
                own = tl.sum(tl.where((first + k == j)[:, None], x, 0.0), 0)
                moved = tl.load(weight_ptr + j * N + n, mask=there, other=0.0) - own
                factor = tl.load(
                    matrix_ptr + j * stride_before + (first + k) * stride_after, mask=here & (first + k > j), other=0.0
                )
                x = tl.fma(factor[:, None], moved[None, :], x)
            if kept_ptr is not None:
                x = tl.where(tl.load(kept_ptr + places, mask=inside, other=0) != 0, x, 0.0)
            tl.store(value_ptr + places, x, mask=inside)
            tl.debug_barrier()
            own_ptr, weight_of_ptr = value_ptr + first * N + n[None, :], importance_ptr + first
            scale, zero = best_range(own_ptr, N, last - first, there, weight_of_ptr, factors_ptr, CODES, RANGE, TILE)
            group = tl.load(group_ptr + first) * N + n
            tl.store(scale_ptr + group, scale, mask=there)
            tl.store(zero_ptr + group, zero, mask=there)
            tl.debug_barrier()
        for j in range(first, last):
            at = j * N + n
            group = tl.load(group_ptr + j) * N + n
            scale = tl.load(scale_ptr + group, mask=there, other=1.0)
            zero = tl.load(zero_ptr + group, mask=there, other=0.0)
            diagonal = tl.load(diagonal_ptr + j)
            cost = tl.load(cost_ptr + j)
            factor = tl.load(
                matrix_ptr + j * stride_before + (first + k) * stride_after, mask=here & (first + k > j), other=0.0
            )
            aim = tl.sum(tl.where((first + k == j)[:, None], target, 0.0), 0)
            if DESCENT:
                factor = 0.0 - factor
                old = tl.load(value_ptr + at, mask=there, other=0.0)
                aim = old + tl.div_rn(aim, aim * 0.0 + diagonal)
            codes, value, extra = decide(
                aim, scale, zero, at, n, there, cost, kept_ptr, exact_ptr, extra_ptr, price_ptr, table_ptr, CODES
            )
            if DESCENT:
                closer = tl.abs(old - aim) > tl.abs(value - aim)
                value = tl.where(closer, value, old)
                moved = value - old
            else:
                closer = there
                error = aim - value
                loss += diagonal * (error * error)
                moved = tl.load(weight_ptr + at, mask=there, other=0.0) - value
            tl.store(codes_ptr + at, codes, mask=there & closer)
            if extra_ptr is not None:
                tl.store(extra_ptr + at, extra.to(extra_ptr.dtype.element_ty), mask=there & closer)
            tl.store(value_ptr + at, value, mask=there)
            tl.store(change_ptr + at, moved, mask=there)
            target = tl.fma(factor[:, None], moved[None, :], target)
        tl.debug_barrier()
    if not DESCENT:
        tl.store(loss_ptr + n, tl.load(loss_ptr + n, mask=there, other=0.0) + loss, mask=there)


@triton.jit(do_not_specialize=["members"])
def search_kernel(
    x_ptr,
    importance_ptr,
    factors_ptr,
    scale_ptr,
    zero_ptr,
    N,
    members,
    stride_xg,
    stride_xn,
    CODES: tl.constexpr,
    RANGE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x [g, N], importance [g] or none -> scale, zero [N]. Grid: (cdiv(N, ROWS),)."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = n < N
    own_ptr = x_ptr + n.to(tl.int64)[None, :] * stride_xn
    scale, zero = best_range(own_ptr, stride_xg, members, there, importance_ptr, factors_ptr, CODES, RANGE, TILE)
    tl.store(scale_ptr + n, scale, mask=there)
    tl.store(zero_ptr + n, zero, mask=there)


@cache
def _factors(factors: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(factors, dtype=torch.float32, device=device)


def _codes(rounding: Rounding) -> tuple[int, int, int, bool, int]:
    """CODES of a kernel (`column_rounding`)."""
    levels = 0 if rounding.table is None else rounding.table.shape[1]
    return rounding.lowest, rounding.highest, levels, rounding.free_zero, TYPES[rounding.scale_dtype]


def _range(search: RangeSearch) -> tuple[int, int, float, float, float, int]:
    """RANGE of a kernel (`column_rounding`)."""
    numbers = TYPES[torch.float16 if search.half else search.rounding.scale_dtype]
    return len(search.factors), RANGES.index(search.kind), search.divisor, search.least, search.largest, numbers


def sweep_columns(
    block: SweptBlock, held: DecidedColumns, begin: int, end: int, search: RangeSearch | None = None
) -> None:
    """`cpu.column_sweep.sweep_columns` on a GPU (or under the interpreter). search: of the scale of each group of these
    columns."""
    _launch(block, held, begin, end, block.weight, block.loss, search)


def descend_columns(block: ColumnBlock, held: DecidedColumns) -> None:
    """`cpu.column_sweep.descend_columns` on a GPU (or under the interpreter)."""
    _launch(block, held, 0, len(block.target), None, None, None)


def _launch(
    block: ColumnBlock,
    held: DecidedColumns,
    begin: int,
    end: int,
    weight: Tensor | None,
    loss: Tensor | None,
    search: RangeSearch | None,
) -> None:
    """Without a weight: descent."""
    assert held.outputs is None, "outputs do not depend on each other here"
    count, outputs = block.target.shape
    part, step = slice(block.first, block.first + count), COLUMNS if search is None else search.group
    tile = bucket(min(step, end - begin))
    columns = (held.kept, held.exact, held.extra, None if search is None else search.importance)
    kept, exact, extra, importance = (None if tensor is None else tensor[part] for tensor in columns)
    flags = (None if tensor is None else tensor.view(torch.uint8) for tensor in (kept, exact))
    factors = None if search is None else _factors(search.factors, block.target.device)
    numbers = (weight, block.target, block.value, block.change, block.matrix, block.diagonal, loss)
    decided = (held.codes[part], held.scale, held.zero, held.group_K[part], held.cost_K[part])
    for tensor in (block.target, block.value, block.change, block.diagonal, *decided, kept, exact, extra):
        assert tensor is None or tensor.is_contiguous()
    sizes = (outputs, begin, end, step, *block.matrix.stride())
    columns_kernel[(cdiv(outputs, ROWS),)](
        *(*numbers, *decided, *flags, extra, held.price, held.rounding.table, importance, factors, *sizes),
        DESCENT=weight is None,
        CODES=_codes(held.rounding),
        RANGE=None if search is None else _range(search),
        TILE=tile,
        ROWS=ROWS,
        num_warps=max(1, tile * ROWS // WARP),
        enable_fp_fusion=False,  # products are rounded before they are added, but for those of changes
    )


def search_ranges(x_gN: Tensor, search: RangeSearch) -> tuple[Tensor, Tensor]:
    """`cpu.column_sweep.search_ranges` on a GPU (or under the interpreter)."""
    members, count = x_gN.shape
    scale, zero = (torch.empty(count, dtype=torch.float32, device=x_gN.device) for _ in range(2))
    importance = None if search.importance is None else search.importance.contiguous()
    search_kernel[(cdiv(count, ROWS),)](
        *(x_gN, importance, _factors(search.factors, x_gN.device), scale, zero, count, members, *x_gN.stride()),
        CODES=_codes(search.rounding),
        RANGE=_range(search),
        TILE=min(bucket(members), WARP // ROWS),
        ROWS=ROWS,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return scale, zero
