"""The linear of codes in words as a torch operator: schema, shapes for tracing, input gradient, and which path runs.

    words_linear    x, as it is or rounded to int8, times a weight in planar words or in strips, of integers or of a
                    table of 16 levels (`layouts.words`), perhaps with sparse rows added to it (`layouts.entries`)

Shapes: x [..., K] in any leading shape, M tokens once flattened, N outputs, G groups. Weights are frozen: only x gets a
gradient, grad W, straight-through where x is rounded (as if it were not).

Paths, the same numbers up to the order of the sums:

    C++          on a CPU, where no gradient is asked for: `cpu.direct`, which calls the same loops without Python
    cpu          `cpu_gemm`, compiled on first use; where it cannot be (`cpu.why_not`), torch's own products, the
                 weight unpacked a block of rows at a time
    triton       on CUDA, and on the CPU under TRITON_INTERPRET=1, when `why_not_...` has nothing against it; entries
                 are added to the product of few tokens by a kernel of their own
    dequantize   there too: the weight block by block in the dtype of x, then cuBLAS; for many tokens (`tuning.choose`),
                 and for what only the fused kernel refuses, such as groups of 96
    reference    plain torch (`reference`), anywhere: what a GPU falls back to, slowly (fp64, no Triton)

Strips are for the loops of a CPU; where none takes a call, the codes are laid out in planar words again for it.

batch_invariant: a token's result then does not depend, to the last bit, on how many tokens are multiplied with it. One
configuration for all (`tuning.choose.invariant`), or the one loop of a CPU that adds up every token alike; products
that cannot promise that are refused. Only the forward product has this mode, not its gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu import direct
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.cpu.arguments import Operation, strips_operation
from compress.kernels.errors import InputError
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.strips import NIBBLE, lines_of, unpack_strips
from compress.kernels.layouts.tiles import TileWords
from compress.kernels.layouts.words import (
    PLANE,
    ROWS,
    STRIPS_DIMENSIONS,
    CodeWords,
    LevelTable,
    planar_block,
    planar_weight,
    planar_words,
    unpack_planar,
)
from compress.kernels.operators.blocks import product_of_blocks, row_blocks
from compress.kernels.operators.devices import (
    FLOATS,
    HALF,
    MAX_INT8_COLUMNS,
    Path,
    as_rows,
    path_of,
    runs_on_cpu,
    shaped,
    why_not_floats,
    why_not_triton,
)
from compress.kernels.operators.register import gradient_operator, operator, outputs
from compress.kernels.operators.sparse import DECODE_TOKENS, sparse_gradient, why_not_sparse
from compress.kernels.tuning.choose import choose, choose_shape, device_of, invariant, kind_of
from compress.kernels.tuning.table import Shape

HALF_PLANE = PLANE // 2


def why_not_weight_only(x: Tensor, weight: CodeWords, device: torch.device | None = None) -> list[str]:
    """Reasons why the Triton kernel cannot multiply x by this weight; empty when it can. device: in place of that of
    x."""
    reasons = [*why_not_triton(device or x.device)]
    if x.dtype not in HALF:
        reasons.append(f"x is {x.dtype}; allowed: float16, bfloat16")
    if weight.scale.dtype != x.dtype and (weight.table is None or weight.scale.dtype != torch.float32):
        reasons.append(f"scales are {weight.scale.dtype}, x is {x.dtype}; lay the weight out for the dtype of x")
    return reasons + why_not_groups(weight)


def why_not_groups(weight: CodeWords) -> list[str]:
    """Reasons why a loop over blocks of words cannot scale groups of such a weight; empty when it can."""
    group, block = weight.group_size, planar_block(weight.bits)
    if weight.table is not None and group == HALF_PLANE:
        return []
    if group != -1 and (group % PLANE or (group % block and block % group)):
        return [f"group size {group}; allowed: 32, 64, multiples of {block}, -1 (one scale per channel)"]
    return []


def why_not_batch_invariant(x: Tensor, weight: CodeWords) -> list[str]:
    """Reasons why the product of x with this weight has no batch-invariant path; empty when it has one."""
    if path_of(x.device, [*why_not_triton(x.device)]) == "cpu":
        return cpu_gemm.why_not("weight_only", x, weight.scale, weight.group_size)
    return why_not_weight_only(x, weight)


def refuse(what: str, reasons: list[str]) -> None:
    """Raise InputError where there are reasons against a request."""
    if reasons:
        raise InputError(f"{what}: {'; '.join(reasons)}")


def why_not_dequantize(x: Tensor, weight: CodeWords) -> list[str]:
    """Reasons why the weight cannot be dequantized by Triton and multiplied by x; empty when it can."""
    return why_not_floats(x.device, x=x.dtype, scales=weight.scale.dtype)


def why_not_input_group(input_group: int) -> list[str]:
    """Reasons why activations cannot be fitted to blocks of so many columns; empty when they can."""
    step = cpu_gemm.INPUT_GROUP_STEP
    if input_group == -1 or (input_group > 0 and input_group % step == 0):
        return []
    return [f"input group {input_group}; allowed: multiples of {step}, -1 (one scale per token)"]


def why_not_int8(x: Tensor, weight: CodeWords) -> list[str]:
    """Reasons why the Triton kernel cannot multiply x, rounded to int8, by this weight; empty when it can."""
    reasons = why_not_dequantize(x, weight)  # of types and the device
    if weight.zero is not None and planar_block(weight.bits) != planar_block(4):
        reasons.append("codes of 8 bits less a zero point do not fit int8")
    if x.shape[-1] >= MAX_INT8_COLUMNS:
        reasons.append(f"{x.shape[-1]} columns; int32 sums are exact below {MAX_INT8_COLUMNS}")
    return reasons + why_not_groups(weight)


def weight_only_path(x_MK: Tensor, weight: CodeWords, batch_invariant: bool = False) -> tuple[Path, Shape | None]:
    """The path of a weight-only product, and the configuration of the fused kernel where that is the path."""
    if batch_invariant:
        refuse("batch_invariant", why_not_batch_invariant(x_MK, weight))
    if why_not_weight_only(x_MK, weight):
        others = why_not_dequantize(x_MK, weight)
        return (path_of(x_MK.device, others) if others else "dequantize"), None
    operation = "weight_only" if weight.table is None else "levels"
    kind = kind_of(operation, weight.bits, weight.group_size, weight.zero is not None, x_MK.dtype)
    sizes = (len(weight.words), x_MK.shape[1], device_of(x_MK.device))
    if batch_invariant:
        return "triton", invariant(kind, *sizes)
    chosen = choose(kind, len(x_MK), *sizes)
    return ("triton", chosen) if isinstance(chosen, Shape) else ("dequantize", None)


def _parts(weight: CodeWords, columns: int) -> Iterator[tuple[slice, CodeWords]]:
    """The weight in blocks of rows that unpack into bounded memory."""
    for rows in row_blocks(len(weight.words), columns):
        zero = None if weight.zero is None else weight.zero[:, rows]
        yield rows, weight._replace(words=weight.words[rows], scale=weight.scale[:, rows], zero=zero)


def check_columns(x: Tensor, weight: CodeWords | TileWords) -> None:
    """Raises InputError for words that do not hold the columns of x."""
    columns, held, bits = x.shape[-1], weight.words.shape[1], weight.bits
    if held != (lines_of(columns, bits) if weight.in_strips else planar_words(columns, bits)):
        lines = f"strips of {held} lines, codes of {bits} bits," if weight.in_strips else f"{held} words of {bits} bits"
        raise InputError(f"x has {columns} columns; {lines} do not hold as many")


def rows_of_words(words: Tensor, *_: Any) -> int:
    """N of words in strips or in rows."""
    return words.shape[0] * (ROWS if words.dim() == STRIPS_DIMENSIONS else 1)


def _by_cpp(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    input_group: int | None = None,
    batch_invariant: bool = False,
    table: Tensor | None = None,
    signed: bool = False,
    row_start: Tensor | None = None,
    *_: Tensor | None,
) -> Tensor | None:
    """The product by `cpu.direct`; None where that has none of it."""
    if batch_invariant or row_start is not None:
        return None
    of_table = table is not None
    product = direct.product("linear", x, words.shape, bits, group_size, input_group, of_table)
    return product and product(x, words, scale, zero, bias, bits, group_size, input_group, table)


@operator("compress::words_linear", outputs(rows_of_words), at_once=_by_cpp)
def words_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    input_group: int | None = None,
    batch_invariant: bool = False,
    table: Tensor | None = None,
    signed: bool = False,
    row_start: Tensor | None = None,
    column: Tensor | None = None,
    value: Tensor | None = None,
) -> Tensor:
    """[..., N] = x (weight + entries)^T + bias, in the dtype of x. The weight is the parts of a `CodeWords`.

    x is multiplied as it is (input_group None), or becomes int8, symmetric, fitted to every token (-1), or to every
    token and block of `input_group` columns. table: fp32 [17], signed: as in `layouts.words.LevelTable`; the parts of
    `Entries` are all there, or none is, and only beside integers and x as it is.
    """
    weight = _weight(words, scale, zero, bits, group_size, table, signed)
    check_columns(x, weight)
    if input_group is not None and (reasons := why_not_input_group(input_group)):
        raise InputError(reasons[0])
    entries = Entries.of(row_start, column, value)
    x_MK = as_rows(x)
    out_MN = _by_loops(x_MK, weight, bias, input_group, batch_invariant, entries)
    if out_MN is None:
        weight = unpack_strips(weight, x.shape[-1]) if weight.in_strips else weight
        if input_group is not None:
            out_MN = _int8_product(x_MK, weight, bias, input_group, batch_invariant)
        else:
            out_MN = _product(x_MK, weight, bias, batch_invariant, entries)
    return shaped(out_MN, x)


def _weight(
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    group_size: int,
    table: Tensor | None = None,
    signed: bool = False,
) -> CodeWords:
    return CodeWords(words, scale, zero, group_size, bits, None if table is None else LevelTable(table, signed))


def _by_loops(
    x_MK: Tensor,
    weight: CodeWords,
    bias: Tensor | None,
    input_group: int | None,
    batch_invariant: bool,
    entries: Entries | None,
) -> Tensor | None:
    """The product by the loops of a CPU; None where none of them takes it."""
    elsewhere = not (weight.in_strips or runs_on_cpu(x_MK.device))
    if elsewhere or (entries is not None and entries.value.dtype not in FLOATS):
        return None
    rounded = input_group is not None
    if weight.table is not None:
        operation: Operation = "table_strips"
        taken = weight.in_strips and not rounded and entries is None
    elif weight.in_strips:
        operation = strips_operation(rounded, x_MK.dtype)
        taken = not rounded or weight.bits == NIBBLE
    else:
        operation, taken = "int8_activation" if rounded else "weight_only", True
    if not taken or cpu_gemm.why_not(operation, x_MK, weight.scale, weight.group_size):
        return None
    return cpu_gemm.words(x_MK, weight, bias, input_group, batch_invariant, entries)


def _product(
    x_MK: Tensor, weight: CodeWords, bias: Tensor | None, batch_invariant: bool, entries: Entries | None
) -> Tensor:
    """[M, N] by the path of `weight_only_path`, planar words and x as it is."""
    path, shape = weight_only_path(x_MK, weight, batch_invariant)
    if path in ("triton", "dequantize") and entries is not None and why_not_sparse(x_MK, entries.value):
        path = "reference"
    if path == "triton" and (entries is None or len(x_MK) <= DECODE_TOKENS):
        from compress.kernels.triton.planar_gemm import planar_gemm

        out_MN = planar_gemm(x_MK, weight, bias, shape)
        if entries is None:
            return out_MN
        from compress.kernels.triton.sparse_rows import add_product

        return add_product(x_MK, entries, out_MN)
    if path in ("triton", "dequantize"):
        from compress.kernels.triton.dequantize_gemm import dequantize_gemm

        return dequantize_gemm(x_MK, weight, bias, entries)
    blocks = ((rows, planar_weight(part, x_MK.shape[1])) for rows, part in _parts(weight, x_MK.shape[1]))
    out_MN = product_of_blocks(x_MK, blocks, len(weight.words), bias)
    return out_MN if entries is None else out_MN + reference.sparse_rows(x_MK, *entries)


def _int8_product(
    x_MK: Tensor, weight: CodeWords, bias: Tensor | None, input_group: int, batch_invariant: bool
) -> Tensor:
    """[M, N], planar words and x rounded to int8: by Triton, or exact sums of integers in fp64, scaled one by one."""
    if not why_not_int8(x_MK, weight):
        from compress.kernels.triton.int8_planar_gemm import int8_planar_gemm

        kind = kind_of("int8_activation", weight.bits, weight.group_size, weight.zero is not None, x_MK.dtype)
        sizes = (len(weight.words), x_MK.shape[1], device_of(x_MK.device))
        shape = invariant(kind, *sizes) if batch_invariant else choose_shape(kind, len(x_MK), *sizes)
        return int8_planar_gemm(x_MK, weight, bias, input_group, shape)
    out_MN = x_MK.new_empty(len(x_MK), len(weight.words))
    for rows, part in _parts(weight, x_MK.shape[1]):
        middle = torch.full_like(part.scale, 2 ** (weight.bits - 1)) if part.zero is None else part.zero
        codes_NK = unpack_planar(part.words, weight.bits, x_MK.shape[1])
        added = None if bias is None else bias[rows]
        out_MN[:, rows] = reference.int8_activation(x_MK, codes_NK, part.scale, middle, added, input_group)
    return out_MN


@gradient_operator(words_linear, bias=None, input_group=None, batch_invariant=False)
def words_gradient(
    grad: Tensor,
    shape: tuple[int, ...],
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    input_group: int | None = None,
    batch_invariant: bool = False,
    table: Tensor | None = None,
    signed: bool = False,
    *entries: Tensor | None,
) -> Tensor:
    """[..., K] = grad (weight + entries), in the dtype of grad [..., N]: the input gradient of `words_linear`."""
    weight = _weight(words, scale, zero, bits, group_size, table, signed)
    columns = shape[-1]
    weight = unpack_strips(weight, columns) if weight.in_strips else weight
    grad_MN = as_rows(grad)
    if why_not_dequantize(grad, weight):
        work = torch.promote_types(grad.dtype, torch.float32)
        sums_MK = torch.zeros(len(grad_MN), columns, dtype=work, device=grad.device)
        for rows, part in _parts(weight, columns):
            sums_MK += grad_MN[:, rows] @ planar_weight(part, columns).to(grad.dtype)
        out_MK = sums_MK.to(grad.dtype)
    else:
        from compress.kernels.triton.dequantize_gemm import input_gradient

        out_MK = input_gradient(grad_MN, weight, columns)
    sparse = Entries.of(*entries)
    out_MK = out_MK if sparse is None else out_MK + sparse_gradient(grad_MN, out_MK.shape, *sparse, None, columns)
    return out_MK.view(shape)
