"""The loops of `cpu_columns.cpp` on tensors: rounding a run of columns, each compensating for the errors of those
before it, descent on codes, and the search for a scale.

Shapes: K columns, B of them in a block, N outputs, G groups, g members of a group. float32 on a CPU, outputs side by
side: every array is [columns, N].
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from compress.kernels.cpu import build
from compress.kernels.cpu.arguments import TYPES

Range = Literal["asymmetric", "signed scale", "unsigned", "magnitude"]
RANGES: tuple[Range, ...] = ("asymmetric", "signed scale", "unsigned", "magnitude")
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


@dataclass(frozen=True)
class Rounding:
    """Codes from lowest to highest, and the dtype of scales, to which values are rounded. free_zero: zero points are no
    whole numbers."""

    lowest: int
    highest: int
    scale_dtype: torch.dtype
    free_zero: bool = False

    def _as_read(self) -> _Rounding:
        return _Rounding(self.lowest, self.highest, TYPES[self.scale_dtype], self.free_zero)


@dataclass(frozen=True)
class ScaleRange:
    """The numbers that scales can be: magnitudes from least to largest; half: those of float16 alone."""

    least: float
    largest: float
    half: bool = False


@dataclass(frozen=True)
class DecidedColumns:
    """The decisions about K columns: codes [K, N], scale and zero [G, N], group_of [K], and their constraints.

    kept [K, N]: weights that are not pruned; the others have the code of 0; None: all. exact [K, N]: weights that have
    a value of their own; None: none. price [N]: more weights may become exact, those whose error costs more than this,
    by cost_K; None: no more. extra [K, N] of the scales' dtype: the value of exact weights beyond the code nearest to
    0; None: their codes are 0. outputs [N, S] and share [N]: of outputs that depend on each other in runs of S, in a
    sweep the factors of H_O, in descent H_O and its diagonal (`solvers.output_feedback`); None: they do not.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    group_of: Sequence[int]
    rounding: Rounding
    kept: Tensor | None
    exact: Tensor | None
    price: Tensor | None
    cost_K: Tensor
    extra: Tensor | None = None
    outputs: Tensor | None = None
    share: Tensor | None = None


@dataclass(frozen=True)
class ColumnBlock:
    """Columns first ... first + B: target, value and change, [B, N] each; matrix [B, B], diagonal [B].

    target: in a sweep, the value that a column aims at before the feedback of earlier columns in its run; in descent,
    the gradient. change: in a sweep, weight - value; in descent, the distance that values have moved.
    """

    first: int
    target: Tensor
    value: Tensor
    change: Tensor
    matrix: Tensor
    diagonal: Tensor


@dataclass(frozen=True)
class SweptBlock(ColumnBlock):
    """A block of a sweep, with weight [B, N], and loss [N], which grows by diagonal (target - value)^2."""

    weight: Tensor
    loss: Tensor


def takes(x: Tensor, scale_dtype: torch.dtype) -> bool:
    """True for tensors that the loops can work on here: float32 on a CPU that they could be built for."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or scale_dtype not in TYPES:
        return False
    return not build.why_not("columns")


def sweep_columns(block: SweptBlock, held: DecidedColumns, begin: int, end: int) -> None:
    """Decide columns begin ... end of a block one after another, each compensating for the errors of those before
    it."""
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
    filled = _Columns(N=outputs, B=count, begin=begin, end=end, rounding=held.rounding._as_read())
    filled.threads = useful_threads(outputs * (end - begin) * (end - begin + DECISION))
    tensors: dict[str, Tensor | None] = {each.name: getattr(block, each.name) for each in fields(block)}
    del tensors["first"]
    tensors |= {"codes": held.codes[part], "scale": held.scale, "zero": held.zero, "price": held.price}
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
    groups = torch.tensor(held.group_of[part], dtype=torch.int32)
    filled.group = groups.data_ptr()
    getattr(build.library("columns"), loop)(ctypes.byref(filled))


def search_ranges(
    x_gN: Tensor,
    importance_g: Tensor | None,
    factors: Sequence[float],
    kind: Range,
    divisor: float,
    rounding: Rounding,
    numbers: ScaleRange,
) -> tuple[Tensor, Tensor]:
    """(scale, zero) [N] of N groups: among the given shares of each group's whole range, the one of least squared
    error, weighted by importance. divisor: turns a range into a scale."""
    members, count = x_gN.shape
    x_gN, tried = x_gN.contiguous(), torch.tensor(factors, dtype=torch.float32)
    scale_N, zero_N = x_gN.new_empty(count), x_gN.new_empty(count)
    filled = _ColumnSearch(N=count, g=members, count=len(factors), rounding=rounding._as_read(), divisor=divisor)
    filled.least_scale = max(numbers.least, torch.finfo(torch.float32).tiny)
    filled.largest_scale = min(numbers.largest, torch.finfo(torch.float32).max)
    filled.number_type = TYPES[torch.float16 if numbers.half else rounding.scale_dtype]
    filled.kind = RANGES.index(kind)
    filled.threads = useful_threads(count * members * len(factors) * DECISION)
    filled.x, filled.factors = x_gN.data_ptr(), tried.data_ptr()
    filled.scale, filled.zero = scale_N.data_ptr(), zero_N.data_ptr()
    if importance_g is not None:
        importance_g = importance_g.contiguous()
        filled.importance = importance_g.data_ptr()
    build.library("columns").search_ranges(ctypes.byref(filled))
    return scale_N, zero_N
