"""Codes whose scales and zero points are codes themselves (SpQR, arXiv 2306.03078, section 4), as kernels read them.

N outputs, K inputs, g inputs a group, G = K / g groups, T tiles of R rows of one group each.

    words    int16 [N, W]       unsigned codes in planar words of 4 or 8 bits (`layouts.words.pack_planar`)
    levels   uint8 [1, N, G]    code of the scale | code of the zero point << 4, where both have at most 4 bits;
             uint8 [2, N, G]    else the codes of the scales, then those of the zero points
    ranges   float [T, 4, G]    s_step, s_lowest, z_step, z_lowest; of any dtype beside any input

    scale = s_lowest + s_step * scale code      zero = z_lowest + z_step * zero code      value = (code - zero) * scale

in fp32 (fp64 where the ranges are), the value rounded to the dtype of the ranges. Nothing is wider than it is stored
but codes that are no 4 or 8 bits: 4.75 bits a weight for 3-bit codes in tiles of 16 x 16 with 16-bit ranges.

On a CPU words lie in strips of 16 rows (`pack_strips`), and so do levels: words uint8 [S, L, 64], levels uint8
[1 or 2, S, G, 16].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.layouts.strips import NIBBLE, strips_of_words, words_of_strips
from compress.kernels.layouts.words import ROWS, STRIPS_DIMENSIONS, unpack_planar

RANGES = 4


class TileWords(NamedTuple):
    """A weight as drawn above. bits: of the words, 4 or 8. group_size in columns, tile_rows in rows."""

    words: Tensor
    levels: Tensor
    ranges: Tensor
    bits: int
    group_size: int
    tile_rows: int

    @property
    def in_strips(self) -> bool:
        """True where the words are those of strips."""
        return self.words.dim() == STRIPS_DIMENSIONS


def pack_tile_strips(weight: TileWords, columns: int) -> TileWords:
    """A weight of `columns` columns and whole strips of rows, from planar words."""
    planes, N, G = weight.levels.shape
    levels = weight.levels.view(planes, N // ROWS, ROWS, G).transpose(2, 3).contiguous()
    return weight._replace(words=strips_of_words(weight.words, weight.bits, columns), levels=levels)


def unpack_tile_strips(weight: TileWords, columns: int) -> TileWords:
    """Inverse of `pack_tile_strips`."""
    levels = weight.levels.transpose(2, 3).flatten(1, 2).contiguous()
    return weight._replace(words=words_of_strips(weight.words, weight.bits, columns), levels=levels)


def pack_levels(scale_NG: Tensor, zero_NG: Tensor, bits: int) -> Tensor:
    """uint8 codes of scales and of zero points, all of at most `bits` bits -> levels."""
    if bits <= NIBBLE:
        return (scale_NG | zero_NG << NIBBLE).unsqueeze(0)
    return torch.stack([scale_NG, zero_NG])


def unpack_levels(levels: Tensor) -> tuple[Tensor, Tensor]:
    """(codes of the scales, of the zero points), uint8 [N, G]. Inverse of `pack_levels`."""
    if len(levels) == 1:
        return levels[0] & 15, levels[0] >> NIBBLE
    return levels[0], levels[1]


def tile_scales(weight: TileWords) -> tuple[Tensor, Tensor]:
    """(scales, zero points) [N, G] in fp32, fp64 where the ranges are."""
    scale_NG, zero_NG = unpack_levels(weight.levels)
    work = torch.promote_types(weight.ranges.dtype, torch.float32)
    rows = torch.arange(len(scale_NG), device=scale_NG.device) // weight.tile_rows
    s_step, s_lowest, z_step, z_lowest = weight.ranges.to(work)[rows].unbind(1)
    return s_lowest + s_step * scale_NG, z_lowest + z_step * zero_NG


def tile_weight(weight: TileWords, columns: int) -> Tensor:
    """[N, columns] values, in the dtype of the ranges; the kernels' reference."""
    scale_NG, zero_NG = tile_scales(weight)
    codes = unpack_planar(weight.words, weight.bits, columns).view(*scale_NG.shape, -1)
    values = (codes.to(scale_NG.dtype) - zero_NG.unsqueeze(-1)) * scale_NG.unsqueeze(-1)
    return values.view(len(scale_NG), columns).to(weight.ranges.dtype)


def tile_block(weight: TileWords, first: int, last: int) -> TileWords:
    """Rows first ... last; first is the beginning of a tile."""
    assert first % weight.tile_rows == 0
    tiles = slice(first // weight.tile_rows, -(-last // weight.tile_rows))
    held = (weight.words[first:last], weight.levels[:, first:last], weight.ranges[tiles])
    return weight._replace(words=held[0], levels=held[1], ranges=held[2])
