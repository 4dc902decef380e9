"""The arguments of the loops in C++, and the choice among these for given sizes.

The crossovers were measured on processors with AVX-512, and with AVX2 alone: rows and strips are read front to back
until the arithmetic of that loop costs more than unpacking a slab.
"""

import ctypes
import sys
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compress.kernels.cpu import build as cpu

Operation = Literal[
    "weight_only",
    "int8_activation",
    "w8a8",
    "tiles",
    "sparse_rows",
    "sparse24",
    "strips",
    "pair_strips",
    "int8_strips",
    "table_strips",
]

# The loops of the library.
Loop = Literal["weight_only", "int8_activation", "sparse_rows", "sparse24"]

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
PAIRS = (b"avx512-bf16", b"neon-i8mm")  # instructions of libraries that multiply pairs of bfloat16
# Tokens up to which the loop over rows is the faster one, with AVX-512 and with AVX2; not measured on ARM, whose
# registers hold as much as AVX2's.
ROWS_UP_TO: dict[Operation, int] = {"weight_only": 4, "int8_activation": 2, "w8a8": 4}
ROWS_UP_TO |= {"strips": 8, "tiles": 8, "int8_strips": 64, "table_strips": 8}
ROWS_UP_TO |= dict.fromkeys(("pair_strips", "sparse24", "sparse_rows"), sys.maxsize)
ROWS_UP_TO_NARROW: dict[Operation, int] = ROWS_UP_TO | {"int8_strips": 8}
# Products of so many tokens, or by weights of so few numbers, are always left to the loops, never to dense blocks.
FEW_TOKENS, FEW_WEIGHTS = 3, 2**16
POINTERS: tuple[str, ...] = ("x", "weight", "scale", "bias", "zero", "input_scale", "input_zero", "row_sum")
POINTERS += ("row_start", "column", "value", "kept", "ranges", "levels", "table", "out")
SIZES = ("M", "N", "K", "G", "row_bytes", "group", "input_group", "entries", "tile_rows")
CHOICES: tuple[str, ...] = (
    "x_type",
    "scale_type",
    "bias_type",
    "value_type",
    "bits",
    "planar",
    "symmetric",
    "by_rows",
    "threads",
)
CHOICES += ("short_columns", "level_bits", "strips")


class Arguments(ctypes.Structure):
    """`Arguments` of cpu_gemm.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_int32) for name in CHOICES),
    )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x."""
        return next(dtype for dtype, number in TYPES.items() if number == self.x_type)


class LoopWeight(NamedTuple):
    """A weight as the loops read it, with its bias: in planar words or strips, as `operators.words.words_linear` takes
    it, or rows of int8, as `operators.int8_rows.w8a8_linear` does (of these row_sum and what comes after it)."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None
    bits: int
    group_size: int
    input_group: int | None
    table: Tensor | None = None
    row_sum: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None
    symmetric: bool = True

    @property
    def tensors(self) -> list[Tensor]:
        return [part for part in self if isinstance(part, Tensor)]


def strips_operation(int8_input: bool, dtype: torch.dtype) -> Operation:
    """The product of x, of this dtype, with a weight in strips, of a table or not."""
    if int8_input:
        return "int8_strips"
    pairs = dtype == torch.bfloat16 and not cpu.why_not() and cpu.library().instructions() in PAIRS
    return "pair_strips" if pairs else "strips"


@cache
def _narrow(library: ctypes.CDLL) -> bool:
    return not library.instructions().startswith(b"avx512")


def rows_up_to(operation: Operation, library: ctypes.CDLL) -> int:
    """Tokens up to which a library's loop over rows is the faster one."""
    return (ROWS_UP_TO_NARROW if _narrow(library) else ROWS_UP_TO)[operation]


def by_rows(operation: Operation, M: int) -> bool:
    """True where the loop over rows multiplies so many tokens."""
    return rows_up_to(operation, cpu.library()) >= M
