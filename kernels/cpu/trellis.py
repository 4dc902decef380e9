"""The loops of `cpu_trellis.cpp` and `cpu_trellis_products.cpp` on tensors: the search for paths through a trellis, and
products with its levels. float32 on a CPU."""

import ctypes

import torch
from torch import Tensor

from compress.kernels.cpu import build
from compress.kernels.layouts.trellis import UNIT, Code, TrellisWords
from compress.kernels.layouts.trellis_strips import TrellisStrips, empty_strips, why_not_trellis_strips

LEAST_WINDOWS = 8  # a vector


class _Paths(ctypes.Structure):
    """`Paths` of cpu_trellis.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "d", "level", "feedback", "states")),
        *((name, ctypes.c_int64) for name in ("count", "length", "together", "chunk", "ahead")),
        *((name, ctypes.c_int32) for name in ("state_bits", "bits", "threads")),
    )


def why_not(state_bits: int, bits: int) -> list[str]:
    """Reasons why the compiled search does not run; empty when it does."""
    if 2 ** (state_bits - bits) < LEAST_WINDOWS:
        return [f"{state_bits} bits of a state, {bits} of a weight: fewer than {LEAST_WINDOWS} windows"]
    return [*build.why_not("trellis")]


def best_paths(
    x: Tensor,
    d: Tensor,
    level: Tensor,
    length: int,
    bits: int,
    feedback_NS: Tensor | None = None,
    chunk: int = 0,
    ahead: int = 0,
) -> Tensor:
    """int16 [n], the states of the paths of least sum of d (x - level)^2, for numbers x and their weights d [n]. Paths
    begin anew every `length` numbers. level [2^L]: of each state.

    feedback, float32: by how much later numbers of a run of S move with the error of each, which is known once its
    chunk is decided, by paths that end so many numbers ahead; None: none moves."""
    count, states = len(x), torch.empty(len(x), dtype=torch.int16)
    held = [tensor.contiguous().float() for tensor in (x, d, level)]
    filled = _Paths(count=count, length=length, bits=bits, state_bits=len(level).bit_length() - 1)
    filled.threads = torch.get_num_threads()
    filled.x, filled.d, filled.level = (tensor.data_ptr() for tensor in held)
    filled.states = states.data_ptr()
    if feedback_NS is not None:
        assert feedback_NS.is_contiguous()
        assert feedback_NS.dtype == torch.float32
        filled.feedback, filled.together = feedback_NS.data_ptr(), feedback_NS.shape[1]
        filled.chunk, filled.ahead = chunk, ahead
    build.library("trellis").best_paths(ctypes.byref(filled))
    return states


class _Strips(ctypes.Structure):
    """`Strips` of cpu_trellis_products.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "before", "x", "scale", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "run", "tokens")),
        *((name, ctypes.c_int32) for name in ("bits", "state_bits", "threads")),
        ("multiplier", ctypes.c_uint32),
    )


class _Laid(ctypes.Structure):
    """`Laid` of cpu_trellis_products.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("symbols", "words", "before")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride", "run", "head")),
        *((name, ctypes.c_int32) for name in ("bits", "threads")),
    )


def why_not_products(code: Code) -> list[str]:
    """Reasons why the compiled products do not take a code; empty when they do."""
    return why_not_trellis_strips(code) or [*build.why_not("trellis_products")]


def lay_in_strips(weight: TrellisWords) -> TrellisStrips:
    """`layouts.trellis_strips.pack_trellis_strips`."""
    held, out, code = weight.words.contiguous(), empty_strips(weight), weight.code
    filled = _Laid(rows=weight.rows, columns=weight.columns, stride=held.shape[1] * held.element_size())
    filled.run, filled.head, filled.bits, filled.threads = code.run, code.head, code.bits, torch.get_num_threads()
    filled.symbols, filled.words, filled.before = (each.data_ptr() for each in (held, out.words, out.before))
    build.library("trellis_products").lay_in_strips(ctypes.byref(filled))
    return out


def multiply_strips(x_MK: Tensor, weight: TrellisStrips) -> Tensor:
    """[M, N] float32, x [M, K] float32 times a weight whose values are not rounded. The sum of a token is the same
    beside any others."""
    assert x_MK.shape[1] == weight.columns
    held, scale = x_MK.contiguous(), weight.scale.float() / UNIT
    out = torch.empty(len(x_MK), weight.rows)
    filled = _filled(weight, out)
    filled.x, filled.scale, filled.tokens = held.data_ptr(), scale.data_ptr(), len(x_MK)
    build.library("trellis_products").multiply_strips(ctypes.byref(filled))
    return out


def levels_of_strips(weight: TrellisStrips) -> Tensor:
    """float32 [N, K], the levels of a weight."""
    out = torch.empty(weight.rows, weight.columns)
    build.library("trellis_products").levels_of_strips(ctypes.byref(_filled(weight, out)))
    return out.div_(UNIT)


def _filled(weight: TrellisStrips, out: Tensor) -> _Strips:
    words, before, code = weight.words, weight.before, weight.code
    assert words.is_contiguous()
    assert before.is_contiguous()
    assert words.device.type == "cpu"
    filled = _Strips(rows=weight.rows, columns=weight.columns, run=code.run, bits=code.bits, state_bits=code.state_bits)
    filled.multiplier, filled.threads = code.multiplier, torch.get_num_threads()
    filled.words, filled.before, filled.out = words.data_ptr(), before.data_ptr(), out.data_ptr()
    return filled
