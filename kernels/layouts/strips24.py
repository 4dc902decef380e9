"""2:4 weights in strips: the layout that CPUs read fastest, in which a model holds them there.

Of every four consecutive inputs (a quad) two are kept. Sixteen rows side by side, as in `pack_strips`, with K / 4 quads
of each, padded to blocks of eight (32 columns):

    held       numbers   [S, Q, 2, 16]         of quad q what 16 rows keep first, then what they keep second
               codes     uint8 [S, L, 64]      line j: row r has bytes 4 r ... 4 r + 3, four quads of 4 bits, two of 8,
                                               first what is kept first, then what is kept second, lowest bits first
    position   int32 [S, ceil(K / 32), 16]     of each row the places of eight quads, four bits each (`pack_pairs24`)

so that what a row keeps of a quad lies half a dword apart, and one word says which inputs of eight quads it meets. It
takes the place of pairs, or of planar words, never stands beside them; both ways are exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.layouts.pairs24 import (
    KEPT,
    QUAD,
    Pairs,
    pack_positions,
    positions_of,
    spread,
    take,
    unpack_positions,
)
from compress.kernels.layouts.strips import BLOCK, BYTE, NIBBLE, by_row, by_strip
from compress.kernels.layouts.words import LINE_BYTES, ROWS, CodeWords, pack_planar, unpack_planar

NUMBERS = 16  # "bits" of what is no code


class Strips24(NamedTuple):
    """A weight of N = 16 S rows, as drawn above. scale [S, G, 16] and zero uint8 [S, G, 16] of codes, None of numbers;
    zero None: every code is centred on 2^(bits - 1). group_size in columns, -1 for one scale per output channel; bits
    4 or 8 of codes, 16 of numbers whatever their dtype."""

    held: Tensor
    position: Tensor
    scale: Tensor | None
    zero: Tensor | None
    group_size: int
    bits: int


def why_not_strips24(rows: int) -> list[str]:
    """Reasons why a weight cannot be laid out in strips; empty when it can."""
    return [f"{rows} outputs are not whole strips of {ROWS}"] if rows % ROWS else []


def _lines(held_NH: Tensor, bits: int) -> Tensor:
    """Numbers or codes of rows -> held."""
    quads = torch.nn.functional.pad(held_NH, (0, -held_NH.shape[1] % (BLOCK * KEPT // QUAD)))
    if bits == NUMBERS:
        return quads.view(-1, ROWS, quads.shape[1] // KEPT, KEPT).permute(0, 2, 3, 1).contiguous()
    of_line = 16 // bits
    by_line = quads.view(-1, ROWS, quads.shape[1] // KEPT // of_line, of_line, KEPT).permute(0, 2, 1, 4, 3)
    codes = by_line.reshape(*by_line.shape[:2], LINE_BYTES, -1)
    return codes[..., 0] | codes[..., 1] << NIBBLE if bits == NIBBLE else codes[..., 0].contiguous()


def _rows(held: Tensor, bits: int, columns: int) -> Tensor:
    """Inverse of `_lines`."""
    if bits == NUMBERS:
        found = held.permute(0, 3, 1, 2)
    else:
        codes = torch.stack([held & 15, held >> NIBBLE], -1) if bits == NIBBLE else held
        found = codes.view(*held.shape[:2], ROWS, KEPT, 16 // bits).permute(0, 2, 1, 4, 3)
    return found.reshape(len(held) * ROWS, -1)[:, : columns * KEPT // QUAD].contiguous()


def pack_pairs(weight: Pairs, code_bits: int = BYTE) -> Strips24:
    """A weight of whole strips of rows, of numbers or of codes."""
    bits = NUMBERS if weight.scale is None else code_bits
    position = weight.position.view(-1, ROWS, weight.position.shape[1]).transpose(1, 2).contiguous()
    scale, zero = (None if part is None else by_strip(part) for part in (weight.scale, weight.zero))
    return Strips24(_lines(weight.held, bits), position, scale, zero, weight.group_size, bits)


def unpack_pairs(weight: Strips24, columns: int) -> Pairs:
    """Inverse of `pack_pairs`; codes of 4 bits are bytes there."""
    position = weight.position.transpose(1, 2).flatten(0, 1).contiguous()
    scale, zero = (None if part is None else by_row(part) for part in (weight.scale, weight.zero))
    if scale is not None and zero is None:
        zero = torch.full_like(scale, 2 ** (weight.bits - 1), dtype=torch.uint8)
    return Pairs(_rows(weight.held, weight.bits, columns), position, scale, zero, weight.group_size)


def pack_words24(weight: CodeWords, columns: int) -> Strips24:
    """A weight from planar words of 4-bit codes, of which those of zero are left out."""
    codes = unpack_planar(weight.words, NIBBLE, columns)
    position = positions_of(codes != zeros_of(weight.zero, codes, columns))
    pairs = Pairs(take(codes, position), pack_positions(position), weight.scale, weight.zero, weight.group_size)
    return pack_pairs(pairs, NIBBLE)


def unpack_words24(weight: Strips24, columns: int) -> CodeWords:
    """Inverse of `pack_words24`."""
    pairs = unpack_pairs(weight, columns)
    assert pairs.scale is not None
    zero = None if weight.zero is None else pairs.zero
    codes = spread(pairs.held, unpack_positions(pairs.position, columns), zeros_of(zero, pairs.held, columns))
    return CodeWords(pack_planar(codes, NIBBLE), pairs.scale, zero, weight.group_size, NIBBLE)


def zeros_of(zero_GN: Tensor | None, like_NK: Tensor, columns: int) -> Tensor:
    """uint8 [N, columns]: for each weight the code of 4 bits that stands for 0. like: has N rows."""
    if zero_GN is None:
        middle = torch.full((1, 1), 2 ** (NIBBLE - 1), dtype=torch.uint8, device=like_NK.device)
        return middle.expand(len(like_NK), columns)
    return zero_GN.t().repeat_interleave(columns // len(zero_GN), 1)
