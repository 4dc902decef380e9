"""A binary term in some of the columns, added where one bit is too few (BiLLM, arXiv 2402.04291).

N outputs, K inputs, C of them chosen. value = code * scale in these columns, 0 in all others.

    column          int16 [C]                    rising; int32 where K is above 32768
    weight_packed   int32 [N, ceil(C / 32)]      codes -1 and 1 of these columns, as `weights.formats.ternary.Binary`
    has them
    weight_scale    model dtype [N, G]           of groups of these columns, in their order

All rows share the columns, so that storing a column takes 16 / N bits per weight in it, besides one bit for the code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from compress.base.errors import CheckpointError, CompressError
from compress.weights.formats.codes import Codes
from compress.weights.formats.sparse import column_dtype
from compress.weights.formats.ternary import BinaryCodes
from compress.weights.grid import Grid
from compress.weights.roles import Role
from compress.weights.terms import Format, Part, StoredTerm


@dataclass(frozen=True, kw_only=True)
class BinaryColumns(Format):
    """Codes in some columns. chosen: the number C of columns. grid: of the codes [N, C]."""

    kind: ClassVar[str] = "binary-columns"
    grid: Grid
    chosen: int

    @property
    def inside(self) -> BinaryCodes:
        """The format of the chosen columns."""
        return BinaryCodes(grid=self.grid)

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "column": Part((self.chosen,), (column_dtype(columns),), role=Role.PLACES),
            **self.inside.parts(rows, self.chosen),
        }

    def problem(self, rows: int, columns: int) -> str | None:
        if not 0 < self.chosen <= columns:
            return f"has {columns} inputs; {self.chosen} of them cannot be chosen"
        inside = self.inside.problem(rows, self.chosen)
        return None if inside is None else f"chooses {self.chosen} inputs and {inside}"

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        self.inside.check(parts, rows, self.chosen)
        column = parts["column"].long()
        if bool(((column < 0) | (column >= columns)).any()) or bool((column.diff() <= 0).any()):
            raise CheckpointError(f"column does not rise within the {columns} inputs")

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> "Columns":
        return Columns(parts["column"], self.inside.read(parts, rows, self.chosen), columns)

    def product(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        chosen = self.inside.read(parts, len(parts["weight_packed"]), self.chosen)
        return nn.functional.linear(x[..., parts["column"].long()], chosen.dequantize(x.dtype))

    def words(self, inputs: Grid | None) -> str:
        return f"binary in {self.chosen} columns"


@dataclass(frozen=True)
class Columns(StoredTerm):
    """Codes [N, C] in the columns `column` (int16 or int32 [C]); all others are 0. inputs: K."""

    column: Tensor
    codes: Codes
    inputs: int

    @property
    def format(self) -> BinaryColumns:  # type: ignore[override]
        return BinaryColumns(grid=self.codes.format.grid, chosen=len(self.column))

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.inputs

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        chosen = self.codes.dequantize(dtype)
        values = chosen.new_zeros(self.shape)
        values[:, self.column.long()] = chosen
        return values

    def parts(self) -> dict[str, Tensor]:
        return {"column": self.column, **self.codes.parts()}

    def rows(self, part: slice) -> "Columns":
        return Columns(self.column, self.codes.rows(part), self.inputs)

    @classmethod
    def stacked(cls, terms: Sequence["Columns"]) -> "Columns":
        first = terms[0]
        if any(not torch.equal(term.column, first.column) for term in terms[1:]):
            raise CompressError(
                "parts of a layer that were decided one by one differ in the columns of a binary term, which all rows "
                "share; leave that layer to another pass"
            )
        return cls(first.column, Codes.stacked([term.codes for term in terms]), first.inputs)
