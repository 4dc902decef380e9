"""A few weights as compressed sparse rows: outliers, added to a term that holds the rest.

N outputs, K inputs, E entries.

    row_count   uint8 [N]           entries of each row; int16 or int32 where one has more
    column      int16 [E]           rising within a row; int32 where K is above 32768
    value       model dtype [E]     the value added at that place

16 bits for a column and 16 for a value: 32 bits an entry, and 8 more per row. In a sum the value is added to those of
the other terms at that place, so that the weight is exact where they are zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.kernels import reference
from compress.weights.grid import Grid
from compress.weights.roles import Role
from compress.weights.terms import FLOATS, Format, Part, StoredTerm, check_finite

# Columns that fit into int16.
SHORT_COLUMNS = 2**15
# Dtypes for the number of entries of a row; the first that holds all numbers is used.
COUNTS = (torch.uint8, torch.int16, torch.int32)


@dataclass(frozen=True, kw_only=True)
class SparseRows(Format):
    """Compressed sparse rows. entries: the number E of stored weights."""

    kind: ClassVar[str] = "sparse-rows"
    entries: int

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "row_count": Part((rows,), COUNTS, role=Role.PLACES),
            "column": Part((self.entries,), (column_dtype(columns),), role=Role.PLACES),
            "value": Part((self.entries,), FLOATS, role=Role.OUTLIERS),
        }

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> "Sparse":
        return Sparse(starts_of(parts["row_count"]), parts["column"], parts["value"], columns)

    def product(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        return reference.sparse_rows(x, starts_of(parts["row_count"]), parts["column"], parts["value"])

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        check_finite(parts, "value")
        count, column = parts["row_count"].long(), parts["column"].long()
        if bool((count < 0).any()):
            raise CheckpointError(f"row_count goes down to {count.min()}; a row has no less than 0 entries")
        if int(count.sum()) != self.entries:
            raise CheckpointError(f"row_count is of {int(count.sum())} entries; there are {self.entries} values")
        if bool(((column < 0) | (column >= columns)).any()):
            raise CheckpointError(f"column goes from {column.min()} to {column.max()}; there are {columns} inputs")
        place = rows_of(starts_of(count)) * columns + column
        if bool((place.diff() <= 0).any()):
            raise CheckpointError("column does not rise within each row: there are repeated or unsorted entries")

    def words(self, inputs: Grid | None) -> str:
        return f"{self.entries} exact"


@dataclass(frozen=True)
class Sparse(StoredTerm):
    """Sparse rows as tensors. row_start int32 [N + 1]: entries of row n are row_start[n] to row_start[n + 1]."""

    row_start: Tensor
    column: Tensor
    value: Tensor
    inputs: int

    @property
    def format(self) -> SparseRows:  # type: ignore[override]
        return SparseRows(entries=len(self.value))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.row_start) - 1, self.inputs

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self.value.new_zeros(self.shape)
        values[rows_of(self.row_start), self.column.long()] = self.value
        return values if dtype is None else values.to(dtype)

    def parts(self) -> dict[str, Tensor]:
        return {"row_count": counts_of(self.row_start), "column": self.column, "value": self.value}

    def rows(self, part: slice) -> "Sparse":
        rows, _ = self.shape
        chosen = torch.arange(rows, device=self.column.device)[part]
        counts = self.row_start.diff()[chosen]
        first = torch.repeat_interleave(self.row_start[chosen] - starts_of(counts)[:-1], counts)
        entries = first.long() + torch.arange(len(first), device=first.device)
        return Sparse(starts_of(counts), self.column[entries], self.value[entries], self.inputs)

    @classmethod
    def stacked(cls, terms: Sequence["Sparse"]) -> "Sparse":
        counts = torch.cat([term.row_start.diff() for term in terms])
        column, value = torch.cat([term.column for term in terms]), torch.cat([term.value for term in terms])
        return cls(starts_of(counts), column, value, terms[0].inputs)


def sparse(values_NK: Tensor, chosen_NK: Tensor) -> Sparse:
    """The term of the values [N, K] chosen by a bool mask [N, K], in their own dtype."""
    columns = values_NK.shape[1]
    column = chosen_NK.nonzero()[:, 1].to(column_dtype(columns))
    return Sparse(starts_of(chosen_NK.sum(1)), column, values_NK[chosen_NK], columns)


def column_dtype(columns: int) -> torch.dtype:
    """The dtype of column numbers: int16 up to 32768 columns, int32 above."""
    return torch.int16 if columns <= SHORT_COLUMNS else torch.int32


def entry_bits(columns: int, dtype: torch.dtype) -> int:
    """Bits of one entry: its value and its column."""
    return torch.finfo(dtype).bits + torch.iinfo(column_dtype(columns)).bits


def rows_of(row_start: Tensor) -> Tensor:
    """The row of each entry, int64."""
    counts = row_start.long().diff()
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


def starts_of(counts: Tensor) -> Tensor:
    """int32 [N + 1]: the index of each row's first entry, and the number of all entries."""
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.long().cumsum(0)]).to(torch.int32)


def counts_of(row_start: Tensor) -> Tensor:
    """The number of entries of each row [N], in the smallest dtype that holds them all; inverse of `starts_of`."""
    counts = row_start.diff()
    most = int(counts.max()) if len(counts) else 0
    return counts.to(next(dtype for dtype in COUNTS if most <= torch.iinfo(dtype).max))
