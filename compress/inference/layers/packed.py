"""Layers on planar words: weights of 2 to 8 bits, with inputs that are not rounded, or are rounded to every token.

Codes of 2 and 3 bits are held in words of 4 bits, codes of 5 to 7 in words of 8. `lay_in_strips` changes the layout for
CPUs that read another one faster: the same three buffers then hold strips (`kernels.layouts.strips`), whose words have
three dimensions, until planar words are needed for another device or for new codes.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.inference.layers.base import QuantLinear
from compress.kernels import reference
from compress.kernels.cpu import direct
from compress.kernels.cpu.arguments import LoopWeight
from compress.kernels.cpu.layouts import lay_in_strips, planar_from_rows, why_not_lay_in_strips
from compress.kernels.division import divide
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.strips import unpack_strips
from compress.kernels.layouts.words import (
    CodeWords,
    pack_planar,
    pack_rows,
    planar_weight,
    rows_from_planar,
    unpack_planar,
    unpack_rows,
)
from compress.kernels.operators.words import words_linear
from compress.kernels.routes import Route, planar_route, strips_route, why_not_batch_invariant
from compress.weights.formats.act_order import INDEX, by_group, unsorted
from compress.weights.formats.codes import Packed
from compress.weights.number_formats import NARROW, WIDE
from compress.weights.rounding import ActivationCodes
from compress.weights.scheme import Scheme

PACKED = "weight_packed"


class WordLinear(QuantLinear):
    """Codes on a grid of 2 to 8 bits.

    container: bits of a code in its word. group_size: inputs that share a scale; -1: all of them.
    """

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__(scheme, in_features, out_features, bias)
        # Attributes of their own, since they are read at every call.
        self.container = _container(scheme)
        self.group_size = scheme.weights.group_size or -1

    @property
    def lift(self) -> int:
        """The offset from unsigned codes of the scheme's bits to codes of the container, so that middles coincide."""
        return int(2 ** (self.container - 1) - 2 ** (self.scheme.weights.bits - 1))


class PackedLinear(WordLinear):
    """Weights of 2 to 8 bits in planar words (`kernels.layouts.words.CodeWords`), stored packed or as rows of int8; the
    input is not rounded, or rounded per token.

    Inputs below 8 bits, and floats, are rounded first and then multiplied as numbers of the layer's dtype: no kernel
    multiplies such codes.

    input_group: None multiplies x as it is. -1 rounds every token of x to int8 first, with one scale; a positive number
    gives the inputs per scale. Faster on a CPU, at a small error (`kernels.operators.words`).
    """

    adds_entries = True
    takes_ranges = False
    BUFFERS: ClassVar[Mapping[str, int | None]] = {"words": 0, "scale": 1, "zero": 1}
    STRIPS = "words"
    words: Tensor
    scale: Tensor
    zero: Tensor | None
    lookup: Tensor | None = None  # the values of codes in strips, where these are no numbers

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__(scheme, in_features, out_features, bias)
        self.input_group = -1 if _integers(scheme) else None
        # The rounding of inputs that no kernel rounds.
        self.rounding_first = None if scheme.inputs is None or _integers(scheme) else ActivationCodes(scheme.inputs)

    @property
    def dtype(self) -> torch.dtype:
        scale = self._buffers["scale"]
        assert scale is not None
        return scale.dtype

    @property
    def held(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(Words, scales, zero points) in their present layout, read from `_buffers`: attribute lookup in a module
        takes time that shows in calls of small products."""
        buffers: Any = self._buffers
        return buffers["words"], buffers["scale"], buffers["zero"]

    @property
    def planar(self) -> CodeWords:
        """The weight in planar words; converted at each access where it is in strips."""
        laid = CodeWords(*self.held, self.group_size, self.container)
        return unpack_strips(laid, self.in_features) if laid.in_strips else laid

    def lay_in_strips(self) -> None:
        if self.in_strips:
            sizes = (self.out_features, self.in_features, self.container, self.group_size)
            if why_not_lay_in_strips(*sizes, self.input_group is not None):
                self.lay_in_rows()
            return
        found = lay_in_strips(self.planar, self.in_features, self.input_group is not None)
        if found is not None:
            self.words, self.scale, self.zero = found[:3]

    def lay_in_rows(self) -> None:
        if self.in_strips:
            self.words, self.scale, self.zero = self.planar[:3]

    def forward(self, x: Tensor) -> Tensor:
        words, scale, zero = self.held
        if x.dtype is not scale.dtype or self.rounding_first is not None:
            x = self._rounded(self._own(x))
        how = (self.container, self.group_size, self.input_group, self.batch_invariant, self.lookup, True)
        return words_linear(x, words, scale, zero, self._parameters["bias"], *how)

    def step_weight(self) -> LoopWeight | None:
        if self.batch_invariant or self.rounding_first is not None:
            return None
        held = LoopWeight(*self.held, self.bias, self.container, self.group_size, self.input_group, self.lookup)
        return held if direct.takes(held, self.in_features) else None

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self.rounding_first is None else self.rounding_first.fake_quantize(x)

    def with_entries(self, x: Tensor, entries: Entries, bias: Tensor | None) -> Tensor:
        weight = (*self.held, bias, self.container, self.group_size)
        return words_linear(self._rounded(x), *weight, None, False, None, False, *entries)

    def slack(self, x_MK: Tensor) -> Tensor | float:
        if self.input_group is None or self.scheme.inputs is not None:
            return 0.0
        # int8 inputs for speed alone: seven standard deviations of the error by that rounding.
        step_M1 = divide(x_MK.abs().amax(-1, keepdim=True), reference.INT8_HALF_RANGE)
        return 2 * step_M1 * self.dequantize().double().norm(dim=-1)

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        return strips_route(M, *shape, *_layout(scheme), dtype, device, _integers(scheme), not scheme.weights.symmetric)

    @classmethod
    def route_in_rows(
        cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> Route:
        """The route of a layer that stays in planar words: a summand, a head on the codes of an embedding."""
        return planar_route(M, *shape, *_layout(scheme), dtype, device, _integers(scheme), not scheme.weights.symmetric)

    @classmethod
    def why_not_batch_invariant(cls, scheme: Scheme, K: int, dtype: torch.dtype, device: torch.device) -> list[str]:
        return why_not_batch_invariant(K, *_layout(scheme), dtype, device, _integers(scheme))

    def values(self) -> Tensor:
        return planar_weight(self.planar, self.in_features)

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        words, zero_GN = self.laid_out(parts, rows.stop - rows.start)
        self.hold({"words": words, "scale": parts["weight_scale"].t(), "zero": zero_GN}, rows)

    def laid_out(self, parts: Mapping[str, Tensor], rows: int) -> tuple[Tensor, Tensor | None]:
        """(Planar words, zero points [G, N] or None) from the stored tensors of so many rows."""
        bits = self.scheme.weights.bits
        given_GN = None if self.scheme.weights.symmetric else parts["weight_zero_point"].t().contiguous()
        if not isinstance(self.scheme.codes, Packed):
            words = pack_planar(_from_signed(parts["weight"]), bits)
            return words, None if given_GN is None else _from_signed(given_GN)
        words = planar_from_rows(parts["weight_packed"], bits, self.in_features, self.container)
        return words, None if given_GN is None else unpack_rows(given_GN, bits, rows, signed=False) + self.lift

    def parts(self, rows: slice) -> dict[str, Tensor]:
        planar = self.planar
        words = planar.words[rows]
        parts = {"weight_scale": planar.scale[:, rows].t().contiguous()}
        parts |= self.stored(words, None if planar.zero is None else planar.zero[:, rows])
        if self.scheme.terms[0].needs_shape:
            parts["weight_shape"] = torch.tensor([len(words), self.in_features], device=words.device)
        return parts

    def stored(self, words: Tensor, zero_GN: Tensor | None) -> dict[str, Tensor]:
        """Inverse of `laid_out`."""
        bits, parts = self.scheme.weights.bits, {}
        if not isinstance(self.scheme.codes, Packed):
            parts["weight"] = _to_signed(unpack_planar(words, bits, self.in_features))
            if zero_GN is not None:
                parts["weight_zero_point"] = _to_signed(zero_GN).t().contiguous()
            return parts
        parts["weight_packed"] = rows_from_planar(words, bits, self.in_features, self.container)
        if zero_GN is not None:
            parts["weight_zero_point"] = pack_rows(zero_GN - self.lift, bits, signed=False).t().contiguous()
        return parts


class ActOrderLinear(PackedLinear):
    """A layer whose groups have inputs from anywhere: it holds them sorted, and sorts each x. group_of: int32 [K],
    the group of each input; order: the inputs, sorted by it."""

    stackable = False
    adds_entries = False
    BUFFERS: ClassVar[Mapping[str, int | None]] = {**PackedLinear.BUFFERS, "group_of": None, "order": None}
    group_of: Tensor
    order: Tensor

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        group = parts[INDEX]
        order = by_group(group)
        words, zero_GN = self.laid_out({**parts, PACKED: self._reordered(parts[PACKED], order)}, rows.stop - rows.start)
        scale_GN = parts["weight_scale"].t()
        self.hold({"words": words, "scale": scale_GN, "zero": zero_GN, "group_of": group, "order": order}, rows)

    def parts(self, rows: slice) -> dict[str, Tensor]:
        parts = super().parts(rows)
        return {**parts, PACKED: self._reordered(parts[PACKED], self.order.argsort()), INDEX: self.group_of}

    def _reordered(self, packed: Tensor, order: Tensor) -> Tensor:
        """Packed rows with their codes in another order."""
        bits = self.scheme.weights.bits
        codes = unpack_rows(packed, bits, self.in_features, signed=False)
        return pack_rows(codes[:, order], bits, signed=False)

    def values(self) -> Tensor:
        return unsorted(super().values(), self.group_of)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(-1, self.order))


def _layout(scheme: Scheme) -> tuple[int, int]:
    return _container(scheme), scheme.weights.group_size or -1


def _container(scheme: Scheme) -> int:
    """Bits of a code in its word: 8 for levels of a table, which are then whole numbers."""
    return NARROW if scheme.weights.bits <= NARROW and scheme.weights.levels is None else WIDE


def _integers(scheme: Scheme) -> bool:
    """True where inputs are rounded to 8 bits and multiplied as integers."""
    return scheme.inputs is not None and scheme.inputs.bits == WIDE and not scheme.inputs.floating


def _from_signed(codes: Tensor) -> Tensor:
    """int8 codes as unsigned codes, with the middle at 128."""
    return codes.contiguous().view(torch.uint8) ^ 128


def _to_signed(codes: Tensor) -> Tensor:
    """Inverse of `_from_signed`."""
    return (codes ^ 128).view(torch.int8)
