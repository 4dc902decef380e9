"""Layers on E2M1 and E2M3 with powers of two: held in planar words of 8 bits, as integers, for the kernels.

A level is a whole number of the least one (a half of E2M1, an eighth of E2M3), from -12 to 12 or from -60 to 60, so
that int8 holds it, and the scale times that least level is a power of two, too: nothing is rounded. Weights take 8 bits
each in memory, and run as fast as those of 8 bits. Stored exponents are held beside them, because 16-bit floats have
fewer. A code of -0 is saved as that of 0.
"""

from collections.abc import Mapping
from functools import cache
from typing import ClassVar, cast

import torch
from torch import Tensor

from compress.kernels.layouts.words import pack_planar, planar_words, some_rows, unpack_planar
from compress.runtime.layers.packed import PackedLinear
from compress.weights.formats.levels import LevelCodes
from compress.weights.levels import Levels
from compress.weights.scales import of_e8m0
from compress.weights.scheme import WIDE

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
        step, packed = step_of(self.levels), []
        for chunk in some_rows(len(words), self.in_features):
            whole = unpack_planar(words[chunk], WIDE, self.in_features).float() - MIDDLE
            packed.append(self.format.pack(self.levels.codes(whole * step)))
        return {self.format.packed: torch.cat(packed)}


@cache
def step_of(levels: Levels) -> float:
    """The least level above 0, of which all are whole numbers."""
    return min(value for value in levels.values if value > 0)


@cache
def raised_by_code(levels: Levels) -> Tensor:
    """uint8, the whole number of each code, with 0 at the middle."""
    return torch.tensor([round(value / step_of(levels)) + MIDDLE for value in levels.values], dtype=torch.uint8)
