"""Layers on the codes of GPTQ and AWQ checkpoints: planar words, stored in the words of these layouts."""

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor

from compress.inference.layers.packed import PackedLinear
from compress.kernels.layouts.words import pack_planar, unpack_planar
from compress.weights.formats.gptq_awq import GPTQActOrder, InOrderOfGroups, WordsFormat, by_group, unsorted
from compress.weights.grid import Quantized


class ForeignWordsLinear(PackedLinear):
    """A layer whose groups lie side by side."""

    @property
    def words_format(self) -> WordsFormat:
        """The format of the stored tensors."""
        return cast(WordsFormat, self.scheme.terms[0])

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        self.hold(self._laid(self.words_format.quantized(parts, rows.stop - rows.start, self.in_features)), rows)

    def parts(self, rows: slice) -> dict[str, Tensor]:
        return self.words_format.tensors(self._quantized(rows))

    def _laid(self, held: Quantized) -> dict[str, Tensor | None]:
        """The buffers of codes. These are signed; those of the container have its middle for 0."""
        middle = 2 ** (self.container - 1)
        zero = None if held.zero_point is None else held.zero_point.t().contiguous().view(torch.uint8) + middle
        words = pack_planar(held.codes.contiguous().view(torch.uint8) + middle, self.container)
        return {"words": words, "scale": held.scale.t(), "zero": zero}

    def _quantized(self, rows: slice) -> Quantized:
        """Inverse of `_laid`, for some rows."""
        planar, middle = self.planar, 2 ** (self.container - 1)
        codes = (unpack_planar(planar.words[rows], self.container, self.in_features) - middle).view(torch.int8)
        zero = None if planar.zero is None else (planar.zero[:, rows].t().contiguous() - middle).view(torch.int8)
        return Quantized(codes, planar.scale[:, rows].t().contiguous(), zero, self.scheme.weights)


class ActOrderLinear(ForeignWordsLinear):
    """A layer whose groups have inputs from anywhere: it holds them sorted, and sorts each x. group_of: int32 [K],
    the group of each input; order: the inputs, sorted by it."""

    stackable = False
    adds_entries = False
    BUFFERS: ClassVar[Mapping[str, int | None]] = {**PackedLinear.BUFFERS, "group_of": None, "order": None}
    group_of: Tensor
    order: Tensor

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        form = cast(GPTQActOrder, self.words_format)
        codes = form.sorted(parts, rows.stop - rows.start, self.in_features)
        group = parts["g_idx"]
        self.hold({**self._laid(codes), "group_of": group, "order": by_group(group)}, rows)

    def parts(self, rows: slice) -> dict[str, Tensor]:
        form = cast(GPTQActOrder, self.words_format)
        return InOrderOfGroups(self._quantized(rows), self.group_of, form).parts()

    def values(self) -> Tensor:
        return unsorted(super().values(), self.group_of)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(-1, self.order))
