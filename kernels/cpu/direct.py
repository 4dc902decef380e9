"""Operators in C++. `compress::cpu_linear`: the product of x with 4- or 8-bit words, or with strips;
`compress::cpu_w8a8`: with rows of int8; `compress::cpu_experts`, `compress::cpu_experts_w8a8`: the same with the
weights of experts, for pairs of a token and an expert sorted by expert (`operators.grouped`).

    [..., N] = x weight^T + bias, in the dtype of x, bit for bit what `cpu.gemm` makes of the same tensors

The operators of `kernels.operators` call them where no gradient is needed: for a small product, the Python code on the
way to the loops takes longer than the product itself. The checks here run at every call and are written for speed.

A compiled graph holds an operator as one node. They are a small library of their own on torch's stable C interface
(`cpuoperators.cpp`), built like the others at first use; where it cannot be built, Python calls the loops.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from compress.kernels.cpu import build, dense
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.cpu.arguments import PAIRS, TYPES, LoopWeight, Operation, rows_up_to
from compress.kernels.layouts.strips import BYTE, lines_of
from compress.kernels.layouts.words import ROWS, STRIPS_DIMENSIONS, planar_words

DIMENSIONS = 4  # of the tensors that attention reads
# By where the words lie (planar, strips), then by whether x is rounded: as in `Loops` of cpuoperators.cpp.
OPERATIONS: tuple[tuple[Operation, Operation], ...] = (("weight_only", "int8_activation"), ("strips", "int8_strips"))
# Namespace of the operators that the library registers: those above by their names, `.default`.
operators: Any = torch.ops.compress
# The operators of products, as torch's bindings call them.
_calls: dict[str, Callable[..., Any]] = {}


class _Loops(ctypes.Structure):
    """`Loops` of cpuoperators.cpp, field by field."""

    _fields_ = (
        ("exact", ctypes.c_void_p),
        ("rounded", ctypes.c_void_p),
        ("by_rows", ctypes.c_int64 * 4),
        ("pairs_by_rows", ctypes.c_int64),
        ("by_rows_w8a8", ctypes.c_int64),
        ("attend", ctypes.c_void_p),
        ("dense", ctypes.c_void_p),
    )


def why_not() -> tuple[str, ...]:
    """Reasons why there is no such operator on this machine; empty when there is. The first call builds."""
    _build()
    reasons = build.why_not() or build.why_not("operators")
    if os.environ.get("TRITON_INTERPRET") == "1":
        reasons = (*reasons, "TRITON_INTERPRET=1 asks for Triton's kernels")
    if not reasons:
        _register()
    return reasons


@cache
def _build() -> None:
    build.build_all(("gemm", "operators"))


@cache
def _register() -> None:
    use(build.library())
    # Without a frame of Python's.
    _calls.update({name: getattr(operators, f"cpu_{name}").default._op for name in PRODUCTS})
    torch.library.register_fake("compress::cpu_linear", _like_product)
    torch.library.register_fake("compress::cpu_w8a8", _like_rows)
    torch.library.register_fake("compress::cpu_experts", like_experts)
    torch.library.register_fake("compress::cpu_experts_w8a8", like_rows_of_experts)
    torch.library.register_fake("compress::cpu_attention", _like_attention)


def use(library: ctypes.CDLL) -> None:
    """Multiply by the loops of this library from now on."""
    limits = [rows_up_to(operation, library) for pair in OPERATIONS for operation in pair]
    loops = (library.weight_only, library.int8_activation, library.attend)
    exact, rounded, attend = (ctypes.cast(loop, ctypes.c_void_p) for loop in loops)
    pairs = rows_up_to("pair_strips" if library.instructions() in PAIRS else "strips", library)
    by_rows = ((ctypes.c_int64 * 4)(*limits), pairs, rows_up_to("w8a8", library))
    by_blocks = dense.entry(lambda: use(library))
    build.library("operators").use(ctypes.byref(_Loops(exact, rounded, *by_rows, attend, by_blocks)))


def serves(x: Tensor) -> bool:
    """True where the operators multiply x: on a CPU, without a gradient."""
    # A traced graph takes the type of a device for a constant; asking for it takes six times as long.
    return (
        (x.device.type == "cpu" if is_compiling() else x.is_cpu)
        and x.dtype in TYPES
        and not (x.requires_grad and torch.is_grad_enabled())
        and forward_ad._current_level < 0
    )


def _fits_words(
    columns: int, words: tuple[int, ...], bits: int, group_size: int, input_group: int | None, table: bool
) -> bool:
    """True for x of so many columns and codes whose words have this shape. input_group: as in `operators.words`;
    table: there is one."""
    strips, rounded = len(words) == STRIPS_DIMENSIONS, input_group is not None
    if words[1] != (lines_of(columns, bits) if strips else planar_words(columns, bits)):
        return False
    if input_group is not None and input_group != -1 and input_group % cpu_gemm.INPUT_GROUP_STEP:
        return False
    operation: Operation = "table_strips" if table else "int8_activation" if rounded else "weight_only"
    taken = strips and not rounded if table else not (strips and rounded and bits == BYTE)
    return taken and not cpu_gemm.why_not_sizes(operation, columns, group_size)


def _fits_rows(columns: int, weight: tuple[int, ...]) -> bool:
    """True for x of so many columns and rows of int8 [..., N, K]."""
    return columns == weight[-1] and not cpu_gemm.why_not_sizes("w8a8", columns, -1)


# The products, and whether they take a weight.
PRODUCTS: dict[str, Callable[..., bool]] = {
    "linear": _fits_words,
    "w8a8": _fits_rows,
    "experts": _fits_words,
    "experts_w8a8": _fits_rows,
}


@cache
def takes_sizes(name: str, *sizes: Any) -> bool:
    """True where the operator of this name takes a weight of these sizes."""
    return PRODUCTS[name](*sizes) and not why_not()


def product(name: str, x: Tensor, weight: torch.Size, *sizes: Any) -> Callable[..., Any] | None:
    """The operator compress::cpu_NAME for x and a weight of this shape and sizes (`PRODUCTS`); None where it does not
    serve. Every call asks: it is written for speed."""
    if is_compiling():
        ours = serves(x) and PRODUCTS[name](x.shape[-1], weight, *sizes) and _built()
        return getattr(operators, f"cpu_{name}").default if ours else None
    try:
        ours = (
            x.is_cpu
            and x.dtype in TYPES
            and not (x.requires_grad and torch.is_grad_enabled())
            and forward_ad._current_level < 0
            and takes_sizes(name, x.shape[-1], weight, *sizes)
        )
    except TypeError:  # sizes that are symbols cannot be looked up
        return None
    return _calls[name] if ours else None


def takes(weight: LoopWeight, columns: int) -> bool:
    """True where the operators take a weight, for x of so many columns."""
    words = weight.words
    if words.dtype == torch.int8:
        return takes_sizes("w8a8", columns, words.shape)
    sizes = (weight.bits, weight.group_size, weight.input_group, weight.table is not None)
    return takes_sizes("linear", columns, words.shape, *sizes)


@cache
def _there(_: tuple[str, ...]) -> bool:
    return not why_not()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _built() -> bool:
    return _there(build.why_not())


def attends(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """True for tensors that `attention` takes: one query per sequence on a CPU, without a gradient."""
    dtype, sizes = query.dtype, query.shape
    here = query.device.type == "cpu" if is_compiling() else query.is_cpu
    if not (here and dtype in TYPES and len(sizes) == key.dim() == value.dim() == DIMENSIONS):
        return False
    batch, heads, queries, size = sizes
    of_batch, key_heads, keys, key_size = key.shape
    batch_of_values, value_heads, values, _ = value.shape
    return bool(
        queries == 1
        and key.dtype is dtype
        and value.dtype is dtype
        and of_batch == batch_of_values == batch
        and key_size == size
        and value_heads == key_heads
        and values == keys
        and heads >= key_heads > 0
        and heads % key_heads == 0
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and (mask is None or _masks(mask, query, key))
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        and forward_ad._current_level < 0
        and _built()
    )


def _masks(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """True for a mask that `attention` takes."""
    return (
        mask.dim() == DIMENSIONS
        and mask.dtype in (torch.bool, *TYPES)
        and mask.shape[0] in (1, query.shape[0])
        and mask.shape[1] in (1, query.shape[1])
        and mask.shape[2:] == (1, key.shape[2])
    )


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale query key^T + mask) value of one token per sequence, in fp32 whatever the dtype; only where
    `attends` is true: [batch, 1, heads, value size].

    query: [batch, heads, 1, size]; key and value: [batch, key heads, keys, size], each shared by heads / key heads
    consecutive heads; mask: of bools (False: not seen) or added, [batch or 1, heads or 1, 1, keys].
    """
    out: Tensor = operators.cpu_attention.default(query, key, value, mask, scale)
    return out


def _like_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])


def _like_product(x: Tensor, words: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], words.shape[0] * (ROWS if words.dim() == STRIPS_DIMENSIONS else 1))


def _like_rows(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def like_experts(x: Tensor, words: Tensor, *others: Any) -> Tensor:
    """The shape of products with the words of experts, for tracing."""
    rows, token = words.shape[1] * (ROWS if words.dim() == STRIPS_DIMENSIONS + 1 else 1), others[3]
    return x.new_empty(x.shape[0] if token is None else token.shape[0], rows)


def like_rows_of_experts(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """The shape of products with the rows of experts, for tracing."""
    token = others[5]
    return x.new_empty(x.shape[0] if token is None else token.shape[0], weight.shape[1])
