"""Codes of 4 and 8 bits in strips: the layout that CPUs read fastest, in which a model holds its weight there.

Sixteen rows side by side, 8 columns of each (of 8 bits: 4) in every line of 64 bytes, from the first to the last:

    strip s, line j:   row 16 s + r has bytes 4 r ... 4 r + 3   byte b = u[8 j + b] | u[8 j + 4 + b] << 4    0 <= b < 4
                                                     of 8 bits: byte b = u[4 j + b]

so that a vector of a line has one dword of every row, scales of the rows of a strip are one vector, too, and a weight
is read once and in the order of memory. u: unsigned codes, 0 where a row is padded to 32 columns.

A weight of N = 16 S rows (`layouts.words.CodeWords`) has words uint8 [S, L, 64], L = bits ceil(K / 32), scale
[S, G, 16] and zero uint8 [S, G, 16]. They take the place of planar words, never stand beside them; both ways are exact.
"""

import torch
from torch import Tensor

from compress.kernels.layouts.words import (
    LINE_BYTES,
    ROWS,
    CodeWords,
    pack_planar,
    planar_words,
    some_rows,
    unpack_planar,
)

NIBBLE, BYTE = 4, 8
# Columns that rows are padded to: as many as bits of a row in a line.
BLOCK = 32


def why_not_strips(rows: int, bits: int) -> list[str]:
    """Reasons why codes cannot be laid out in strips; empty when they can."""
    reasons = [] if bits in (NIBBLE, BYTE) else [f"codes are {bits} bits wide in their words, strips hold 4 or 8"]
    return reasons + ([f"{rows} outputs are not whole strips of {ROWS}"] if rows % ROWS else [])


def lines_of(columns: int, bits: int) -> int:
    """L, of so many columns."""
    return -(-columns // BLOCK) * bits


def by_strip(part_GN: Tensor) -> Tensor:
    """[G, N] -> [S, G, 16]."""
    return part_GN.view(len(part_GN), -1, ROWS).transpose(0, 1).contiguous()


def by_row(part: Tensor) -> Tensor:
    """[S, G, 16] -> [G, N]."""
    return part.transpose(0, 1).reshape(part.shape[1], -1)


def strips_of_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Planar words [N, ...] of `columns` columns -> words of strips [S, L, 64]."""
    strips, lines = len(words) // ROWS, lines_of(columns, bits)
    strip_words = torch.empty(strips, lines, LINE_BYTES, dtype=torch.uint8, device=words.device)
    for part in some_rows(strips, columns * ROWS):
        codes = unpack_planar(words[part.start * ROWS : part.stop * ROWS], bits, columns)
        codes = torch.nn.functional.pad(codes, (0, -columns % BLOCK)).view(-1, ROWS, lines, BYTE // bits, 4)
        low, *high = codes.permute(3, 0, 2, 1, 4).unbind(0)
        strip_words[part] = (low | high[0] << NIBBLE if high else low).reshape(-1, lines, LINE_BYTES)
    return strip_words


def words_of_strips(words: Tensor, bits: int, columns: int) -> Tensor:
    """Inverse of `strips_of_words`."""
    strips, lines, _ = words.shape
    row_words = torch.empty(strips * ROWS, planar_words(columns, bits), dtype=torch.int16, device=words.device)
    for part in some_rows(strips, columns * ROWS):
        held = words[part].view(-1, lines, ROWS, 1, 4)
        held = torch.cat([held & 15, held >> NIBBLE], 3) if bits == NIBBLE else held
        codes = held.transpose(1, 2).flatten(2).flatten(0, 1)[:, :columns]
        row_words[part.start * ROWS : part.stop * ROWS] = pack_planar(codes, bits)
    return row_words


def pack_strips(weight: CodeWords, columns: int) -> CodeWords:
    """A weight of `columns` columns, from planar words."""
    words = strips_of_words(weight.words, weight.bits, columns)
    zero = None if weight.zero is None else by_strip(weight.zero)
    return weight._replace(words=words, scale=by_strip(weight.scale), zero=zero)


def unpack_strips(weight: CodeWords, columns: int) -> CodeWords:
    """Inverse of `pack_strips`."""
    words = words_of_strips(weight.words, weight.bits, columns)
    zero = None if weight.zero is None else by_row(weight.zero)
    return weight._replace(words=words, scale=by_row(weight.scale), zero=zero)
