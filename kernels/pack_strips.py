"""4-bit codes in strips: the layout that most CPUs read fastest, in which a model holds its weight there.

Sixteen rows side by side, 8 columns of each in every line of 64 bytes, from the first columns to the last:

    strip s, line j:   row 16 s + r has bytes 4 r ... 4 r + 3, byte b = u[8 j + b] | u[8 j + 4 + b] << 4     0 <= b < 4

so that a vector of a line has one dword of every row, scales of the rows of a strip are one vector, too, and a weight
is read once and in the order of memory. u: unsigned codes, 0 where a row is padded to 32 columns.

It takes the place of planar words (`pack.Planar`), never stands beside them; both ways are exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.pack import Planar, pack_planar, planar_words, some_rows, unpack_planar

BITS = 4
ROWS = 16
LINE = 8
LINE_BYTES = ROWS * LINE * BITS // 8
# Columns that rows are padded to.
BLOCK = 32


class Strips(NamedTuple):
    """A weight of N = 16 S rows. words uint8 [S, L, 64], L = 4 ceil(K / 32); scale [S, G, 16]; zero uint8 [S, G, 16],
    or None where every code is centred on 8; group_size in columns, -1 for one scale per output channel (G = 1)."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    group_size: int


def why_not_strips(rows: int, bits: int) -> list[str]:
    """Reasons why codes cannot be laid out in strips; empty when they can."""
    reasons = [] if bits == BITS else [f"codes are {bits} bits wide in their words, strips hold {BITS}"]
    return reasons + ([f"{rows} outputs are not whole strips of {ROWS}"] if rows % ROWS else [])


def _by_strip(part_GN: Tensor) -> Tensor:
    """[G, N] -> [S, G, 16]."""
    return part_GN.view(len(part_GN), -1, ROWS).transpose(0, 1).contiguous()


def _by_row(part: Tensor) -> Tensor:
    """[S, G, 16] -> [G, N]."""
    return part.transpose(0, 1).reshape(part.shape[1], -1)


def pack_strips(weight: Planar, columns: int) -> Strips:
    """A weight of `columns` columns, from planar words."""
    strips, lines = len(weight.words) // ROWS, -(-columns // BLOCK) * (BLOCK // LINE)
    words = torch.empty(strips, lines, LINE_BYTES, dtype=torch.uint8, device=weight.words.device)
    for part in some_rows(strips, columns * ROWS):
        codes = unpack_planar(weight.words[part.start * ROWS : part.stop * ROWS], BITS, columns)
        codes = torch.nn.functional.pad(codes, (0, lines * LINE - columns))
        low, high = codes.view(-1, ROWS, lines, 2, LINE // 2).permute(3, 0, 2, 1, 4).unbind(0)
        words[part] = (low | high << BITS).reshape(-1, lines, LINE_BYTES)
    zero = None if weight.zero is None else _by_strip(weight.zero)
    return Strips(words, _by_strip(weight.scale), zero, weight.group_size)


def unpack_strips(weight: Strips, columns: int) -> Planar:
    """Inverse of `pack_strips`."""
    strips, lines, _ = weight.words.shape
    words = torch.empty(strips * ROWS, planar_words(columns, BITS), dtype=torch.int16, device=weight.words.device)
    for part in some_rows(strips, columns * ROWS):
        held = weight.words[part].view(-1, lines, ROWS, 1, LINE // 2)
        codes = torch.cat([held & 15, held >> BITS], 3).transpose(1, 2).reshape(-1, lines * LINE)[:, :columns]
        words[part.start * ROWS : part.stop * ROWS] = pack_planar(codes, BITS)
    zero = None if weight.zero is None else _by_row(weight.zero)
    return Planar(words, _by_row(weight.scale), zero, weight.group_size, BITS)
