"""Operators of C++. `compress::cpu_linear`: the product of x with 4- or 8-bit words, or with strips.

    [..., N] = x weight^T + bias, in the dtype of x, bit for bit what `cpu.gemm` makes of the same tensors

It is what a layer calls where no gradient is asked for: on the way to the loops Python takes longer than a small
product does (`kernels.operators`). A compiled graph holds it as one node. It is a small library of its own on torch's
stable C interface (`cpu_operators.cpp`), built like the others at first use; where it cannot be, layers take Python's
way.
"""

import ctypes
import os
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from compress.kernels.cpu import build
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.cpu.gemm import Operation
from compress.kernels.pack_strips import ROWS

STRIPS_DIMENSIONS = 3
DIMENSIONS = 4  # of what attention reads
# By where the words lie (planar, strips), then by whether x is rounded: as in `Loops` of cpu_operators.cpp.
OPERATIONS: tuple[tuple[Operation, Operation], ...] = (("weight_only", "int8_activation"), ("strips", "int8_strips"))


class _Loops(ctypes.Structure):
    """`Loops` of cpu_operators.cpp, field by field."""

    _fields_ = (
        ("exact", ctypes.c_void_p),
        ("rounded", ctypes.c_void_p),
        ("by_rows", ctypes.c_int64 * 4),
        ("pairs_by_rows", ctypes.c_int64),
        ("attend", ctypes.c_void_p),
    )


def why_not() -> tuple[str, ...]:
    """Reasons why there is no such operator on this machine; empty when there is. The first call builds."""
    reasons = build.why_not() or build.why_not("operators")
    if os.environ.get("TRITON_INTERPRET") == "1":
        reasons = (*reasons, "TRITON_INTERPRET=1 asks for Triton's kernels")
    if not reasons:
        _register()
    return reasons


@cache
def _register() -> None:
    use(build.library())
    torch.library.register_fake("compress::cpu_linear", _like_product)
    torch.library.register_fake("compress::cpu_attention", _like_attention)


def use(library: ctypes.CDLL) -> None:
    """Multiply by the loops of this library from now on."""
    limits = [cpu_gemm.rows_up_to(operation, library) for pair in OPERATIONS for operation in pair]
    loops = (library.weight_only, library.int8_activation, library.attend)
    exact, rounded, attend = (ctypes.cast(loop, ctypes.c_void_p) for loop in loops)
    pairs = cpu_gemm.rows_up_to("pair_strips" if library.instructions() == cpu_gemm.PAIRS else "strips", library)
    build.library("operators").use(ctypes.byref(_Loops(exact, rounded, (ctypes.c_int64 * 4)(*limits), pairs, attend)))


@cache
def _takes(columns: int, group_size: int, int8_input: bool, _: tuple[str, ...]) -> bool:
    operation: Operation = "int8_activation" if int8_input else "weight_only"
    return not cpu_gemm.why_not_sizes(operation, columns, group_size) and not why_not()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def takes(columns: int, group_size: int, int8_input: bool) -> bool:
    """Whether the operator can be had for weights of these sizes."""
    return _takes(columns, group_size, int8_input, build.why_not())


def serves(x: Tensor, scale: Tensor, columns: int, group_size: int, int8_input: bool) -> bool:
    """Whether the operator multiplies x [..., columns] by a weight with these scales: on a CPU, without a gradient."""
    return bool(
        x.device.type == "cpu"
        and x.dtype == scale.dtype
        and x.dtype in cpu_gemm.TYPES
        and x.shape[-1] == columns
        and not (x.requires_grad and torch.is_grad_enabled())
        and forward_ad._current_level < 0
        and takes(columns, group_size, int8_input)
    )


def linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    input_group: int | None,
) -> Tensor:
    """[..., N] = x weight^T + bias, where `serves` says so. The weight is the parts of a `pack.Planar`, or of a
    `pack_strips.Strips`; input_group as in `strips.strips_linear`."""
    operator: Any = torch.ops.compress.cpu_linear.default
    return cast(Tensor, operator(x, words, scale, zero, bias, bits, group_size, input_group))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _built() -> bool:
    return not why_not()


def attends(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `attention` takes these: one query per sequence on a CPU, without a gradient."""
    given = (query, key, value)
    return bool(
        query.device.type == "cpu"
        and query.dtype in cpu_gemm.TYPES
        and all(each.dim() == DIMENSIONS and each.dtype == query.dtype and each.stride(-1) == 1 for each in given)
        and query.shape[2] == 1
        and key.shape[:3] == value.shape[:3]
        and (key.shape[0], key.shape[3]) == (query.shape[0], query.shape[3])
        and key.shape[1] > 0
        and query.shape[1] >= key.shape[1]
        and query.shape[1] % key.shape[1] == 0
        and (mask is None or _masks(mask, query, key))
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in given))
        and forward_ad._current_level < 0
        and _built()
    )


def _masks(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask is one that `attention` takes."""
    return (
        mask.dim() == DIMENSIONS
        and mask.dtype in (torch.bool, *cpu_gemm.TYPES)
        and mask.shape[0] in (1, query.shape[0])
        and mask.shape[1] in (1, query.shape[1])
        and mask.shape[2:] == (1, key.shape[2])
    )


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale query key^T + mask) value of one token per sequence, in fp32 whatever the dtype, where `attends`
    says so: [batch, 1, heads, value size].

    query: [batch, heads, 1, size]; key and value: [batch, key heads, keys, size], which as many heads share as there
    are more heads than key heads; mask: of bools (False: not seen) or added, [batch or 1, heads or 1, 1, keys].
    """
    operator: Any = torch.ops.compress.cpu_attention.default
    return cast(Tensor, operator(query, key, value, mask, scale))


def _like_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])


def _like_product(x: Tensor, words: Tensor, *_: Any) -> Tensor:
    """The shape, for tracing."""
    return x.new_empty(*x.shape[:-1], words.shape[0] * (ROWS if words.dim() == STRIPS_DIMENSIONS else 1))
