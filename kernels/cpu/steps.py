"""Steps of generating through a block of a decoder in one call, by `cpu_steps.cpp`: a program of products and of what
stands between them.

A program holds addresses of tensors, which its owner keeps alive and in place. It does not change when it runs, so
several threads may run it at a time.
"""

import ctypes
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from compress.kernels.cpu import build
from compress.kernels.cpu.arguments import TYPES, LoopWeight
from compress.kernels.cpu.gemm import of_step
from compress.kernels.step_functions import Activation, Norm


class Kind(IntEnum):
    """Kinds of instructions (`Kind` of cpu_steps.cpp)."""

    NORMALIZE, MULTIPLY, ROTATE, KEEP, ATTEND, ACTIVATE, ADD = range(7)


class Operand(ctypes.Structure):
    """Numbers in the workspace of a step: at, the numbers per token in front of them; row, from a token to the next;
    start, the first number in a row."""

    _fields_ = (("at", ctypes.c_int64), ("row", ctypes.c_int64), ("start", ctypes.c_int64))
    at: int
    row: int
    start: int

    def columns(self, start: int) -> "Operand":
        """The same rows from another column on."""
        return Operand(self.at, self.row, self.start + start)


IN, OUT = -1, -2  # places of the input and of the output of a block


class Instruction(ctypes.Structure):
    """`Instruction` of cpu_steps.cpp, field by field."""

    _fields_ = (
        *((name, Operand) for name in ("from_", "beside", "to")),
        *((n, ctypes.c_int64) for n in ("count", "size", "key_heads", "value_size", "rotated", "by_rows")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "arguments", "loop", "attend")),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("kind", "variant", "weight_type", "gated")),
    )


class StepCall(ctypes.Structure):
    """`Call` of cpu_steps.cpp, field by field: what differs from step to step."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("x", "cos", "sin", "keys", "values", "mask")),
        *((n, ctypes.c_void_p) for n in ("out", "work", "key_slot", "value_slot")),
        *((name, ctypes.c_int64) for name in ("M", "key_count", "rotary_stride")),
        ("key_slot_strides", ctypes.c_int64 * 2),
        ("value_slot_strides", ctypes.c_int64 * 2),
        ("key_strides", ctypes.c_int64 * 3),
        ("value_strides", ctypes.c_int64 * 3),
        ("mask_strides", ctypes.c_int64 * 2),
        *((n, ctypes.c_int32) for n in ("type", "mask_type", "has_mask", "bool_mask", "threads")),
    )


def why_not() -> tuple[str, ...]:
    """Reasons why no steps can be run on this machine; empty when they can. The first call builds."""
    return build.why_not() or build.why_not("steps")


def takes(weight: LoopWeight) -> bool:
    """True for tensors that a loop reads as they lie."""
    return all(part.is_contiguous() and part.device.type == "cpu" for part in weight.tensors) and (
        weight.bias is None or weight.bias.dtype in TYPES
    )


class Program:
    """Instructions for steps of a block, in one dtype. Numbers of a token in the workspace: `width`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.width = dtype, 0
        self._listed: list[Instruction] = []
        self._alive: list[object] = []  # what instructions point to
        self._made: ctypes.Array[Instruction] | None = None
        self._run = build.library("steps").run_step

    def __len__(self) -> int:
        return len(self._listed)

    def register(self, width: int) -> Operand:
        """Room for so many numbers of each token."""
        self.width += width
        return Operand(self.width - width, width, 0)

    def normalize(
        self,
        variant: Norm,
        x: Operand,
        to: Operand,
        size: int,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        count: int = 1,
    ) -> None:
        """Normalize `count` rows of `size` numbers of each token."""
        made = self._add(Kind.NORMALIZE, x, to, size=size, count=count, epsilon=epsilon, variant=int(variant))
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                setattr(made, name, tensor.data_ptr())
                made.weight_type = TYPES[tensor.dtype]
                self._alive.append(tensor)

    def multiply(self, weight: LoopWeight, x: Operand, to: Operand) -> None:
        """x weight^T + bias; x and the result are whole registers. Only where `takes` is true."""
        made = self._add(Kind.MULTIPLY, x, to)
        arguments, name, made.by_rows = of_step(weight, x.row, self.dtype)
        made.loop = _address("gemm", name)
        made.arguments = ctypes.addressof(arguments)
        self._alive += [arguments, weight]

    def rotate(self, x: Operand, heads: int, size: int, rotated: int) -> None:
        """Rotary embedding of the first `rotated` numbers of each head, in place."""
        self._add(Kind.ROTATE, x, x, count=heads, size=size, rotated=rotated)

    def keep(self, key: Operand, value: Operand, heads: int, size: int, value_size: int) -> None:
        """Copy keys and values to the places that the call names."""
        made = self._add(Kind.KEEP, key, value, key_heads=heads, size=size, value_size=value_size)
        made.beside = value

    def attend(
        self, query: Operand, to: Operand, heads: int, key_heads: int, size: int, value_size: int, scale: float
    ) -> None:
        """Attention over the keys and values that the call names."""
        sizes = {"count": heads, "key_heads": key_heads, "size": size, "value_size": value_size}
        self._add(Kind.ATTEND, query, to, **sizes, scale=scale).attend = _address("gemm", "attend")

    def activate(self, variant: Activation, x: Operand, times: Operand | None, to: Operand, size: int) -> None:
        """act(x) or act(x) y."""
        made = self._add(Kind.ACTIVATE, x, to, size=size, variant=int(variant), gated=int(times is not None))
        if times is not None:
            made.beside = times

    def add(self, x: Operand, y: Operand, to: Operand, size: int) -> None:
        """x + y."""
        self._add(Kind.ADD, x, to, size=size).beside = y

    def _add(self, kind: Kind, x: Operand, to: Operand, **fields: float) -> Instruction:
        made = Instruction(from_=x, to=to, kind=int(kind), **fields)
        self._listed.append(made)
        return made

    def run(self, call: StepCall, first: int, stop: int) -> None:
        """Run instructions [first, stop). Raises as `build.raise_for` does."""
        if self._made is None:
            self._made = (Instruction * len(self._listed))(*self._listed)
        outcome = self._run(ctypes.byref(self._made[first]), ctypes.c_int64(stop - first), ctypes.byref(call))
        if outcome:
            build.raise_for(outcome, f"no memory for a step of {call.M} tokens over {call.key_count} keys")


def _address(library: Literal["gemm"], name: str) -> int | None:
    return ctypes.cast(getattr(build.library(library), name), ctypes.c_void_p).value
