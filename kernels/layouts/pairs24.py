"""2:4 weights as pairs: of every four consecutive inputs (a quad) the two that are kept, and where they stand.

N outputs, K inputs, G groups.

    held       [N, K / 2]                  what is kept of each quad, in order: numbers, or unsigned codes (uint8)
    position   int32 [N, ceil(K / 32)]     the column of each within its quad, 0 to 3, two bits each
    (`layouts.words.pack_rows`)
    scale      [G, N], zero uint8 [G, N]   of codes, whose value is (code - zero) * scale

The positions of a quad rise, so a quad that keeps fewer than two has a zero among its pair. This is the layout on
disk, and that of 16-bit numbers (9 bits a weight instead of 16) and of codes of more than 4 bits (5 instead of 8). A
CPU multiplies by another layout (`strips24`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.errors import InputError
from compress.kernels.layouts.words import pack_rows, words_of

QUAD, KEPT = 4, 2
# Bits of a position.
POSITION = 2


class Pairs(NamedTuple):
    """A weight as drawn above; group_size in columns, -1 for one scale per output channel."""

    held: Tensor
    position: Tensor
    scale: Tensor | None
    zero: Tensor | None
    group_size: int


def check_kept(kept_NK: Tensor) -> None:
    """Raises InputError, naming the first quad, where more than two of four consecutive columns are kept."""
    rows, columns = kept_NK.shape
    padded = torch.nn.functional.pad(kept_NK, (0, -columns % QUAD))
    counts = padded.view(rows, -1, QUAD).sum(-1)
    worst = (counts > KEPT).nonzero()
    if len(worst):
        row, quad = worst[0].tolist()
        last = min(columns, (quad + 1) * QUAD) - 1
        raise InputError(
            f"not 2:4: row {row} keeps {int(counts[row, quad])} of columns {quad * QUAD} to {last}, at most {KEPT} are "
            f"allowed ({len(worst)} such places); prune the weight to 2:4 first"
        )


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
    """[N, K / 2] the elements at the positions."""
    quads, index = x_NK.view(len(x_NK), -1, QUAD), position_NH.view(len(x_NK), -1, KEPT).long()
    return quads.gather(-1, index).flatten(1)


def spread(held_NH: Tensor, position_NH: Tensor, others_NK: Tensor | None = None) -> Tensor:
    """[N, K] inverse of `take`; the other elements are zero, or those of `others`."""
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
