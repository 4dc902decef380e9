"""Layers on sparse rows: a weight of entries alone, and entries that a layer of codes adds to its own product."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from compress.inference.layers.base import QuantLinear
from compress.kernels.layouts.entries import Entries
from compress.kernels.operators.sparse import sparse_linear
from compress.kernels.routes import Route, sparse_route
from compress.weights.formats.sparse import Sparse, starts_of
from compress.weights.scheme import Scheme


class SparseLinear(QuantLinear):
    """Compressed sparse rows as they are stored: a layer of its own, or a summand whose entries another layer adds."""

    stackable = False
    BUFFERS: ClassVar[Mapping[str, int | None]] = dict.fromkeys(Entries._fields)
    KEPT = ("value",)
    row_start: Tensor
    column: Tensor
    value: Tensor

    @property
    def entries(self) -> Entries:
        return Entries(self.row_start, self.column, self.value)

    def forward(self, x: Tensor) -> Tensor:
        return sparse_linear(self._own(x), *self.entries, self.bias, self.in_features)

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        return sparse_route(M, *shape, dtype, device)

    def values(self) -> Tensor:
        return Sparse(*self.entries, self.in_features).dequantize()

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        assert rows == self.whole(), "sparse rows are not filled by rows"
        if self.value is None:
            self._dtype = parts["value"].dtype
        starts = starts_of(parts["row_count"])
        self.hold({"row_start": starts, "column": parts["column"], "value": parts["value"]}, rows)

    def parts(self, rows: slice) -> dict[str, Tensor]:
        assert rows == self.whole(), "sparse rows are not read by rows"
        shape = torch.tensor([self.out_features, self.in_features], device=self.value.device)
        return {**Sparse(*self.entries, self.in_features).parts(), "weight_shape": shape}
