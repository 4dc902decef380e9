"""The loops of `cpu_columns.cpp` on tensors: rounding a run of columns, each compensating for the errors of those
before it, descent on codes, and the search for a scale.

Shapes: K columns, B of them in a block, N outputs, G groups, g members of a group. float32 on a CPU, outputs side by
side: every array is [columns, N].
"""

import ctypes
from dataclasses import fields
from typing import Literal

import torch
from torch import Tensor

from compress.kernels.columns import RANGES, ColumnBlock, DecidedColumns, RangeSearch, Rounding, SweptBlock
from compress.kernels.cpu import build
from compress.kernels.cpu.arguments import TYPES

# The cost of rounding a number, in multiplications; and the multiplications that are worth a thread, as in cpu_work.h.
DECISION, WORTH_A_THREAD = 32, 2**17
LANES = 16  # outputs that are decided at once, where they do not depend on each other


def useful_threads(multiplications: int) -> int:
    """The threads that so many multiplications are worth."""
    return min(torch.get_num_threads(), max(1, multiplications // WORTH_A_THREAD))


class _Rounding(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_float) for name in ("lowest_code", "highest_code")),
        *((name, ctypes.c_int32) for name in ("scale_type", "free_zero")),
        ("table", ctypes.c_void_p),
        ("levels", ctypes.c_int64),
    )


class _Columns(ctypes.Structure):
    """`Columns` of cpu_columns.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "target", "value", "change", "matrix", "diagonal")),
        *((name, ctypes.c_void_p) for name in ("loss", "codes", "scale", "zero", "group", "kept", "exact", "extra")),
        *((name, ctypes.c_void_p) for name in ("price", "cost", "outputs", "share", "joint")),
        *((name, ctypes.c_int64) for name in ("N", "B", "begin", "end", "run")),
        ("rounding", _Rounding),
        ("threads", ctypes.c_int32),
    )


class _ColumnSearch(ctypes.Structure):
    """`Search` of cpu_columns.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "importance", "factors", "scale", "zero")),
        *((name, ctypes.c_int64) for name in ("N", "g", "count")),
        ("rounding", _Rounding),
        *((name, ctypes.c_float) for name in ("divisor", "least_scale", "largest_scale")),
        ("number_type", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


def _as_read(rounding: Rounding) -> _Rounding:
    table = (None, 0) if rounding.table is None else (rounding.table.data_ptr(), rounding.table.shape[1])
    return _Rounding(rounding.lowest, rounding.highest, TYPES[rounding.scale_dtype], rounding.free_zero, *table)


def sweep_columns(
    block: SweptBlock, held: DecidedColumns, begin: int, end: int, search: RangeSearch | None = None
) -> None:
    """Decide columns begin ... end of a block one after another, each compensating for the errors of those before
    it."""
    assert search is None, "scales are found before"
    _call("sweep_columns", block, held, begin, end)


def descend_columns(block: ColumnBlock, held: DecidedColumns) -> None:
    """Move the codes of a block's columns, one column after another, each to the code nearest its optimum where that is
    closer than its present code."""
    _call("descend_columns", block, held, 0, len(block.target))


def _call(
    loop: Literal["sweep_columns", "descend_columns"], block: ColumnBlock, held: DecidedColumns, begin: int, end: int
) -> None:
    count, outputs = block.target.shape
    part = slice(block.first, block.first + count)
    filled = _Columns(N=outputs, B=count, begin=begin, end=end, rounding=_as_read(held.rounding))
    filled.threads = useful_threads(outputs * (end - begin) * (end - begin + DECISION))
    tensors: dict[str, Tensor | None] = {each.name: getattr(block, each.name) for each in fields(block)}
    del tensors["first"]
    tensors |= {
        "codes": held.codes[part],
        "group": held.group_K[part],
        "scale": held.scale,
        "zero": held.zero,
        "price": held.price,
    }
    tensors |= {"cost": held.cost_K[part], "outputs": held.outputs, "share": held.share}
    if held.outputs is not None:
        filled.run = held.outputs.shape[1]
        filled.threads = useful_threads(outputs * (end - begin) * (end - begin + DECISION * LANES + filled.run))
        tensors["joint"] = torch.empty_like(block.change)
    columns = {"kept": held.kept, "exact": held.exact, "extra": held.extra}
    tensors |= {name: None if tensor is None else tensor[part] for name, tensor in columns.items()}
    for name, tensor in tensors.items():
        if tensor is not None:
            assert tensor.is_contiguous(), name
            setattr(filled, name, tensor.data_ptr())
    getattr(build.library("columns"), loop)(ctypes.byref(filled))


def search_ranges(x_gN: Tensor, search: RangeSearch) -> tuple[Tensor, Tensor]:
    """(scale, zero) [N] of N groups."""
    members, count = x_gN.shape
    x_gN, tried = x_gN.contiguous(), torch.tensor(search.factors, dtype=torch.float32)
    scale_N, zero_N = x_gN.new_empty(count), x_gN.new_empty(count)
    rounding = search.rounding
    filled = _ColumnSearch(N=count, g=members, count=len(tried), rounding=_as_read(rounding), divisor=search.divisor)
    filled.least_scale, filled.largest_scale = search.least, search.largest
    filled.number_type = TYPES[torch.float16 if search.half else rounding.scale_dtype]
    filled.kind = RANGES.index(search.kind)
    filled.threads = useful_threads(count * members * len(tried) * DECISION)
    filled.x, filled.factors = x_gN.data_ptr(), tried.data_ptr()
    filled.scale, filled.zero = scale_N.data_ptr(), zero_N.data_ptr()
    if search.importance is not None:
        importance_g = search.importance.contiguous()
        filled.importance = importance_g.data_ptr()
    build.library("columns").search_ranges(ctypes.byref(filled))
    return scale_N, zero_N
