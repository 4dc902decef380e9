"""2:4 weights as pairs: of every four consecutive inputs (a quad) the two that are kept, and where they stand.

N outputs, K inputs, G groups.

    held       [N, K / 2]                  what is kept of each quad, in order: numbers, or unsigned codes (uint8)
    position   int32 [N, ceil(K / 32)]     the column of each within its quad, 0 to 3, two bits each (`pack.pack_rows`)
    scale      [G, N], zero uint8 [G, N]   of codes, whose value is (code - zero) * scale

The positions of a quad rise, so a quad that keeps fewer than two has a zero among its pair. This is the layout on
disk, and that of every 2:4 weight but codes of up to 4 bits: 16-bit numbers (9 bits a weight instead of 16) and codes
of more than 4 bits (5 instead of 8). On a CPU a product of few tokens reads the pairs and nothing else
(`cpu.sparse24`); others make a block of rows dense at a time.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.errors import InputError
from compress.kernels import reference
from compress.kernels.blocks import gradient_of_blocks, product_of_blocks, row_blocks
from compress.kernels.cpu import sparse24 as cpu24
from compress.kernels.operators import operator
from compress.kernels.ops import _rows
from compress.kernels.pack import pack_rows, words_of
from compress.kernels.pack24 import KEPT, QUAD, check_kept

# Bits of a position.
POSITION = 2
NO_KERNEL = "no GPU kernel reads pairs: torch makes a block of rows dense at a time"


class Pairs(NamedTuple):
    """A weight as drawn above; group_size in columns, -1 for one scale per output channel."""

    held: Tensor
    position: Tensor
    scale: Tensor | None
    zero: Tensor | None
    group_size: int


def position_words(columns: int) -> int:
    """int32 words of the positions of a row."""
    return words_of(columns * KEPT // QUAD, POSITION)


def positions_of(kept_NK: Tensor) -> Tensor:
    """[N, K] bool, at most two of four -> uint8 [N, K / 2] rising positions; where fewer are kept, the first of the
    others are, too. Raises InputError where the weight is not 2:4."""
    check_kept(kept_NK)
    quads = kept_NK.view(len(kept_NK), -1, QUAD)
    chosen = (~quads).to(torch.uint8).argsort(dim=-1, stable=True)[..., :KEPT].sort(-1).values
    return chosen.to(torch.uint8).flatten(1)


def pack_positions(position_NH: Tensor) -> Tensor:
    """uint8 [N, K / 2] -> words."""
    return pack_rows(position_NH, POSITION, signed=False)


def unpack_positions(words: Tensor, columns: int) -> Tensor:
    """Inverse of `pack_positions`: a byte of the stream is four of them."""
    found = words.contiguous().view(torch.uint8)
    positions = torch.stack([found & 3, found >> 2 & 3, found >> 4 & 3, found >> 6], -1)
    return positions.view(len(words), -1)[:, : columns * KEPT // QUAD]


def take(x_NK: Tensor, position_NH: Tensor) -> Tensor:
    """[N, K / 2] what stands at the positions."""
    quads, index = x_NK.view(len(x_NK), -1, QUAD), position_NH.view(len(x_NK), -1, KEPT).long()
    return quads.gather(-1, index).flatten(1)


def spread(held_NH: Tensor, position_NH: Tensor, others_NK: Tensor | None = None) -> Tensor:
    """[N, K] inverse of `take`, with zeros elsewhere, or what `others` has there."""
    rows = len(held_NH)
    shape = (rows, held_NH.shape[1] // KEPT, QUAD)
    quads = held_NH.new_zeros(shape) if others_NK is None else others_NK.reshape(shape)
    return quads.scatter(-1, position_NH.view(rows, -1, KEPT).long(), held_NH.view(rows, -1, KEPT)).flatten(1)


def pairs_weight(weight: Pairs) -> Tensor:
    """[N, K] values, in the dtype of the numbers or of the scales."""
    held, columns = weight.held, weight.held.shape[1] * QUAD // KEPT
    if weight.scale is not None:
        assert weight.zero is not None
        held = reference.dequantize(held, weight.scale.t(), weight.zero.t())
    return spread(held, unpack_positions(weight.position, columns))


def half_of(weight: Pairs) -> cpu24.Half:
    """A weight as the CPU's loops read it."""
    return cpu24.Half(*weight, cpu24.NUMBERS if weight.scale is None else cpu24.PAIRED)


def dense_blocks(weight: Pairs) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their values) of a weight, by torch alone: a gradient is traced through it."""
    for rows in row_blocks(len(weight.held), weight.held.shape[1] * QUAD // KEPT):
        scale, zero = (None if part is None else part[:, rows] for part in (weight.scale, weight.zero))
        part = Pairs(weight.held[rows], weight.position[rows], scale, zero, weight.group_size)
        yield rows, pairs_weight(part)


@operator("compress::pairs24_linear")
def pairs24_linear(
    x: Tensor,
    held: Tensor,
    position: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x. The weight is the parts of `Pairs`."""
    if held.shape[1] * QUAD != x.shape[-1] * KEPT:
        raise InputError(f"x has {x.shape[-1]} columns; {held.shape[1]} pairs' halves do not make as many")
    weight = Pairs(held, position, scale, zero, group_size)
    if not cpu24.why_not(x, half_of(weight)):
        out_MN = cpu24.linear(_rows(x), half_of(weight), bias)
    else:
        out_MN = product_of_blocks(_rows(x), dense_blocks(weight), len(held), bias)
    return out_MN.view(*x.shape[:-1], len(held))


@pairs24_linear.register_fake
def _(
    x: Tensor,
    held: Tensor,
    position: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    torch._check(held.shape[1] * QUAD == x.shape[-1] * KEPT, lambda: "pairs do not make as many columns as x has")
    return x.new_empty(*x.shape[:-1], held.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *weight, _, ctx.group_size = inputs
    ctx.save_for_backward(*weight)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    held, position, scale, zero = ctx.saved_tensors
    blocks = dense_blocks(Pairs(held, position, scale, zero, ctx.group_size))
    return gradient_of_blocks(grad, blocks, held.shape[1] * QUAD // KEPT), *(None,) * 6


pairs24_linear.register_autograd(_gradient, setup_context=_save)
