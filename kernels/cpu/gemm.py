"""The CPU products of `cpu_gemm.cpp` on tensors, and the choice among its loops for given sizes.

Both loops read the words that every device reads (`layouts.words`), strips of them (`layouts.strips`) or plain int8.
`arguments` has the crossovers between them; products of many tokens may be left to `dense` blocks.
"""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import dense
from compress.kernels.cpu.arguments import (
    FEW_TOKENS,
    FEW_WEIGHTS,
    TYPES,
    Arguments,
    Loop,
    LoopWeight,
    Operation,
    by_rows,
    rows_up_to,
    strips_operation,
)
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.strips import BYTE, NIBBLE
from compress.kernels.layouts.strips24 import Strips24
from compress.kernels.layouts.tiles import TileWords
from compress.kernels.layouts.words import LINE_BYTES, PLANE, ROWS, STRIPS_DIMENSIONS, CodeWords

# 255 * 128 * K, the largest sum of unsigned weights and signed activations, must stay within int32.
MAX_INT8_COLUMNS = 2**16
# Activation groups are whole blocks of planar words, be they of 4 or of 8 bits.
INPUT_GROUP_STEP = 128
# Groups of tiles are whole halves of a plane, and those of a table (NVFP4) may be one.
TILE_GROUP = TABLE_GROUP = PLANE // 2


def why_not_sizes(operation: Operation, K: int, group_size: int) -> list[str]:
    """Reasons why the loops cannot take a weight of these sizes; empty when they can."""
    reasons = []
    if operation == "tiles":
        if group_size % TILE_GROUP:
            reasons.append(f"group size {group_size}; allowed: multiples of {TILE_GROUP}")
    elif operation == "table_strips" and group_size == TABLE_GROUP:
        if K % PLANE:
            reasons.append(f"{K} columns in groups of {group_size}; allowed: multiples of {PLANE}")
    elif group_size != -1 and group_size % PLANE:
        reasons.append(f"group size {group_size}; allowed: multiples of {PLANE}, -1 (one scale per channel)")
    if operation in ("int8_activation", "int8_strips", "w8a8") and K >= MAX_INT8_COLUMNS:
        reasons.append(f"{K} columns; int32 sums are exact below {MAX_INT8_COLUMNS}")
    return reasons


def why_not(operation: Operation, x: Tensor, scale: Tensor, group_size: int = -1) -> list[str]:
    """Reasons why x cannot be multiplied here by a weight with these scales; empty when it can."""
    if x.device.type != "cpu":
        return [f"the device is {x.device.type}, not cpu"]
    reasons = why_not_sizes(operation, x.shape[-1], group_size)
    for name, tensor in (("x is", x), ("scales are", scale)):
        if tensor.dtype not in TYPES:
            reasons.append(f"{name} {tensor.dtype}; allowed: float32, float16, bfloat16")
    return reasons or [*cpu.why_not()]


def cpu_route(operation: Operation, M: int, N: int, K: int, group_size: int = -1) -> str:
    """The name of the path that multiplies M tokens by a weight [N, K] on this CPU: rows, strips, slabs, torch,
    reference."""
    if why_not_sizes(operation, K, group_size) or cpu.why_not():
        return "reference" if operation == "int8_activation" else "torch"
    if not by_rows(operation, M):
        return "slabs"
    return "strips" if operation.endswith(("strips", "tiles", "24")) else "rows"


def _filled(weight: LoopWeight, columns: int, dtype: torch.dtype) -> tuple[Arguments, Loop, Operation]:
    """The arguments of a product but for x, M, the result and threads; the loop that takes them; the operation."""
    words, scale, rounded = weight.words, weight.scale, weight.input_group is not None
    filled = Arguments(weight=words.data_ptr(), scale=scale.data_ptr(), K=columns, G=1, bits=weight.bits)
    filled.x_type, filled.scale_type, filled.symmetric = TYPES[dtype], TYPES[scale.dtype], weight.symmetric
    filled.group, filled.input_group = weight.group_size, -1 if weight.input_group is None else weight.input_group
    _add_bias(filled, weight.bias)
    for name in ("zero", "table", "row_sum", "input_scale", "input_zero"):
        part: Tensor | None = getattr(weight, name)
        if part is not None:
            setattr(filled, name, part.data_ptr())
    if words.dtype == torch.int8:
        filled.N, filled.row_bytes = words.shape
        return filled, "int8_activation", "w8a8"
    loop: Loop = "int8_activation" if rounded else "weight_only"
    if words.dim() == STRIPS_DIMENSIONS:
        _in_strips(filled, words)
        filled.G = scale.shape[1]
        return filled, loop, strips_operation(rounded, dtype)
    filled.planar, filled.N, filled.G = True, len(words), scale.shape[0]
    filled.row_bytes = words.shape[1] * words.element_size()
    return filled, loop, loop


def _in_strips(filled: Arguments, words: Tensor) -> None:
    filled.strips, filled.N, filled.row_bytes = True, len(words) * ROWS, words.nbytes // (len(words) * ROWS)


def _add_bias(filled: Arguments, bias: Tensor | None) -> None:
    if bias is not None:
        filled.bias, filled.bias_type = bias.data_ptr(), TYPES[bias.dtype]


def of_step(weight: LoopWeight, columns: int, dtype: torch.dtype) -> tuple[Arguments, Loop, int]:
    """(Arguments but for x, M, the result and threads; the loop; tokens up to which it reads rows front to back)."""
    filled, loop, operation = _filled(weight, columns, dtype)
    return filled, loop, rows_up_to(operation, cpu.library())


def _readable(bias: Tensor | None) -> Tensor | None:
    """A bias as the loops read it."""
    if bias is None:
        return None
    return (bias if bias.dtype in TYPES else bias.to(torch.float32)).contiguous()


def _whole(parts: Iterable[Any]) -> list[Any]:
    """The parts of a weight, tensors contiguous: they must live until a call returns."""
    return [part.contiguous() if isinstance(part, Tensor) else part for part in parts]


def _add_entries(filled: Arguments, entries: Entries | None) -> None:
    """Pass sparse rows to a call; they must live until it returns."""
    if entries is None:
        return
    filled.row_start, filled.column, filled.value = (tensor.data_ptr() for tensor in entries)
    filled.entries, filled.value_type = len(entries.value), TYPES[entries.value.dtype]
    filled.short_columns = entries.column.dtype == torch.int16


def call(name: Loop, operation: Operation, filled: Arguments, x_MK: Tensor, batch_invariant: bool = False) -> Tensor:
    """[M, N] in the dtype of x: the result of a loop on arguments that live until it returns, or of dense blocks where
    these are faster and not asked to be batch-invariant."""
    x_MK = x_MK.contiguous()
    filled.x, filled.x_type, filled.M = x_MK.data_ptr(), TYPES[x_MK.dtype], len(x_MK)
    # Over a slab every token is summed alike, whatever tile it is in.
    filled.by_rows = by_rows(operation, filled.M) and not batch_invariant
    filled.threads = torch.get_num_threads()
    out_MN = x_MK.new_empty(filled.M, filled.N)
    filled.out = out_MN.data_ptr()
    large = filled.M > FEW_TOKENS and filled.N * filled.K >= FEW_WEIGHTS
    if large and not batch_invariant and dense.taken(name, filled):
        return out_MN
    if outcome := getattr(cpu.library(), name)(ctypes.byref(filled)):
        cpu.raise_for(outcome, f"no memory to pack {filled.M} tokens of {filled.K} columns")
    return out_MN


def words(
    x_MK: Tensor,
    weight: CodeWords,
    bias: Tensor | None = None,
    input_group: int | None = None,
    batch_invariant: bool = False,
    entries: Entries | None = None,
) -> Tensor:
    """[M, N] = x (weight + entries)^T + bias, in the dtype of x, of a weight in planar words or in strips.

    x is multiplied as it is (None) or, without entries, rounded to int8, symmetric, per token (-1) or per token and
    `input_group` columns. A table is for strips of 4 bits and x that is not rounded. batch_invariant: by the slower
    loop for few tokens.
    """
    table = None if weight.table is None else weight.table.values
    assert table is None or (weight.bits == NIBBLE and input_group is None)
    sizes = (weight.bits, weight.group_size, input_group)
    held = LoopWeight(*_whole((weight.words, weight.scale, weight.zero, _readable(bias), *sizes, table)))
    entries = None if entries is None else Entries(*_whole(entries))
    filled, loop, operation = _filled(held, x_MK.shape[1], x_MK.dtype)
    _add_entries(filled, entries)
    return call(loop, operation, filled, x_MK, batch_invariant)


def tiles(x_MK: Tensor, weight: TileWords, bias: Tensor | None = None, entries: Entries | None = None) -> Tensor:
    """[M, N] = x (weight + entries)^T + bias, in the dtype of x, of a weight in strips."""
    bias, entries = _readable(bias), None if entries is None else Entries(*_whole(entries))
    words, levels, ranges = _whole(weight[:3])
    filled = Arguments(weight=words.data_ptr(), ranges=ranges.data_ptr(), levels=levels.data_ptr(), K=x_MK.shape[1])
    _in_strips(filled, words)
    _add_bias(filled, bias)
    filled.G = -(-words.shape[1] * LINE_BYTES * 8 // (ROWS * weight.bits) // weight.group_size)  # with padding
    filled.bits, filled.level_bits = weight.bits, NIBBLE if len(levels) == 1 else BYTE
    filled.group, filled.tile_rows, filled.scale_type = weight.group_size, weight.tile_rows, TYPES[ranges.dtype]
    _add_entries(filled, entries)
    return call("weight_only", "tiles", filled, x_MK)


def strips24(x_MK: Tensor, weight: Strips24, bias: Tensor | None = None) -> Tensor:
    """[M, N] = x weight^T + bias, in the dtype of x."""
    bias = _readable(bias)
    strips, position, scale, zero = _whole(weight[:4])
    filled = Arguments(weight=strips.data_ptr(), kept=position.data_ptr(), K=x_MK.shape[1], bits=weight.bits)
    _in_strips(filled, strips)
    _add_bias(filled, bias)
    filled.group = weight.group_size
    if scale is None:
        filled.scale_type = filled.value_type = TYPES[strips.dtype]
    else:
        filled.scale, filled.scale_type, filled.G = scale.data_ptr(), TYPES[scale.dtype], scale.shape[1]
        filled.zero = None if zero is None else zero.data_ptr()
    return call("sparse24", "sparse24", filled, x_MK)


def sparse_rows(x_MK: Tensor, entries: Entries, bias: Tensor | None = None) -> Tensor:
    """[M, N] = x entries^T + bias, in the dtype of x."""
    bias, entries = _readable(bias), Entries(*_whole(entries))
    filled = Arguments(N=len(entries.row_start) - 1, K=x_MK.shape[1], bits=BYTE)
    _add_bias(filled, bias)
    _add_entries(filled, entries)
    return call("sparse_rows", "sparse_rows", filled, x_MK)


def w8a8(
    x_MK: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    row_sum_N: Tensor | None,
    bias_N: Tensor | None,
    input_scale: Tensor | None,
    input_zero: Tensor | None,
    symmetric: bool,
) -> Tensor:
    """[M, N] with x rounded to int8, from a weight that is plain int8; bit for bit `reference.w8a8`."""
    integers = (None if part is None else part.to(torch.int32) for part in (row_sum_N, input_zero))
    row_sum, zero = integers
    fixed = None if input_scale is None else input_scale.to(torch.float32)
    parts = (weight_NK, scale_N, None, _readable(bias_N), BYTE, -1, None, None, row_sum, fixed, zero, symmetric)
    held = LoopWeight(*_whole(parts))
    filled, loop, operation = _filled(held, x_MK.shape[1], x_MK.dtype)
    return call(loop, operation, filled, x_MK)


def quantize_tokens(
    x_MK: Tensor, symmetric: bool = True, input_group: int = -1
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes int8 [M, K], scale fp32 [M, blocks], zero int32 [M] or None, bit for bit `reference.quantize_tokens`."""
    M, K = x_MK.shape
    x_MK = x_MK.contiguous()
    codes_MK = torch.empty(M, K, dtype=torch.int8)
    scale = torch.empty(M, 1 if input_group == -1 else -(-K // input_group))
    zero_M = torch.empty(M, dtype=torch.int32)
    filled = Arguments(x=x_MK.data_ptr(), M=M, K=K, input_group=input_group, x_type=TYPES[x_MK.dtype])
    filled.symmetric, filled.threads = symmetric, torch.get_num_threads()
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes_MK, scale, zero_M))
    cpu.library().quantize_tokens(ctypes.byref(filled), *pointers)
    return codes_MK, scale, None if symmetric else zero_M
