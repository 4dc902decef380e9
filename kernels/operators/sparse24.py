"""The linear of 2:4 weights as a torch operator, in either of their layouts:

    strips   on a CPU (`layouts.strips24`, laid out by `lay_in_strips24`): by C++, which multiplies what is kept
    pairs    as they are stored (`layouts.pairs24`)

Everything else is made dense by torch, a block of rows at a time. Values of codes in strips are not rounded to the type
of their scales. Codes of up to 4 bits that are not in strips lie in planar words, zeros among them
(`operators.words`): on an H100 these are multiplied faster than 3 bits a weight were.

Shapes: x [..., K], M tokens once flattened, N outputs.
"""

from collections.abc import Iterator

from torch import Tensor

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.errors import InputError
from compress.kernels.layouts.pairs24 import KEPT, QUAD, Pairs, pairs_weight
from compress.kernels.layouts.strips import BLOCK
from compress.kernels.layouts.strips24 import Strips24, pack_pairs, pack_words24, unpack_pairs, why_not_strips24
from compress.kernels.layouts.words import ROWS, STRIPS_DIMENSIONS, CodeWords
from compress.kernels.operators.blocks import gradient_of_blocks, product_of_blocks, row_blocks
from compress.kernels.operators.devices import as_rows, shaped
from compress.kernels.operators.register import gradient, operator, outputs

NO_KERNEL = "no GPU kernel reads pairs: torch makes a block of rows dense at a time"


def why_not_lay_in_strips24(rows: int, columns: int, group_size: int) -> list[str]:
    """Reasons why a weight is not better off in strips on this CPU; empty when it is."""
    return [*why_not_strips24(rows), *cpu_gemm.why_not_sizes("sparse24", columns, group_size)] or [*cpu.why_not()]


def lay_in_strips24(weight: Pairs | CodeWords, columns: int) -> Strips24 | None:
    """A weight of `columns` columns on a CPU in strips; None where it is better off as it is."""
    held = weight[0]
    if held.device.type != "cpu" or why_not_lay_in_strips24(len(held), columns, weight.group_size):
        return None
    return pack_words24(weight, columns) if isinstance(weight, CodeWords) else pack_pairs(weight)


def dense_blocks(weight: Pairs, columns: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their values) of a weight, by torch alone: a gradient is traced through it."""
    for rows in row_blocks(len(weight.held), columns):
        scale, zero = (None if part is None else part[:, rows] for part in (weight.scale, weight.zero))
        yield rows, pairs_weight(Pairs(weight.held[rows], weight.position[rows], scale, zero, weight.group_size))


def _laid(
    columns: int,
    held: Tensor,
    position: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    group_size: int,
    bits: int,
) -> Pairs | Strips24:
    """The weight in its layout. Raises InputError where it does not hold so many columns."""
    if position.dim() == STRIPS_DIMENSIONS:
        if position.shape[1] != -(-columns // BLOCK):
            raise InputError(f"x has {columns} columns; {position.shape[1]} blocks of {BLOCK} do not hold as many")
        return Strips24(held, position, scale, zero, group_size, bits)
    if held.shape[1] * QUAD != columns * KEPT:
        raise InputError(f"x has {columns} columns; {held.shape[1]} pairs' halves do not make as many")
    return Pairs(held, position, scale, zero, group_size)


@operator(
    "compress::sparse24_linear",
    outputs(lambda held, position, *_: len(held) * (ROWS if position.dim() == STRIPS_DIMENSIONS else 1)),
)
def sparse24_linear(
    x: Tensor,
    held: Tensor,
    position: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    bits: int,
) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x. The weight is the parts of `Pairs` or of a `Strips24`;
    bits: 4 (in strips) or 8 of codes, 16 of numbers."""
    weight, x_MK = _laid(x.shape[-1], held, position, scale, zero, group_size, bits), as_rows(x)
    if isinstance(weight, Strips24):
        if not cpu_gemm.why_not("sparse24", x, held if scale is None else scale, group_size):
            return shaped(cpu_gemm.strips24(x_MK, weight, bias), x)
        weight = unpack_pairs(weight, x.shape[-1])
    return shaped(product_of_blocks(x_MK, dense_blocks(weight, x.shape[-1]), len(weight.held), bias), x)


@gradient(sparse24_linear)
def _(
    grad: Tensor,
    shape: tuple[int, ...],
    held: Tensor,
    position: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    *sizes: int,
) -> Tensor:
    weight = _laid(shape[-1], held, position, scale, zero, *sizes)
    weight = unpack_pairs(weight, shape[-1]) if isinstance(weight, Strips24) else weight
    return gradient_of_blocks(grad, dense_blocks(weight, shape[-1]), shape[-1])
