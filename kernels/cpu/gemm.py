"""The CPU products of `cpu_gemm.cpp` on tensors, and the choice among its loops for given sizes.

Both loops read the words that every device reads (`layouts.words.Planar`), strips of them (`layouts.strips.Strips`) or
plain int8. `arguments` has the crossovers between them; products of many tokens may be left to `dense` blocks.
"""

import ctypes

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
    Operation,
    by_rows,
    strips_operation,
)
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.strips import BYTE, LINE_BYTES, NIBBLE, ROWS, Strips
from compress.kernels.layouts.strips24 import Strips24
from compress.kernels.layouts.tiles import TileStrips
from compress.kernels.layouts.words import PLANE, Planar

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


def _filled(
    operation: Operation,
    x_MK: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Arguments:
    M, K = x_MK.shape
    filled = Arguments(x=x_MK.data_ptr(), weight=weight.data_ptr(), scale=scale.data_ptr(), M=M, N=len(weight), K=K)
    filled.row_bytes = weight.shape[1] * weight.element_size()
    filled.x_type, filled.scale_type = TYPES[x_MK.dtype], TYPES[scale.dtype]
    if bias is not None:
        filled.bias, filled.bias_type = bias.data_ptr(), TYPES[bias.dtype]
    filled.G = scale.shape[0] if scale.dim() == 2 else 1
    filled.group = filled.input_group = -1
    # Over a slab every token is summed alike, whatever tile it is in.
    filled.by_rows = by_rows(operation, M) and not batch_invariant
    filled.threads = torch.get_num_threads()
    return filled


def bias_of(bias: Tensor | None) -> Tensor | None:
    """A bias as the loops read it."""
    if bias is None:
        return None
    return (bias if bias.dtype in TYPES else bias.to(torch.float32)).contiguous()


def _contiguous(entries: Entries | None) -> Entries | None:
    return None if entries is None else Entries(*(tensor.contiguous() for tensor in entries))


def _add_entries(filled: Arguments, entries: Entries | None) -> None:
    """Pass sparse rows to a call; they must live until it returns."""
    if entries is None:
        return
    filled.row_start, filled.column, filled.value = (tensor.data_ptr() for tensor in entries)
    filled.entries, filled.value_type = len(entries.value), TYPES[entries.value.dtype]
    filled.short_columns = entries.column.dtype == torch.int16


def call(name: Loop, filled: Arguments, x_MK: Tensor, batch_invariant: bool = False) -> Tensor:
    """[M, N] in the dtype of x: the result of a loop on arguments that live until it returns, or of dense blocks where
    these are faster and not asked to be batch-invariant."""
    out_MN = x_MK.new_empty(filled.M, filled.N)
    filled.out = out_MN.data_ptr()
    large = filled.M > FEW_TOKENS and filled.N * filled.K >= FEW_WEIGHTS
    if large and not batch_invariant and dense.taken(name, filled):
        return out_MN
    if outcome := getattr(cpu.library(), name)(ctypes.byref(filled)):
        cpu.raise_for(outcome, f"no memory to pack {filled.M} tokens of {filled.K} columns")
    return out_MN


def _planar(
    operation: Operation,
    x_MK: Tensor,
    weight: Planar,
    bias: Tensor | None,
    input_group: int,
    entries: Entries | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    # What is made contiguous here must live until the call returns.
    x_MK, bias, entries = x_MK.contiguous(), bias_of(bias), _contiguous(entries)
    words, scale = weight.words.contiguous(), weight.scale.contiguous()
    zero = None if weight.zero is None else weight.zero.contiguous()
    filled = _filled(operation, x_MK, words, scale, bias, batch_invariant)
    filled.zero = None if zero is None else zero.data_ptr()
    filled.bits, filled.group, filled.input_group = weight.bits, weight.group_size, input_group
    filled.planar = filled.symmetric = True
    _add_entries(filled, entries)
    loop: Loop = "weight_only" if operation == "weight_only" else "int8_activation"
    return call(loop, filled, x_MK, batch_invariant)


def weight_only(
    x_MK: Tensor,
    weight: Planar,
    bias: Tensor | None = None,
    entries: Entries | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """[M, N] = x (weight + entries)^T + bias, in the dtype of x. batch_invariant: by the slower loop for few tokens."""
    return _planar("weight_only", x_MK, weight, bias, -1, entries, batch_invariant)


def int8_activation(
    x_MK: Tensor,
    weight: Planar,
    bias: Tensor | None = None,
    input_group: int = -1,
    batch_invariant: bool = False,
) -> Tensor:
    """[M, N] with x rounded to int8, symmetric, per token or per token and `input_group` columns."""
    return _planar("int8_activation", x_MK, weight, bias, input_group, None, batch_invariant)


def strips(
    x_MK: Tensor,
    weight: Strips,
    bias: Tensor | None = None,
    input_group: int | None = None,
    batch_invariant: bool = False,
    entries: Entries | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """[M, N] = x (weight + entries)^T + bias, in the dtype of x, which is multiplied as it is (None) or, without
    entries, rounded to int8, symmetric, per token (-1) or per token and `input_group` columns. table: fp32 [17], the
    values of codes of 4 bits before they are scaled and a factor of all scales, for x that is not rounded (None: the
    codes less 8)."""
    x_MK, bias, entries = x_MK.contiguous(), bias_of(bias), _contiguous(entries)
    words, scale = weight.words.contiguous(), weight.scale.contiguous()
    zero = None if weight.zero is None else weight.zero.contiguous()
    operation = strips_operation(input_group is not None, x_MK.dtype)
    filled = _filled(operation, x_MK, words, scale, bias, batch_invariant)
    filled.N, filled.G, filled.row_bytes = len(words) * ROWS, scale.shape[1], words.shape[1] * words.shape[2] // ROWS
    filled.zero = None if zero is None else zero.data_ptr()
    filled.bits, filled.group, filled.strips, filled.symmetric = weight.bits, weight.group_size, True, True
    if input_group is not None:
        filled.input_group = input_group
    if table is not None:
        assert weight.bits == NIBBLE
        assert input_group is None
        filled.table = table.data_ptr()
    _add_entries(filled, entries)
    return call("weight_only" if input_group is None else "int8_activation", filled, x_MK, batch_invariant)


def tiles(x_MK: Tensor, weight: TileStrips, bias: Tensor | None = None, entries: Entries | None = None) -> Tensor:
    """[M, N] = x (weight + entries)^T + bias, in the dtype of x."""
    x_MK, bias, entries = x_MK.contiguous(), bias_of(bias), _contiguous(entries)
    words, levels, ranges = weight.words.contiguous(), weight.levels.contiguous(), weight.ranges.contiguous()
    filled = _filled("tiles", x_MK, words, ranges, bias)
    filled.N, filled.row_bytes = len(words) * ROWS, words.shape[1] * words.shape[2] // ROWS
    filled.G = -(-words.shape[1] * LINE_BYTES * 8 // (ROWS * weight.bits) // weight.group_size)  # with padding
    filled.scale, filled.ranges, filled.levels = None, ranges.data_ptr(), levels.data_ptr()
    filled.bits, filled.strips, filled.level_bits = weight.bits, True, NIBBLE if len(levels) == 1 else BYTE
    filled.group, filled.tile_rows = weight.group_size, weight.tile_rows
    _add_entries(filled, entries)
    return call("weight_only", filled, x_MK)


def strips24(x_MK: Tensor, weight: Strips24, bias: Tensor | None = None) -> Tensor:
    """[M, N] = x weight^T + bias, in the dtype of x."""
    x_MK, bias = x_MK.contiguous(), bias_of(bias)
    held, position = weight.held.contiguous(), weight.position.contiguous()
    scale, zero = (None if part is None else part.contiguous() for part in (weight.scale, weight.zero))
    filled = _filled("sparse24", x_MK, held, held if scale is None else scale, bias)
    filled.N, filled.row_bytes = len(held) * ROWS, held[0].nbytes // ROWS
    filled.kept, filled.bits, filled.group, filled.strips = position.data_ptr(), weight.bits, weight.group_size, True
    if scale is None:
        filled.scale, filled.G, filled.value_type = None, 0, TYPES[held.dtype]
    else:
        filled.G = scale.shape[1]
        filled.zero = None if zero is None else zero.data_ptr()
    return call("sparse24", filled, x_MK)


def sparse_rows(x_MK: Tensor, entries: Entries, bias: Tensor | None = None) -> Tensor:
    """[M, N] = x entries^T + bias, in the dtype of x."""
    x_MK, bias, entries = x_MK.contiguous(), bias_of(bias), Entries(*(tensor.contiguous() for tensor in entries))
    M, K = x_MK.shape
    filled = Arguments(x=x_MK.data_ptr(), M=M, N=len(entries.row_start) - 1, K=K, x_type=TYPES[x_MK.dtype], bits=8)
    if bias is not None:
        filled.bias, filled.bias_type = bias.data_ptr(), TYPES[bias.dtype]
    filled.by_rows, filled.threads = True, torch.get_num_threads()
    _add_entries(filled, entries)
    return call("sparse_rows", filled, x_MK)


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
    x_MK, weight_NK, scale_N, bias_N = x_MK.contiguous(), weight_NK.contiguous(), scale_N.contiguous(), bias_of(bias_N)
    filled = _filled("w8a8", x_MK, weight_NK, scale_N, bias_N)
    filled.bits, filled.planar, filled.symmetric = 8, False, symmetric
    given = {"input_scale": (input_scale, torch.float32), "input_zero": (input_zero, torch.int32)}
    given["row_sum"] = (row_sum_N, torch.int32)
    kept = {name: tensor.to(dtype).contiguous() for name, (tensor, dtype) in given.items() if tensor is not None}
    for name, tensor in kept.items():
        setattr(filled, name, tensor.data_ptr())
    return call("int8_activation", filled, x_MK)


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
