"""A weight that stays as numbers: what pruning leaves, before it has a format of its own.

A layer that is this and nothing else is stored as it always was, in `weight`: no reader has to know.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.weights.roles import Role
from compress.weights.terms import FLOATS, Format, Part, Term


@dataclass(frozen=True, kw_only=True)
class Dense(Format):
    """weight: model dtype [N, K]."""

    kind: ClassVar[str] = "dense"
    whole: ClassVar[str | None] = "weight"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {"weight": Part((rows, columns), FLOATS, by_row=True, role=Role.DENSE)}

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["weight"]


def dense(weight_NK: Tensor) -> Term:
    """A weight, in the dtype that it has, as a term."""
    rows, columns = weight_NK.shape
    return Dense().read({"weight": weight_NK}, rows, columns)
