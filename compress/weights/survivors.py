"""A pruned weight between its mask and its decision: the values that stay, beside exact zeros."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from compress.weights.decision import Decision, Figures
from compress.weights.formats.dense import dense
from compress.weights.matrix import Term


@dataclass(frozen=True)
class Survivors(Term):
    """A pruned weight. values [N, K], in the stored dtype; kept: bool [N, K], True for values that stay."""

    values: Tensor
    kept: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.values if dtype is None else self.values.to(dtype)

    def rows(self, part: slice) -> Self:
        return type(self)(self.values[part], self.kept[part])

    @classmethod
    def stacked(cls, terms: Sequence[Self]) -> Self:
        return cls(torch.cat([t.values for t in terms]), torch.cat([t.kept for t in terms]))

    def decision(self, figures: Figures) -> Decision:
        """The decision for the layer: a dense weight with its mask."""
        return Decision(dense(self.values), figures, kept=self.kept)


def survivors(weight_NK: Tensor, kept_NK: Tensor, dtype: torch.dtype) -> Survivors:
    """A weight with exact zeros where it is not kept."""
    return Survivors(torch.where(kept_NK, weight_NK, 0.0).to(dtype), kept_NK)
