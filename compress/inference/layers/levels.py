"""Layers on E2M1 and E2M3 with powers of two: held in planar words of 8 bits, as integers, for the kernels.

A level is a whole number of the least one (a half of E2M1, an eighth of E2M3), from -12 to 12 or from -60 to 60, so
that int8 holds it, and the scale times that least level is a power of two, too: nothing is rounded. Weights take 8 bits
each in memory, and run as fast as those of 8 bits. Codes of E2M1 are held in 4 bits where they are looked up as they
are read (`kernels.operators.words`): in strips on a CPU, in planar words on a GPU. Stored exponents are held beside
them, because 16-bit floats have fewer. A code of -0 is saved as that of 0.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from compress.inference.layers.base import QuantLinear
from compress.inference.layers.packed import PackedLinear
from compress.kernels import reference
from compress.kernels.cpu import direct
from compress.kernels.cpu.arguments import LoopWeight
from compress.kernels.cpu.layouts import why_not_levels
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.strips import pack_strips, unpack_strips
from compress.kernels.layouts.words import CodeWords, pack_planar, planar_words, some_rows, unpack_planar
from compress.kernels.operators.words import words_linear
from compress.kernels.routes import Route, levels_route
from compress.weights.formats.levels import LevelCodes, NF4Float32
from compress.weights.grid import Grid
from compress.weights.levels import Levels
from compress.weights.number_formats import NARROW, WIDE
from compress.weights.scale_numbers import FLOAT8, of_e8m0
from compress.weights.scheme import Scheme
from compress.weights.terms import FLOATS

MIDDLE = 2 ** (WIDE - 1)


class LevelsLinear(PackedLinear):
    """Weights of a table whose levels are whole numbers of the least one; converted some rows at a time."""

    BUFFERS: ClassVar[Mapping[str, int | None]] = {**PackedLinear.BUFFERS, "exponents": 0}
    exponents: Tensor

    @property
    def format(self) -> LevelCodes:
        return cast(LevelCodes, self.scheme.terms[0])

    @property
    def levels(self) -> Levels:
        found = self.format.grid.levels
        assert found is not None
        return found

    def lay_in_strips(self) -> None:
        if self.lookup is not None and self.input_group is not None:
            self.lay_in_rows()
        if self.lookup is not None:
            return
        sizes = (self.out_features, self.in_features, self.group_size)
        if self.in_strips or self.input_group is not None or not _in_nibbles(self.scheme):
            super().lay_in_strips()
        elif self.device.type == "cuda" or (self.device.type == "cpu" and not why_not_levels(*sizes)):
            self._look_up()

    def _look_up(self) -> None:
        """Hold codes of 4 bits, on a CPU in strips; a table has the whole number of each."""
        planar = self.planar
        size = (len(planar.words), planar_words(self.in_features, NARROW))
        codes = torch.empty(size, dtype=torch.int16, device=self.device)
        for chunk in some_rows(len(codes), self.in_features):
            codes[chunk] = pack_planar(self._codes(planar.words[chunk]), NARROW)
        self.words, self.container = codes, NARROW
        self.lookup = _lookup_of(self.levels, step_of(self.levels), 1.0, self.device)
        if self.device.type == "cpu":
            laid = pack_strips(planar._replace(words=codes, bits=NARROW), self.in_features)
            self.words, self.scale = laid.words, laid.scale

    @property
    def planar(self) -> CodeWords:
        if self.lookup is None:
            return super().planar
        code_words = _planar_codes(self)
        device = code_words.words.device
        words = torch.empty(
            len(code_words.words), planar_words(self.in_features, WIDE), dtype=torch.int16, device=device
        )
        raised = raised_by_code(self.levels).to(device)
        for chunk in some_rows(len(words), self.in_features):
            codes = unpack_planar(code_words.words[chunk], NARROW, self.in_features)
            words[chunk] = pack_planar(raised[codes.int()], WIDE)
        return code_words._replace(words=words, bits=WIDE)

    def lay_in_rows(self) -> None:
        if self.in_strips or self.lookup is not None:
            self.words, self.scale, _ = self.planar[:3]
            self.container, self.lookup = WIDE, None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.lookup is not None and self.device.type == "cuda":
            self.lookup = self.lookup.to(self.device)
        elif not self.in_strips:
            self.lay_in_rows()  # codes in planar words are looked up on a GPU alone
        return self

    def with_entries(self, x: Tensor, entries: Entries, bias: Tensor | None) -> Tensor:
        self.lay_in_rows()  # the loops over strips add entries to numbers alone
        return super().with_entries(x, entries, bias)

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        if _in_nibbles(scheme) and device.type in ("cpu", "cuda"):
            return levels_route(M, *shape, scheme.weights.group_size or -1, dtype, device)
        return super().route(scheme, M, shape, dtype, device)

    def _codes(self, words: Tensor) -> Tensor:
        """uint8, the codes of planar words of whole numbers."""
        whole = unpack_planar(words, WIDE, self.in_features).float() - MIDDLE
        return self.levels.codes(whole * step_of(self.levels))

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        exponents = parts["weight_scale"]
        dtype = torch.get_default_dtype() if self.exponents is None else self.dtype
        scale_GN = (of_e8m0(exponents) * step_of(self.levels)).to(dtype).t()
        words, _ = self.laid_out(parts, rows.stop - rows.start)
        self.hold({"words": words, "scale": scale_GN, "zero": None, "exponents": exponents}, rows)

    def laid_out(self, parts: Mapping[str, Tensor], rows: int) -> tuple[Tensor, Tensor | None]:
        packed = parts[self.format.packed]
        words = torch.empty(rows, planar_words(self.in_features, WIDE), dtype=torch.int16, device=packed.device)
        raised = raised_by_code(self.levels).to(packed.device)
        for chunk in some_rows(rows, self.in_features):
            codes = self.format.unpack(packed[chunk], self.in_features)
            words[chunk] = pack_planar(raised[codes.int()], WIDE)
        return words, None

    def parts(self, rows: slice) -> dict[str, Tensor]:
        words, exponents = self.planar.words[rows], self.exponents[rows]
        return {"weight_scale": exponents.clone(), **self.stored(words, None)}

    def stored(self, words: Tensor, zero_GN: Tensor | None) -> dict[str, Tensor]:
        packed = [self.format.pack(self._codes(words[chunk])) for chunk in some_rows(len(words), self.in_features)]
        return {self.format.packed: torch.cat(packed)}


class TableLinear(QuantLinear):
    """Weights of a table of 16 levels in words of 4 bits, with scales of any kind: NVFP4, whose scales are stored in
    float8 beside a global one, NF4 and IQ4_NL. They are multiplied in strips on a CPU and in planar words on a GPU;
    elsewhere their values are.

    scale: the local ones, in a dtype that has all float8 numbers. divisor: the global scale as stored.
    """

    stackable: ClassVar[bool] = False
    takes_codes: ClassVar[bool] = False
    BUFFERS: ClassVar[Mapping[str, int | None]] = {"words": 0, "scale": 1, "divisor": None}
    STRIPS = "words"
    KEPT = ("scale", "divisor")
    words: Tensor
    scale: Tensor
    divisor: Tensor | None

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__(scheme, in_features, out_features, bias)
        group = self.format.on.group_size
        assert group is not None
        self.group_size = group
        self.lookup: Tensor | None = None  # where codes are looked up
        self.signed = self.format.grid.type == "float"

    @property
    def format(self) -> LevelCodes:
        return cast(LevelCodes, self.scheme.terms[0])

    def _lasting(self, name: str, held: Tensor) -> torch.dtype:
        """Scales that are stored in the dtype of the model follow it, and those of float8, which every dtype has."""
        return held.dtype if name == "divisor" or "weight_scale" in self.format.as_bytes else self._dtype

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        assert rows == self.whole(), "tables of levels are not filled by rows"
        stored, form = parts["weight_scale"], self.format
        if self.words is None and stored.dtype in FLOATS:
            self._dtype = stored.dtype
        scale = stored.to(self._dtype) if stored.dtype == FLOAT8 else stored
        words = torch.empty(rows.stop, planar_words(self.in_features, NARROW), dtype=torch.int16, device=stored.device)
        for chunk in some_rows(rows.stop, self.in_features):
            words[chunk] = pack_planar(form.unpack(parts[form.packed][chunk], self.in_features), NARROW)
        self.hold({"words": words, "scale": scale.t(), "divisor": parts.get(form.of_weights)}, rows)
        self._look_up_in_rows()

    def _look_up_in_rows(self) -> None:
        """Make the table for codes in planar words, where there is a kernel for these."""
        if self.words is not None and not self.in_strips:
            self.lookup = self._table() if self.device.type == "cuda" else None

    def _table(self) -> Tensor:
        levels = self.format.grid.levels
        assert levels is not None
        # Whole numbers where they are all: a CPU finds these by a shuffle of bytes, and bfloat16 has them.
        step = 1.0 if self.divisor is None else step_of(levels)
        factor = 1.0 if self.divisor is None else 1 / self.format.global_scale(self.divisor)
        return _lookup_of(levels, step, step * factor, self.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._look_up_in_rows()
        return self

    def parts(self, rows: slice) -> dict[str, Tensor]:
        assert rows == self.whole(), "tables of levels are not read by rows"
        form, planar = self.format, self.planar
        packed = [
            form.pack(unpack_planar(planar.words[chunk], NARROW, self.in_features))
            for chunk in some_rows(len(planar.words), self.in_features)
        ]
        scale = planar.scale.t().contiguous()
        parts = {"weight_scale": scale.to(FLOAT8) if form.grid.scales == "e4m3" else scale}
        parts[form.packed] = torch.cat(packed)
        return parts if self.divisor is None else {**parts, form.of_weights: self.divisor.clone()}

    @property
    def planar(self) -> CodeWords:
        """Codes in planar words and local scales [G, N]; converted at each access where they are in strips."""
        return _planar_codes(self)

    def lay_in_strips(self) -> None:
        sizes = (self.out_features, self.in_features, self.group_size)
        if self.in_strips or self.device.type != "cpu" or why_not_levels(*sizes):
            return
        self.words, self.scale = pack_strips(self.planar, self.in_features)[:2]
        self.lookup = self._table()

    def lay_in_rows(self) -> None:
        if self.in_strips:
            self.words, self.scale = self.planar[:2]
            self.lookup = None

    def forward(self, x: Tensor) -> Tensor:
        if self.lookup is None:
            return nn.functional.linear(self._own(x), self.dequantize(), self.bias)
        # Read from `_buffers`, as in `PackedLinear.held`.
        buffers: Any = self._buffers
        x = x if x.dtype is self._dtype else self._own(x)
        how = (self._parameters["bias"], NARROW, self.group_size, None, False, self.lookup, self.signed)
        return words_linear(x, buffers["words"], buffers["scale"], None, *how)

    def step_weight(self) -> LoopWeight | None:
        held = LoopWeight(self.words, self.scale, None, self.bias, NARROW, self.group_size, None, self.lookup)
        return held if self.lookup is not None and direct.takes(held, self.in_features) else None

    def values(self) -> Tensor:
        return self.format.read(self.parts(self.whole()), self.out_features, self.in_features).dequantize()

    def slack(self, x_MK: Tensor) -> Tensor | float:
        """Values are rounded to the dtype of the layer in one way or another: levels before they are scaled, or both
        together."""
        return reference.weight_rounding(x_MK, self.values().double(), self.dtype)

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        if device.type not in ("cpu", "cuda"):
            kind = scheme.terms[0].kind
            return Route("torch", (f"{kind} has no kernel on {device.type}: its values are multiplied",))
        scales = torch.float32 if isinstance(scheme.terms[0], NF4Float32) else dtype
        return levels_route(M, *shape, scheme.weights.group_size or -1, dtype, device, scales)


def _planar_codes(layer: LevelsLinear | TableLinear) -> CodeWords:
    """The codes of a layer in planar words of 4 bits; converted where they are in strips."""
    held = (layer.words, layer.scale, None, layer.group_size, NARROW)
    return unpack_strips(CodeWords(*held), layer.in_features) if layer.in_strips else CodeWords(*held)


def _lookup_of(levels: Levels, step: float, factor: float, device: torch.device) -> Tensor:
    """float32 [17]: levels in units of a step, and a factor of all of them."""
    return torch.tensor([*(value / step for value in levels.values), factor], device=device)


def layer_of_levels(grid: Grid) -> type[LevelsLinear | TableLinear] | None:
    """The layer for codes on a grid of levels; None where no kernel multiplies them."""
    levels = grid.levels
    if levels is None:
        return None
    if grid.scales == "e8m0" and levels.largest / step_of(levels) < MIDDLE:
        return LevelsLinear
    return TableLinear if grid.bits == NARROW else None


def _in_nibbles(scheme: Scheme) -> bool:
    return scheme.weights.bits == NARROW


@cache
def step_of(levels: Levels) -> float:
    """The least level above 0, of which all are whole numbers."""
    return min(value for value in levels.values if value > 0)


@cache
def raised_by_code(levels: Levels) -> Tensor:
    """uint8, the whole number of each code, with 0 at the middle."""
    return torch.tensor([round(value / step_of(levels)) + MIDDLE for value in levels.values], dtype=torch.uint8)
