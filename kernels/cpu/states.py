"""The loops of `cpu_states.cpp` on tensors of float32: rotations by Sylvester's matrices, and codes of key-value
caches. They run on a CPU."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from compress.kernels.cpu import build

VECTOR = 8
SCALE_BYTES = 4  # of a token's scale at 8 bits, and of a group's minimum and step at fewer
PARTS = {8: 1, 4: 2, 3: 8}  # of a row, of which each is whole vectors


class _Rotated(ctypes.Structure):
    """`Rotated` of cpu_states.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "size")),
        ("threads", ctypes.c_int32),
    )


class _Coded(ctypes.Structure):
    """`Coded` of cpu_states.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("numbers", "stored")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "group", "stride")),
        *((name, ctypes.c_int32) for name in ("bits", "rotated", "threads")),
    )


# A compiled graph holds the answer: building cannot be traced.
_why_not_built: Callable[[], tuple[str, ...]] = torch.compiler.assume_constant_result(lambda: build.why_not("states"))


def why_not_rotate(size: int) -> list[str]:
    """Reasons why the compiled rotation does not run for a Sylvester matrix of this order; empty when it does."""
    if size < VECTOR or size & (size - 1):
        return [f"a matrix of order {size}; allowed: powers of two from {VECTOR} on"]
    return [*_why_not_built()]


def why_not_codes(size: int, bits: int, group: int, rotated: bool) -> list[str]:
    """Reasons why the compiled codes do not run for heads of this size; empty when they do."""
    if size % (PARTS[bits] * VECTOR) or group % VECTOR:
        return [f"heads of {size} in groups of {group}; allowed: multiples of {PARTS[bits] * VECTOR} and {VECTOR}"]
    return why_not_rotate(size) if rotated else [*_why_not_built()]


def rotate_rows(x: Tensor) -> Tensor:
    """x [..., D] times Sylvester's matrix [D, D], orthogonal."""
    held, out = x.contiguous(), torch.empty(x.shape)
    size = x.shape[-1]
    filled = _Rotated(rows=x.numel() // size, size=size, threads=torch.get_num_threads())
    filled.x, filled.out = held.data_ptr(), out.data_ptr()
    build.library("states").rotate_rows(ctypes.byref(filled))
    return out


def encode_rows(x: Tensor, bits: int, group: int, rotated: bool) -> Tensor:
    """The bytes, int8 [..., stride], that a cache keeps of rows [..., D]."""
    held = x.contiguous()
    stored = torch.empty(*x.shape[:-1], stride_of(x.shape[-1], bits, group), dtype=torch.int8)
    _run("encode_rows", held, stored, bits, group, rotated)
    return stored


def decode_rows(stored: Tensor, size: int, bits: int, group: int, rotated: bool) -> Tensor:
    """Inverse of `encode_rows`: float32 [..., D]. size: D."""
    held, out = stored.contiguous(), torch.empty(*stored.shape[:-1], size)
    _run("decode_rows", out, held, bits, group, rotated)
    return out


def stride_of(size: int, bits: int, group: int) -> int:
    """Bytes of a row of `size` numbers."""
    return size * bits // 8 + SCALE_BYTES * (1 if bits == 8 else size // group)


def _run(name: str, numbers: Tensor, stored: Tensor, bits: int, group: int, rotated: bool) -> None:
    size, stride = numbers.shape[-1], stored.shape[-1]
    filled = _Coded(rows=numbers.numel() // size, size=size, group=group, stride=stride, bits=bits, rotated=rotated)
    filled.numbers, filled.stored, filled.threads = numbers.data_ptr(), stored.data_ptr(), torch.get_num_threads()
    getattr(build.library("states"), name)(ctypes.byref(filled))
