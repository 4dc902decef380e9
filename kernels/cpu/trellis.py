"""The loops of `cpu_trellis.cpp` on tensors: the search for paths through a trellis, and products with its levels.
float32 on a CPU."""

import ctypes

import torch
from torch import Tensor

from compress.kernels.cpu import build
from compress.kernels.layouts.trellis import UNIT, TrellisWords

LEAST_WINDOWS = 8  # a vector
TOGETHER = 256  # columns of a block


class _Paths(ctypes.Structure):
    """`Paths` of cpu_trellis.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "d", "level", "states")),
        *((name, ctypes.c_int64) for name in ("count", "length")),
        *((name, ctypes.c_int32) for name in ("state_bits", "bits", "threads")),
    )


def why_not(state_bits: int, bits: int) -> list[str]:
    """Reasons why the compiled search does not run; empty when it does."""
    if 2 ** (state_bits - bits) < LEAST_WINDOWS:
        return [f"{state_bits} bits of a state, {bits} of a weight: fewer than {LEAST_WINDOWS} windows"]
    return [*build.why_not("trellis")]


def best_paths(x: Tensor, d: Tensor, level: Tensor, length: int, bits: int) -> Tensor:
    """int16 [n], the states of the paths of least sum of d (x - level)^2, for numbers x and their weights d [n]. Paths
    begin anew every `length` numbers. level [2^L]: of each state."""
    count, states = len(x), torch.empty(len(x), dtype=torch.int16)
    held = [tensor.contiguous().float() for tensor in (x, d, level)]
    filled = _Paths(count=count, length=length, bits=bits, state_bits=len(level).bit_length() - 1)
    filled.threads = torch.get_num_threads()
    filled.x, filled.d, filled.level = (tensor.data_ptr() for tensor in held)
    filled.states = states.data_ptr()
    build.library("trellis").best_paths(ctypes.byref(filled))
    return states


class _Decoded(ctypes.Structure):
    """`Decoded` of cpu_trellis.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("symbols", "x", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride", "run", "head", "tokens")),
        *((name, ctypes.c_int32) for name in ("bits", "state_bits", "threads")),
        ("multiplier", ctypes.c_uint32),
    )


def multiply_levels(x_MK: Tensor, weight: TrellisWords) -> Tensor:
    """[M, N] float32, x [M, K] float32 times the levels of a weight. The sum of a token is the same beside any others:
    blocks of 256 inputs one after another."""
    held = x_MK.contiguous()
    out = torch.empty(-(-weight.columns // TOGETHER), len(x_MK), weight.rows)
    filled = _filled(weight, out)
    filled.x, filled.tokens = held.data_ptr(), len(x_MK)
    build.library("trellis").multiply_levels(ctypes.byref(filled))
    found = out[0] / UNIT
    for part in out[1:]:
        found.add_(part, alpha=1 / UNIT)
    return found


def decode_levels(weight: TrellisWords) -> Tensor:
    """float32 [N, K], the levels of a weight."""
    out = torch.empty(weight.rows, weight.columns)
    build.library("trellis").decode_levels(ctypes.byref(_filled(weight, out)))
    return out.div_(UNIT)


def _filled(weight: TrellisWords, out: Tensor) -> _Decoded:
    words, code = weight.words, weight.code
    assert words.is_contiguous()
    assert words.device.type == "cpu"
    sizes = {"rows": weight.rows, "columns": weight.columns, "stride": words.shape[1] * words.element_size()}
    filled = _Decoded(**sizes, run=code.run, head=code.head, bits=code.bits, state_bits=code.state_bits)
    filled.multiplier, filled.threads = code.multiplier, torch.get_num_threads()
    filled.symbols, filled.out = words.data_ptr(), out.data_ptr()
    return filled
