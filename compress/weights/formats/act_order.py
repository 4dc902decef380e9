"""Packed codes whose inputs belong to groups in any order, as GPTQ's act-order leaves them: they were rounded in the
order of the Hessian's diagonal, and a group has those that were rounded one after the other.

N outputs, K inputs, G groups, n bits:

    weight_packed, weight_scale, weight_zero_point    as in `weights.formats.codes.Packed`
    weight_g_idx    int32 [K]    the group of each input
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import CheckpointError, CompressError
from compress.weights.formats.codes import Layout, Packed
from compress.weights.grid import Quantized
from compress.weights.roles import Role
from compress.weights.terms import Part, StoredTerm

INDEX = "weight_g_idx"


@dataclass(frozen=True, kw_only=True)
class ActOrder(Packed):
    """Packed codes, and the group of each input."""

    kind: ClassVar[str] = "pack-quantized-act-order"
    layout: ClassVar[Layout | None] = None

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {**super().parts(rows, columns), INDEX: Part((columns,), (torch.int32,), role=Role.MASKS)}

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        sizes = torch.bincount(parts[INDEX].clamp(-1, columns).long() + 1, minlength=columns + 2)[1:]
        groups, size = self.groups(columns), columns // self.groups(columns)
        if bool((sizes[:groups] != size).any()):
            raise CheckpointError(f"{INDEX} does not give each of {groups} groups {size} inputs")

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> StoredTerm:  # type: ignore[override]
        codes = super().read(parts, rows, columns)
        return InOrderOfGroups(replace(codes, codes=codes.codes[:, by_group(parts[INDEX])]), parts[INDEX], self)


@dataclass(frozen=True)
class InOrderOfGroups(StoredTerm):
    """Codes whose inputs are sorted by group. group: int32 [K], the group of each input before."""

    codes: Quantized
    group: Tensor
    format: ActOrder

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return unsorted(self.codes.dequantize(dtype), self.group)

    def parts(self) -> dict[str, Tensor]:
        there = replace(self.codes, codes=unsorted(self.codes.codes, self.group))
        return {**self.format.tensors(there), INDEX: self.group}

    def rows(self, part: slice) -> "InOrderOfGroups":
        return replace(self, codes=self.codes.rows(part))

    @classmethod
    def stacked(cls, terms: Sequence["InOrderOfGroups"]) -> "InOrderOfGroups":
        first = terms[0]
        if any(not torch.equal(first.group, term.group) for term in terms[1:]):
            raise CompressError("parts of a layer that were decided one by one differ in the groups of their inputs")
        return replace(first, codes=Quantized.stacked([term.codes for term in terms]))


def by_group(group: Tensor) -> Tensor:
    """The inputs [K], sorted by their groups."""
    return group.argsort(stable=True)


def unsorted(columns: Tensor, group: Tensor) -> Tensor:
    """[N, K] columns that were sorted by group, in their own order."""
    found = torch.empty_like(columns)
    found[:, by_group(group)] = columns
    return found
