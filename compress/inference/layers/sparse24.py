"""Layers on 2:4 weights: numbers as they are stored; codes in words (`kernels.layouts.words24`) or as pairs; either in
strips (`kernels.layouts.strips24`) after `lay_in_strips` on a CPU that reads them."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from compress.inference.layers.base import QuantLinear
from compress.inference.layers.packed import WordLinear
from compress.kernels.layouts.pairs24 import (
    Pairs,
    pack_positions,
    pairs_weight,
    positions_of,
    spread,
    take,
    unpack_positions,
)
from compress.kernels.layouts.strips24 import NUMBERS, Strips24, unpack_pairs, unpack_words24
from compress.kernels.layouts.words import pack_rows, some_rows, unpack_rows
from compress.kernels.layouts.words24 import Words24, pack24, sparse24_weight, unpack24
from compress.kernels.operators.sparse24 import lay_in_strips24, sparse24_linear
from compress.kernels.routes import Route, pairs24_route, sparse24_route
from compress.weights.formats.sparse24 import half
from compress.weights.number_formats import NARROW, WIDE
from compress.weights.scheme import Scheme


class Sparse24Linear(QuantLinear):
    """Numbers of which two of four are kept, held as they are stored."""

    takes_codes: ClassVar[bool] = False
    BUFFERS: ClassVar[Mapping[str, int | None]] = {"value": 0, "position": 0}
    STRIPS = "position"
    value: Tensor
    position: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def pairs(self) -> Pairs:
        """The weight as pairs; converted at each access where it is in strips."""
        if self.in_strips:
            laid = Strips24(self.value, self.position, None, None, -1, NUMBERS)
            return unpack_pairs(laid, self.in_features)
        return Pairs(self.value, self.position, None, None, -1)

    def lay_in_strips(self) -> None:
        found = None if self.in_strips else lay_in_strips24(self.pairs, self.in_features)
        if found is not None:
            self.value, self.position = found[:2]

    def lay_in_rows(self) -> None:
        if self.in_strips:
            self.value, self.position = self.pairs[:2]

    def forward(self, x: Tensor) -> Tensor:
        return sparse24_linear(self._own(x), self.value, self.position, None, None, self.bias, -1, NUMBERS)

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        return pairs24_route(M, *shape, NUMBERS, -1, dtype, device)

    def values(self) -> Tensor:
        return pairs_weight(self.pairs)

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        self.hold({name: parts[name] for name in self.BUFFERS}, rows)

    def parts(self, rows: slice) -> dict[str, Tensor]:
        pairs = self.pairs
        value, position = pairs.held[rows], pairs.position[rows]
        shape = torch.tensor([len(value), self.in_features], device=value.device)
        return {"value": value, "position": position, "weight_shape": shape}


class PackedSparse24Linear(WordLinear):
    """Codes of which two of four are kept. Codes of 2 to 4 bits are held in the words of `kernels.layouts.words24`, 3
    bits per weight; codes of 5 to 8 bits as pairs of bytes, 5 bits per weight. Both keep exactly two codes of each
    quad, so that the stored tensors can be restored."""

    takes_codes: ClassVar[bool] = False
    BUFFERS: ClassVar[Mapping[str, int | None]] = {"codes": 0, "kept": 0, "scale": 1, "zero": 1}
    STRIPS = "kept"
    codes: Tensor
    kept: Tensor
    scale: Tensor
    zero: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def rows(self) -> Words24 | Pairs:
        """The weight in words or as pairs; converted at each access where it is in strips."""
        held = (self.codes, self.kept, self.scale, self.zero, self.group_size)
        if self.in_strips:
            unpack = unpack_words24 if self.container == NARROW else unpack_pairs
            return unpack(Strips24(*held, self.container), self.in_features)
        return Words24(*held) if self.container == NARROW else Pairs(*held)

    def lay_in_strips(self) -> None:
        found = None if self.in_strips else lay_in_strips24(self.rows, self.in_features)
        if found is not None:
            assert found.scale is not None
            self.codes, self.kept, self.scale, self.zero = found.held, found.position, found.scale, found.zero

    def lay_in_rows(self) -> None:
        if self.in_strips:
            self.codes, self.kept, scale, self.zero, _ = self.rows
            assert scale is not None
            self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        held = (self.codes, self.kept, self.scale, self.zero, self.bias, self.group_size, self.container)
        return sparse24_linear(self._own(x), *held)

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        group = scheme.weights.group_size or -1
        if scheme.weights.bits <= NARROW:
            return sparse24_route(M, *shape, group, dtype, device)
        return pairs24_route(M, *shape, WIDE, group, dtype, device)

    def values(self) -> Tensor:
        weight = self.rows
        return sparse24_weight(weight, self.in_features) if isinstance(weight, Words24) else pairs_weight(weight)

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        count = rows.stop - rows.start
        blocks = [self._laid_out(parts, some) for some in some_rows(count, self.in_features)]
        codes, kept = (torch.cat(each) for each in zip(*blocks, strict=True))
        found = {"codes": codes, "kept": kept, "scale": parts["weight_scale"].t(), "zero": self._zero(parts, count)}
        self.hold(found, rows)

    def _zero(self, parts: Mapping[str, Tensor], rows: int) -> Tensor | None:
        """Zero points uint8 [G, N]; None where the kernel takes the middle of the codes."""
        grid = self.scheme.weights
        if not grid.symmetric:
            return unpack_rows(parts["weight_zero_point"].t().contiguous(), grid.bits, rows, signed=False) + self.lift
        if self.container == NARROW:
            return None
        groups = parts["weight_scale"].t()
        return torch.full(groups.shape, 2 ** (WIDE - 1), dtype=torch.uint8, device=groups.device)

    def _laid_out(self, parts: Mapping[str, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
        """(Buffer `codes`, buffer `kept`) of some rows, from stored tensors."""
        bits, position = self.scheme.weights.bits, parts["position"][rows]
        codes = unpack_rows(parts["weight_packed"][rows], bits, half(self.in_features), signed=False) + self.lift
        if self.container == WIDE:
            return codes, position
        at = unpack_positions(position, self.in_features)
        return pack24(spread(codes, at), spread(torch.ones_like(codes, dtype=torch.bool), at))

    def parts(self, rows: slice) -> dict[str, Tensor]:
        bits, count = self.scheme.weights.bits, rows.stop - rows.start
        all_codes, all_kept, scale, zero, _ = self.rows
        assert scale is not None
        codes, kept = all_codes[rows], all_kept[rows]
        parts = {"weight_scale": scale[:, rows].t().contiguous()}
        if not self.scheme.weights.symmetric:
            assert zero is not None
            zero_GN = zero[:, rows] - self.lift
            parts["weight_zero_point"] = pack_rows(zero_GN, bits, signed=False).t().contiguous()
        blocks = [self._stored(codes[some], kept[some]) for some in some_rows(count, self.in_features)]
        parts["weight_packed"], parts["position"] = (torch.cat(each) for each in zip(*blocks, strict=True))
        parts["weight_shape"] = torch.tensor([count, self.in_features], device=codes.device)
        return parts

    def _stored(self, codes: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Inverse of `_laid_out`."""
        if self.container == NARROW:
            dense, mask = unpack24(codes, kept, self.in_features)
            position = positions_of(mask)
            codes, kept = take(dense, position), pack_positions(position)
        return pack_rows(codes - self.lift, self.scheme.weights.bits, signed=False), kept
