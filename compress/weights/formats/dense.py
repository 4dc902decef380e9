"""A weight of plain numbers, as pruning leaves it before another format stores it.

A layer of this term alone is stored as an ordinary `weight`, which every reader reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.weights.roles import Role
from compress.weights.terms import FLOATS, Format, Part, StoredTerm


@dataclass(frozen=True, kw_only=True)
class Dense(Format):
    """Plain numbers: `weight`, model dtype [N, K]."""

    kind: ClassVar[str] = "dense"
    whole: ClassVar[str | None] = "weight"
    trains: ClassVar[bool] = True

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {"weight": Part((rows, columns), FLOATS, by_row=True, role=Role.DENSE)}

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["weight"]


def dense(weight_NK: Tensor) -> StoredTerm:
    """The term of a weight [N, K], in its own dtype."""
    rows, columns = weight_NK.shape
    return Dense().read({"weight": weight_NK}, rows, columns)
