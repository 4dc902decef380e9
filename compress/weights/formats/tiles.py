"""Codes in small groups whose scales and zero points are codes themselves (SpQR, arXiv 2306.03078, section 4).

N outputs, K inputs, g inputs a group, G = K / g groups, R rows a tile, T = ceil(N / R) tiles. A tile is R rows of one
group; its scales share one range, and so do its zero points. All of them are unsigned codes,

    scale = s_lowest + s_step * scale code      zero = z_lowest + z_step * zero code      value = (code - zero) * scale

computed in float32 (float64 where the ranges are), the value rounded to the dtype of the ranges. Zero points are not
whole numbers, so 0 need not be among the values.

    weight_packed   int32 [N, ceil(K bits / 32)]         codes as a bit stream (`compress.kernels.layouts.words`)
    scale_packed    int32 [ceil(N G scale_bits / 32)]    codes of the scales, [N, G] as one stream
    zero_packed     int32 [ceil(N G zero_bits / 32)]     codes of the zero points, likewise
    ranges          model dtype [T, G, 4]                s_step, s_lowest, z_step, z_lowest

Bits per weight: bits + (scale_bits + zero_bits) / g + 64 / (g R); 3.625 for 3 bits, 3 and 3, in tiles of 16 x 16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from compress.base.errors import CompressError
from compress.kernels.layouts.words import pack_rows, unpack_rows, words_of
from compress.weights.grid import Grid, encode_unsigned, working_dtype
from compress.weights.roles import Role
from compress.weights.terms import FLOATS, Format, Part, StoredTerm, check_finite

# Numbers of a tile's ranges: step and lowest value, of its scales and of its zero points.
RANGES = 4


@dataclass(frozen=True, kw_only=True)
class Tiles(Format):
    """Codes with coded scales. bits, scale_bits, zero_bits: of a code, of a scale's code and of a zero point's code.
    group_size: inputs that share a scale. tile_rows: rows whose scales, and whose zero points, share a range."""

    kind: ClassVar[str] = "tiles"
    bits: int = 3
    scale_bits: int = 3
    zero_bits: int = 3
    group_size: int = 16
    tile_rows: int = 16

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        groups = columns // self.group_size
        return {
            "weight_packed": Part((rows, words_of(columns, self.bits)), (torch.int32,), role=Role.CODES),
            "scale_packed": Part((words_of(rows * groups, self.scale_bits),), (torch.int32,), role=Role.SCALES),
            "zero_packed": Part((words_of(rows * groups, self.zero_bits),), (torch.int32,), role=Role.ZEROS),
            "ranges": Part((-(-rows // self.tile_rows), groups, RANGES), FLOATS, role=Role.SCALES),
        }

    def bits_per_weight(self, dtype: torch.dtype) -> float:
        """Bits per weight with ranges of this dtype, without the padding of words of 32 bits."""
        tile = self.group_size * self.tile_rows
        own = self.bits + (self.scale_bits + self.zero_bits) / self.group_size
        return own + RANGES * torch.finfo(dtype).bits / tile

    def problem(self, rows: int, columns: int) -> str | None:
        size = self.group_size
        return f"has {columns} inputs; groups of {size} do not fit" if columns % size else None

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        check_finite(parts, "ranges")

    def words(self, inputs: Grid | None) -> str:
        return f"w{self.bits}a16 g{self.group_size} tiles of {self.tile_rows} rows, {self.scale_bits}-bit scales"

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> "Tiled":
        groups = columns // self.group_size
        scale, zero = (
            unpack_rows(parts[name].unsqueeze(0), bits, rows * groups, signed=False).view(rows, groups)
            for name, bits in (("scale_packed", self.scale_bits), ("zero_packed", self.zero_bits))
        )
        codes = unpack_rows(parts["weight_packed"], self.bits, columns, signed=False)
        ranges = parts["ranges"].repeat_interleave(self.tile_rows, 0)[:rows]
        return Tiled(codes, scale, zero, ranges, self)

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        rows, groups = len(parts["weight_packed"]), parts["ranges"].shape[1]
        return self.read(parts, rows, groups * self.group_size).dequantize()


@dataclass(frozen=True)
class Tiled(StoredTerm):
    """A term in `Tiles`. codes uint8 [N, K]; scale, zero: codes of scales and zero points, uint8 [N, G]; ranges
    [N, G, 4], equal for all rows of a tile."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    ranges: Tensor
    format: Tiles

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        scale_NG, zero_NG = scales_and_zeros(self.scale, self.zero, self.ranges)
        groups = self.codes.view(*self.scale.shape, -1).to(scale_NG.dtype)
        values = ((groups - zero_NG.unsqueeze(-1)) * scale_NG.unsqueeze(-1)).view(self.codes.shape)
        return values.to(self.ranges.dtype).to(self.ranges.dtype if dtype is None else dtype)

    def parts(self) -> dict[str, Tensor]:
        rows, size = len(self.codes), self.format.tile_rows
        heads = self.ranges[::size]
        if not torch.equal(heads.repeat_interleave(size, 0)[:rows], self.ranges):
            raise CompressError(f"rows of a layer were decided apart in a way that cuts tiles of {size} rows")
        return {
            "weight_packed": pack_rows(self.codes, self.format.bits, signed=False),
            "scale_packed": pack_rows(self.scale.reshape(1, -1), self.format.scale_bits, signed=False)[0],
            "zero_packed": pack_rows(self.zero.reshape(1, -1), self.format.zero_bits, signed=False)[0],
            "ranges": heads.contiguous(),
        }

    def rows(self, part: slice) -> "Tiled":
        return Tiled(self.codes[part], self.scale[part], self.zero[part], self.ranges[part], self.format)

    @classmethod
    def stacked(cls, terms: Sequence["Tiled"]) -> "Tiled":
        across = zip(*((term.codes, term.scale, term.zero, term.ranges) for term in terms), strict=True)
        codes, scale, zero, ranges = (torch.cat(parts) for parts in across)
        return cls(codes, scale, zero, ranges, terms[0].format)


def scales_and_zeros(scale: Tensor, zero: Tensor, ranges: Tensor) -> tuple[Tensor, Tensor]:
    """(Scales, zero points) [...] from their codes [...] and ranges [..., 4], in the working dtype of the ranges."""
    s_step, s_lowest, z_step, z_lowest = ranges.to(working_dtype(ranges)).unbind(-1)
    return s_lowest + s_step * scale.to(s_step.dtype), z_lowest + z_step * zero.to(z_step.dtype)


class Fitted(NamedTuple):
    """One group of every row, fitted: codes [N] of its scale and zero point, the ranges [N, 4] (rounded to their stored
    dtype), and the resulting scale and zero point [N]; all in the working dtype."""

    scale_codes: Tensor
    zero_codes: Tensor
    ranges: Tensor
    scale: Tensor
    zero: Tensor


def fit_tiles(lowest_N: Tensor, highest_N: Tensor, format_: Tiles, dtype: torch.dtype) -> Fitted:
    """Fit scales and zero points to weights in [lowest, highest], for one group of every row. dtype: of stored ranges.

    Where all weights of a group are equal, their range reaches from that number to 0.
    """
    one = lowest_N == highest_N
    low = torch.where(one, lowest_N.clamp(max=0), lowest_N)
    high = torch.where(one, highest_N.clamp(min=0), highest_N)
    scale = (high - low) / (2**format_.bits - 1)
    zero = torch.where(scale > 0, -low / scale, torch.zeros_like(scale))
    scale_codes, scale_range = _second_level(scale, format_.scale_bits, format_.tile_rows, dtype)
    zero_codes, zero_range = _second_level(zero, format_.zero_bits, format_.tile_rows, dtype)
    ranges = torch.cat([scale_range, zero_range], -1)
    return Fitted(scale_codes, zero_codes, ranges, *scales_and_zeros(scale_codes, zero_codes, ranges))


def _second_level(values_N: Tensor, bits: int, tile_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(Codes [N] of numbers in the range of their tile, the range as (step, lowest) [N, 2], rounded to `dtype`)."""
    rows = len(values_N)
    short = -rows % tile_rows
    tiles = torch.cat([values_N, values_N[-1:].expand(short)]).view(-1, tile_rows)
    lowest = tiles.amin(1)
    step = (tiles.amax(1) - lowest) / (2**bits - 1)
    held = torch.stack([step, lowest], -1).to(dtype).to(values_N.dtype).repeat_interleave(tile_rows, 0)[:rows]
    return encode_unsigned(values_N, held[:, 0], -held[:, 1] / held[:, 0], bits), held
