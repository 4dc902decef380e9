"""Layers on codes whose scales and zero points are codes themselves (SpQR)."""

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor

from compress.inference.layers.base import QuantLinear
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.tiles import (
    TileWords,
    pack_levels,
    tile_weight,
    unpack_levels,
    unpack_tile_strips,
)
from compress.kernels.layouts.words import pack_rows, planar_from_rows, rows_from_planar, unpack_rows
from compress.kernels.operators.tiles import lay_tiles_in_strips, tiles_linear
from compress.kernels.routes import Route, tiles_route
from compress.weights.formats.tiles import Tiles
from compress.weights.number_formats import NARROW, WIDE
from compress.weights.scheme import Scheme


class TilesLinear(QuantLinear):
    """Weights in `kernels.layouts.tiles.TileWords`: codes of 2 and 3 bits are held in words of 4 bits, those of 5 to 7
    in words of 8; scales and zero points stay codes, and ranges stay as stored. `lay_in_strips` lays the same buffers
    out in strips."""

    stackable = False
    adds_entries = True
    BUFFERS: ClassVar[Mapping[str, int | None]] = {"words": None, "levels": None, "ranges": None}
    STRIPS = "words"
    KEPT = ("ranges",)
    words: Tensor
    levels: Tensor
    ranges: Tensor

    @property
    def format(self) -> Tiles:
        return cast(Tiles, self.scheme.terms[0])

    @property
    def container(self) -> int:
        return NARROW if self.format.bits <= NARROW else WIDE

    @property
    def held(self) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
        """(Words, levels, ranges) in their present layout, then container bits, group size and tile rows."""
        sizes = (self.container, self.format.group_size, self.format.tile_rows)
        return self.words, self.levels, self.ranges, *sizes

    @property
    def tiles(self) -> TileWords:
        """The weight in planar words; converted at each access where it is in strips."""
        tiles = TileWords(*self.held)
        return unpack_tile_strips(tiles, self.in_features) if tiles.in_strips else tiles

    def lay_in_strips(self) -> None:
        found = None if self.in_strips else lay_tiles_in_strips(self.tiles, self.in_features)
        if found is not None:
            self.words, self.levels = found[:2]

    def lay_in_rows(self) -> None:
        if self.in_strips:
            self.words, self.levels = self.tiles[:2]

    def forward(self, x: Tensor) -> Tensor:
        return self._product(self._own(x), self.bias)

    def with_entries(self, x: Tensor, entries: Entries, bias: Tensor | None) -> Tensor:
        return self._product(x, bias, *entries)

    def _product(self, x: Tensor, bias: Tensor | None, *entries: Tensor) -> Tensor:
        words, levels, ranges, *sizes = self.held
        return tiles_linear(x, words, levels, ranges, bias, *sizes, *entries)

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        tiles = cast(Tiles, scheme.terms[0])
        bits = NARROW if tiles.bits <= NARROW else WIDE
        return tiles_route(M, *shape, bits, tiles.group_size, dtype, device)

    def values(self) -> Tensor:
        return tile_weight(self.tiles, self.in_features)

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        if self.words is None:
            self._dtype = parts["ranges"].dtype
        assert rows == self.whole(), "tiles are not filled by rows"
        format_, N, G = self.format, self.out_features, self.in_features // self.format.group_size
        scale_NG, zero_NG = (
            unpack_rows(parts[name].unsqueeze(0), bits, N * G, signed=False).view(N, G)
            for name, bits in (("scale_packed", format_.scale_bits), ("zero_packed", format_.zero_bits))
        )
        buffers = {
            "words": planar_from_rows(
                parts["weight_packed"], format_.bits, self.in_features, self.container, centred=False
            ),
            "levels": pack_levels(scale_NG, zero_NG, max(format_.scale_bits, format_.zero_bits)),
            "ranges": parts["ranges"].transpose(1, 2),
        }
        self.hold(buffers, rows)

    def parts(self, rows: slice) -> dict[str, Tensor]:
        assert rows == self.whole(), "tiles are not read by rows"
        format_ = self.format
        tiles = self.tiles
        scale_NG, zero_NG = unpack_levels(tiles.levels)
        return {
            "weight_packed": rows_from_planar(
                tiles.words, format_.bits, self.in_features, self.container, centred=False
            ),
            "scale_packed": pack_rows(scale_NG.reshape(1, -1), format_.scale_bits, signed=False)[0],
            "zero_packed": pack_rows(zero_NG.reshape(1, -1), format_.zero_bits, signed=False)[0],
            "ranges": self.ranges.transpose(1, 2).contiguous(),
            "weight_shape": torch.tensor([self.out_features, self.in_features], device=self.words.device),
        }
