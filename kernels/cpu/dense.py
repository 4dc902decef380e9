"""Products of many tokens by dense blocks (`cpu_dense.cpp`), and when they are taken.

A block of rows is unpacked into a panel in the cache. Where the processor has AMX, its tiles multiply bfloat16 and int8
by it (`cpu_amx_products.h`, `cpu_amx_ints.h`); otherwise torch does, with whatever it has. Values of the weight are
rounded to the dtype of x on the way. Rows of int8 are multiplied as integers, exactly. So are codes beside inputs that
were rounded to int8 (of bfloat16 alone), by tiles and in groups of 64 columns or multiples; elsewhere such inputs are
rounded to bfloat16.

From how many tokens on this is faster than the loops is measured, not guessed: at the first product of more than
FEW_TOKENS of its kind, for some tenths of a second, once for a machine (`crossings`). A kind is an operation, a dtype,
sizes up to a power of two and a number of threads. Machines that differ may sum in another order, as they may anyway.

    COMPRESS_CPU_DENSE_FROM=64       dense blocks from 64 tokens on, whatever is faster; never: the loops alone
    COMPRESS_CPU_AMX=0               no tiles of AMX but torch's

Small products, and those that are asked to be batch-invariant, are left to the loops.
"""

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from compress.kernels.cpu import build, dense_thresholds
from compress.kernels.cpu.arguments import (
    FEW_TOKENS,
    FEW_WEIGHTS,
    TYPES,
    Arguments,
    Loop,
    Operation,
    rows_up_to,
    strips_operation,
)
from compress.kernels.cpu.dense_thresholds import NEVER
from compress.kernels.cpu.processor import amx_allowed
from compress.kernels.errors import InputError
from compress.kernels.notes import note_once

SETTING = "COMPRESS_CPU_DENSE_FROM"
# As in cpu_dense.cpp.
OPERATIONS: dict[str, int] = {"weight_only": 0, "int8_activation": 1, "sparse24": 2}
DONE, NOT_TAKEN = 0, -1
# Tokens that are tried, of which the middle ones first.
TRIED = (FEW_TOKENS + 1, 8, 16, 32, 64, 128, 256, 512)
MIDDLE = TRIED.index(64)
ROUNDS = 5
# Of a line of tiles of int8 (cpu_amx.h): smaller groups are multiplied by their values.
INT_COLUMNS = 64
MEASURED_ROWS, ROWS_OF_THREAD = 512, 64
# Dense blocks must be faster by so much; where they take longer by so much, more tokens do not help.
MARGIN, HOPELESS = 0.97, 2.0
# Roundings of a weight and of a result by which both ways may differ, in units of the dtype's last place.
ROUNDINGS = 8

Ask = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(Arguments), ctypes.c_int32)
Take = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(Arguments), ctypes.c_int32)
# Functions that C++ calls live as long as the process.
_called: list[Any] = []
_interrupted: list[bool] = []


def setting() -> int | None:
    """The tokens from which dense blocks are taken as COMPRESS_CPU_DENSE_FROM says, NEVER for `never`; None where it is
    measured. Raises InputError for a value that is not allowed."""
    asked = os.environ.get(SETTING)
    if not asked:
        return None
    if asked == "never":
        return NEVER
    if not asked.isdecimal() or not int(asked):
        raise InputError(f"{SETTING}={asked}; allowed: a number of tokens from 1 on, never, or leave it out to measure")
    return int(asked)


def why_not() -> tuple[str, ...]:
    """Reasons why there are no dense blocks on this machine; empty when there are. The first call builds."""
    if setting() == NEVER:
        return (f"{SETTING}=never",)
    amx_allowed()  # raises where the setting is not allowed
    return build.why_not() or build.why_not("dense")


@cache
def _library() -> ctypes.CDLL:
    found = build.library("dense")
    asked = Ask(_answer)
    _called.append(asked)
    found.dense_ask(asked)
    found.dense_amx(amx_allowed())
    return found


def by_amx(operation: Operation, dtype: torch.dtype) -> bool:
    """True where dense blocks of this operation on x of this dtype are multiplied by the tiles of AMX."""
    of_tiles = dtype == torch.bfloat16 or operation == "w8a8"
    return of_tiles and not why_not() and bool(_library().dense_amx(amx_allowed()))


def taken(name: Loop, filled: Arguments) -> bool:
    """True where a product was computed by dense blocks. filled: as for the loop of this name."""
    if name not in OPERATIONS or why_not():
        return False
    done = _library().dense(ctypes.byref(filled), OPERATIONS[name])
    if _interrupted:
        _interrupted.clear()
        raise KeyboardInterrupt
    if done == build.NO_MEMORY:
        raise MemoryError(f"no memory for a block of {filled.K} columns")
    return bool(done == DONE)


def entry(loaded: Callable[[], None]) -> ctypes.c_void_p | None:
    """A function like `dense` of cpu_dense.cpp, which builds that at its first call and then calls `loaded`; None where
    there are no dense blocks. loaded: asks for the entry again, which is then C++ alone."""
    if setting() == NEVER or _reasons():
        return None
    if _reasons() is not None:
        return ctypes.cast(_library().dense, ctypes.c_void_p)

    def first(given: Any, operation: int) -> int:
        try:
            missing = why_not()
            _tried.append(missing)
            loaded()
            return NOT_TAKEN if missing else int(_library().dense(given, operation))
        except Exception as reason:  # noqa: BLE001 - C++ calls this, where no exception may pass
            note_once(f"no dense blocks: {reason}")
            return NOT_TAKEN
        except KeyboardInterrupt:
            return build.NO_PART

    taking = Take(first)
    _called.append(taking)
    return ctypes.cast(taking, ctypes.c_void_p)


_tried: list[tuple[str, ...]] = []


def _reasons() -> tuple[str, ...] | None:
    """The reasons of `why_not` as the first product found them; None before it."""
    return _tried[-1] if _tried else None


def _answer(given: Any, operation: int) -> int:
    """Tokens from which dense blocks are to multiply like this product; what C++ asks."""
    try:
        forced = setting()
        if forced is not None:
            return forced
        of_call = given.contents
        filled = Arguments.from_buffer_copy(of_call)
        loop = next(name for name, number in OPERATIONS.items() if number == operation)
        kind = kind_of(operation_of(filled, loop), filled)
        return dense_thresholds.found_or_measured(dense_thresholds.file(), kind, lambda: measured(filled, loop))
    except Exception as reason:  # noqa: BLE001 - C++ calls this, where no exception may pass
        note_once(f"no dense blocks: {type(reason).__name__}: {reason}")
        return NEVER
    except KeyboardInterrupt:  # `taken` raises it again
        _interrupted.append(True)
        return NEVER


def known() -> dict[str, int]:
    """{kind of product: tokens from which dense blocks are faster} as measured on this machine so far."""
    path = None if why_not() else dense_thresholds.file()
    return {} if path is None else dense_thresholds.read(path)


def told() -> list[str]:
    """A sentence for every kind of product that dense blocks were measured to be faster for on this machine."""
    return [
        f"dense blocks are faster from {tokens} tokens on: {name}" for name, tokens in known().items() if tokens < NEVER
    ]


def taken_from(operation: Operation, N: int, K: int, bits: int, dtype: torch.dtype, group_size: int = -1) -> int | None:
    """Tokens from which such products are computed by dense blocks, NEVER where they are not; None where the first
    product of more than FEW_TOKENS is going to measure it."""
    rounded = operation in ("int8_activation", "int8_strips") and dtype != torch.bfloat16
    if rounded or operation == "sparse_rows" or N * K < FEW_WEIGHTS or dtype not in TYPES or why_not():
        return NEVER
    forced = setting()
    return (
        known().get(kind(operation, N, K, bits, dtype, group_size)) if forced is None else max(forced, FEW_TOKENS + 1)
    )


def operation_of(filled: Arguments, loop: str) -> Operation:
    """The name of a product, from its arguments."""
    if loop == "sparse24":
        return "sparse24"
    if loop == "int8_activation":
        return "int8_strips" if filled.strips else "int8_activation" if filled.planar else "w8a8"
    if not filled.strips:
        return "weight_only"
    if filled.levels:
        return "tiles"
    return "table_strips" if filled.table else strips_operation(False, filled.dtype)


def _order(size: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(size - 1, 0).bit_length()


def kind(
    operation: Operation,
    N: int,
    K: int,
    bits: int,
    dtype: torch.dtype,
    group_size: int = -1,
    threads: int | None = None,
) -> str:
    """The name of the products that are measured together. threads: as torch has them unless given."""
    small = operation in ("int8_activation", "int8_strips") and group_size > 0 and group_size % INT_COLUMNS
    name = f"{operation} of {bits} bits{' in small groups' if small else ''}, {str(dtype).removeprefix('torch.')}"
    return f"{name}, {_order(N)} x {_order(K)}, {threads or torch.get_num_threads()} threads"


def kind_of(operation: Operation, filled: Arguments) -> str:
    """The `kind` of a product, from its arguments."""
    return kind(operation, filled.N, filled.K, filled.bits, filled.dtype, filled.group, filled.threads)


def measured(given: Arguments, loop: str) -> int:
    """Tokens from which dense blocks are faster than the loop for products like this one; NEVER where they are not, up
    to the most that are tried, or where both ways do not agree. Its first rows are multiplied, by random tokens."""
    trial = _Trial(given, loop)
    if not trial.agrees():
        note_once("dense blocks differ from the loops on this machine, and are not used")
        return NEVER
    ratio = trial.ratio(TRIED[MIDDLE])
    if ratio < MARGIN:
        return _first(trial, TRIED[: MIDDLE + 1])
    if ratio > HOPELESS or trial.ratio(TRIED[-1]) >= MARGIN:
        return NEVER
    return _first(trial, TRIED[MIDDLE + 1 :])


def _first(trial: "_Trial", tokens: tuple[int, ...]) -> int:
    """The least of these numbers of tokens from which dense blocks are faster; at the last they are."""
    best = tokens[-1]
    for fewer, _ in reversed([*pairwise(tokens)]):
        if trial.ratio(fewer) >= MARGIN:
            break
        best = fewer
    return best


class _Trial:
    """One product in both ways."""

    def __init__(self, given: Arguments, loop: str) -> None:
        self.filled, self.loop = Arguments.from_buffer_copy(given), loop
        self.filled.N = min(given.N, max(MEASURED_ROWS, ROWS_OF_THREAD * given.threads))
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(TRIED[-1], given.K, generator=g).to(given.dtype)
        self.out = torch.empty(TRIED[-1], self.filled.N, dtype=given.dtype)
        self.filled.x, self.filled.out = self.x.data_ptr(), self.out.data_ptr()
        self.limit = rows_up_to(operation_of(given, loop), build.library())
        self.clock = time.thread_time if given.threads == 1 else time.perf_counter

    def run(self, dense: bool, M: int) -> float:
        """Seconds of a product."""
        self.filled.M, self.filled.by_rows = M, self.limit >= M
        library, began = _library() if dense else build.library(), self.clock()
        if dense:
            failed = library.dense_product(ctypes.byref(self.filled), OPERATIONS[self.loop])
        else:
            failed = getattr(library, self.loop)(ctypes.byref(self.filled))
        if failed:
            raise MemoryError(f"no memory for {M} tokens of {self.filled.K} columns")
        return self.clock() - began

    def ratio(self, M: int) -> float:
        """Time by dense blocks over that of the loop: the least of ROUNDS, in turns."""
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(ROUNDS):
            for dense in times:
                times[dense].append(self.run(dense, M))
        return min(times[True]) / min(times[False])

    def agrees(self) -> bool:
        """True where both ways have the same result up to their roundings."""
        M, found = TRIED[0], []
        for dense in (True, False):
            self.out.fill_(torch.nan)
            self.run(dense, M)
            found.append(self.out[:M].double())
        apart, size = (found[0] - found[1]).norm(), found[1].norm()
        eps = max(torch.finfo(self.out.dtype).eps, torch.finfo(torch.float32).eps * self.filled.K**0.5)
        return bool(apart <= ROUNDINGS * eps * size) or not bool(size.isfinite())
