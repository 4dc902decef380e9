"""Layers on ternary and binary weights: stored in 1.6 bits or 1 bit, held in planar words of 4 bits for the kernels.

No kernel reads the stored bytes, so these weights take 4 bits each in memory, like those of 2 and 3 bits, and run as
fast as those of 4 bits.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from compress.inference.layers.packed import PackedLinear
from compress.kernels.layouts.words import pack_planar, planar_words, some_rows, unpack_planar
from compress.weights.formats.ternary import FewLevelCodes
from compress.weights.number_formats import NARROW

MIDDLE = 2 ** (NARROW - 1)


class FewLevelsLinear(PackedLinear):
    """Weights of two or three levels in planar words, with code 0 at the middle; converted some rows at a time."""

    @property
    def format(self) -> FewLevelCodes:
        return cast(FewLevelCodes, self.scheme.terms[0])

    def laid_out(self, parts: Mapping[str, Tensor], rows: int) -> tuple[Tensor, Tensor | None]:
        packed = parts["weight_packed"]
        words = torch.empty(rows, planar_words(self.in_features, NARROW), dtype=torch.int16, device=packed.device)
        for chunk in some_rows(rows, self.in_features):
            codes = self.format.unpack(packed[chunk], self.in_features)
            words[chunk] = pack_planar((codes + MIDDLE).to(torch.uint8), NARROW)
        return words, None

    def stored(self, words: Tensor, zero_GN: Tensor | None) -> dict[str, Tensor]:
        codes = (
            unpack_planar(words[chunk], NARROW, self.in_features) for chunk in some_rows(len(words), self.in_features)
        )
        packed = [self.format.pack(part.to(torch.int8) - MIDDLE) for part in codes]
        return {"weight_packed": torch.cat(packed)}
