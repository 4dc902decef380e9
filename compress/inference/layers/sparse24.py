"""Layers on 2:4 weights: numbers as they are stored; codes in planar words or as pairs; either in strips
(`kernels.layouts.strips24`) after `lay_in_strips` on a CPU that reads them."""

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
from compress.kernels.layouts.strips24 import NUMBERS, Strips24, unpack_pairs, unpack_words24, zeros_of
from compress.kernels.layouts.words import (
    CodeWords,
    pack_planar,
    pack_rows,
    planar_weight,
    some_rows,
    unpack_planar,
    unpack_rows,
)
from compress.kernels.operators.sparse24 import lay_in_strips24, sparse24_linear
from compress.kernels.operators.words import words_linear
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
    """Codes of which two of four are kept. Codes of 2 to 4 bits are held in planar words of 4, zeros among them; codes
    of 5 to 8 bits as pairs of bytes, 5 bits per weight. Strips hold 3 and 5 bits. The stored tensors can be restored:
    which codes a quad keeps follows from the zeros."""

    takes_codes: ClassVar[bool] = False
    BUFFERS: ClassVar[Mapping[str, int | None]] = {"codes": 0, "kept": 0, "scale": 1, "zero": 1}
    STRIPS = "kept"
    codes: Tensor
    kept: Tensor | None
    scale: Tensor
    zero: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def rows(self) -> CodeWords | Pairs:
        """The weight in planar words or as pairs; converted at each access where it is in strips."""
        if self.kept is None:
            return CodeWords(self.codes, self.scale, self.zero, self.group_size, NARROW)
        held = (self.codes, self.kept, self.scale, self.zero, self.group_size)
        if self.in_strips:
            unpack = unpack_words24 if self.container == NARROW else unpack_pairs
            return unpack(Strips24(*held, self.container), self.in_features)
        return Pairs(*held)

    def lay_in_strips(self) -> None:
        found = None if self.in_strips else lay_in_strips24(self.rows, self.in_features)
        if found is not None:
            assert found.scale is not None
            self.codes, self.kept, self.scale, self.zero = found.held, found.position, found.scale, found.zero

    def lay_in_rows(self) -> None:
        if self.in_strips:
            rows = self.rows
            assert rows.scale is not None
            self.kept = rows.position if isinstance(rows, Pairs) else None
            self.codes, self.scale, self.zero = rows[0], rows.scale, rows.zero

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            return words_linear(self._own(x), self.codes, self.scale, self.zero, self.bias, NARROW, self.group_size)
        held = (self.codes, self.kept, self.scale, self.zero, self.bias, self.group_size, self.container)
        return sparse24_linear(self._own(x), *held)

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        group = scheme.weights.group_size or -1
        if scheme.weights.bits <= NARROW:
            return sparse24_route(M, *shape, group, dtype, device, not scheme.weights.symmetric)
        return pairs24_route(M, *shape, WIDE, group, dtype, device)

    def values(self) -> Tensor:
        weight = self.rows
        return pairs_weight(weight) if isinstance(weight, Pairs) else planar_weight(weight, self.in_features)

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        count = rows.stop - rows.start
        zero = self._zero(parts, count)
        codes = torch.cat([self._laid_out(parts, zero, some) for some in some_rows(count, self.in_features)])
        kept = None if self.container == NARROW else parts["position"]
        self.hold({"codes": codes, "kept": kept, "scale": parts["weight_scale"].t(), "zero": zero}, rows)

    def _zero(self, parts: Mapping[str, Tensor], rows: int) -> Tensor | None:
        """Zero points uint8 [G, N]; None where the kernel takes the middle of the codes."""
        grid = self.scheme.weights
        if not grid.symmetric:
            return unpack_rows(parts["weight_zero_point"].t().contiguous(), grid.bits, rows, signed=False) + self.lift
        if self.container == NARROW:
            return None
        groups = parts["weight_scale"].t()
        return torch.full(groups.shape, 2 ** (WIDE - 1), dtype=torch.uint8, device=groups.device)

    def _laid_out(self, parts: Mapping[str, Tensor], zero_GN: Tensor | None, rows: slice) -> Tensor:
        """Buffer `codes` of some rows, from stored tensors."""
        bits = self.scheme.weights.bits
        codes = unpack_rows(parts["weight_packed"][rows], bits, half(self.in_features), signed=False) + self.lift
        if self.container == WIDE:
            return codes
        at = unpack_positions(parts["position"][rows], self.in_features)
        zero_GN = None if zero_GN is None else zero_GN[:, rows]
        return pack_planar(spread(codes, at, zeros_of(zero_GN, codes, self.in_features)), NARROW)

    def parts(self, rows: slice) -> dict[str, Tensor]:
        bits, count = self.scheme.weights.bits, rows.stop - rows.start
        weight = self.rows
        assert weight.scale is not None
        parts = {"weight_scale": weight.scale[:, rows].t().contiguous()}
        if not self.scheme.weights.symmetric:
            assert weight.zero is not None
            zero_GN = weight.zero[:, rows] - self.lift
            parts["weight_zero_point"] = pack_rows(zero_GN, bits, signed=False).t().contiguous()
        first = rows.start
        some = [slice(first + s.start, first + s.stop) for s in some_rows(count, self.in_features)]
        blocks = [self._stored(weight, each) for each in some]
        parts["weight_packed"], parts["position"] = (torch.cat(each) for each in zip(*blocks, strict=True))
        parts["weight_shape"] = torch.tensor([count, self.in_features], device=weight.scale.device)
        return parts

    def _stored(self, weight: CodeWords | Pairs, rows: slice) -> tuple[Tensor, Tensor]:
        """(Packed codes, words of positions) of some rows."""
        if isinstance(weight, Pairs):
            codes, position = weight.held[rows], weight.position[rows]
        else:
            dense = unpack_planar(weight.words[rows], NARROW, self.in_features)
            zero_GN = None if weight.zero is None else weight.zero[:, rows]
            at = positions_of(dense != zeros_of(zero_GN, dense, self.in_features))
            codes, position = take(dense, at), pack_positions(at)
        return pack_rows(codes - self.lift, self.scheme.weights.bits, signed=False), position
