"""Codes on a grid in the words of GPTQ and AWQ checkpoints.

Of a layer with N outputs, K inputs, G groups and codes q of n bits, whose values are (q - z) scale:

    GPTQWords        qweight   int32 [K n / 32, N]     q, a bit stream along the inputs, lowest bits first
                     qzeros    int32 [G, N n / 32]     z less 1 (format 1) or z (format 2), a stream along the outputs
                     scales    float16 [G, N]
                     g_idx     int32 [K]               the group of each input, in order; may be absent
    GPTQActOrder     the same, with inputs that belong to groups in any order
    AWQWords         qweight   int32 [K, N / 8]        eight outputs in a word; nibble i, from the lowest, holds output
                                                       ORDER[i] of them (AutoAWQ, version "gemm")
                     qzeros    int32 [G, N / 8]        z, in the same order
                     scales    float16 [G, N]

These codes and zero points are unsigned; `Quantized` has them less 2^(n-1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import CheckpointError, CompressError
from compress.kernels.layouts.words import WORD, pack_rows, unpack_rows, words_of
from compress.weights.formats.codes import CodesFormat, scales_by_row
from compress.weights.grid import Grid, Quantized
from compress.weights.roles import Role
from compress.weights.terms import FLOATS, Part, StoredTerm, check_finite

AWQ_BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, kw_only=True)
class WordsFormat(CodesFormat):
    """The part that both layouts share: unsigned codes, and scales and zero points by group."""

    telling: ClassVar[str | None] = "qweight"

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        check_finite(parts, "scales")

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> StoredTerm:
        return self.term(self.quantized(parts, rows, columns))

    def quantized(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Quantized:
        """The codes [N, K] of these tensors, in the order in which they lie, and their scales and zero points [N,
        G]."""
        middle = 2 ** (self.grid.bits - 1)
        codes = (self.codes(parts, columns) - middle).view(torch.int8)
        zero = None if self.grid.symmetric else (self.zeros(parts, rows) - middle).view(torch.int8)
        return Quantized(codes, parts["scales"].t().contiguous(), zero, self.grid)

    def codes(self, parts: Mapping[str, Tensor], columns: int) -> Tensor:
        """Unsigned codes [N, K]."""
        raise NotImplementedError

    def zeros(self, parts: Mapping[str, Tensor], rows: int) -> Tensor:
        """Unsigned zero points [N, G]."""
        raise NotImplementedError

    def tensors(self, quantized: Quantized) -> dict[str, Tensor]:
        middle, scale = 2 ** (self.grid.bits - 1), scales_by_row(quantized)
        zero = torch.full_like(scale, middle, dtype=torch.uint8)
        if quantized.zero_point is not None:
            zero = quantized.zero_point.expand(scale.shape).contiguous().view(torch.uint8) + middle
        return self.packed(quantized.codes.contiguous().view(torch.uint8) + middle, scale, zero)

    def packed(self, codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
        """The tensors of unsigned codes [N, K], and of scales and unsigned zero points [N, G]."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GPTQWords(WordsFormat):
    """GPTQ's layout, with inputs that lie in the order of their groups. less: stored zero points are less by this."""

    kind: ClassVar[str] = "gptq"

    less: int = 1

    def size(self, first: int, second: int) -> tuple[int, int]:
        return second, first * WORD // self.grid.bits

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        bits, groups = self.grid.bits, self.groups(columns)
        return {
            "qweight": Part((words_of(columns, bits), rows), (torch.int32,), role=Role.CODES),
            "qzeros": Part((groups, words_of(rows, bits)), (torch.int32,), role=Role.ZEROS),
            "scales": Part((groups, rows), FLOATS, role=Role.SCALES),
            "g_idx": Part((columns,), (torch.int32,), optional=True, role=Role.MASKS),
        }

    def problem(self, rows: int, columns: int) -> str | None:
        if columns * self.grid.bits % WORD:
            return f"has {columns} inputs; codes of {self.grid.bits} bits do not fill words of {WORD}"
        return super().problem(rows, columns)

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        zero, middle = self._stored_zeros(parts, rows), 2 ** (self.grid.bits - 1)
        if self.grid.symmetric and bool((zero != middle - self.less).any()):
            raise CheckpointError(f"qzeros holds zero points beside {middle}, and its codes are said to be symmetric")
        if self.less and bool((zero == 2 * middle - 1).any()):
            raise CheckpointError(
                f"qzeros holds {2 * middle - 1}, which readers of format 1 take for {2 * middle} or for 0; convert it "
                "to format 2 (GPTQModel does)"
            )

    def codes(self, parts: Mapping[str, Tensor], columns: int) -> Tensor:
        return unpack_rows(parts["qweight"].t().contiguous(), self.grid.bits, columns, signed=False)

    def zeros(self, parts: Mapping[str, Tensor], rows: int) -> Tensor:
        return self._stored_zeros(parts, rows).t().contiguous() + self.less

    def _stored_zeros(self, parts: Mapping[str, Tensor], rows: int) -> Tensor:
        return unpack_rows(parts["qzeros"], self.grid.bits, rows, signed=False)

    def packed(self, codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
        bits, columns = self.grid.bits, codes.shape[1]
        return {
            "qweight": pack_rows(codes, bits, signed=False).t().contiguous(),
            "qzeros": pack_rows((zero - self.less).t().contiguous(), bits, signed=False),
            "scales": scale.t().contiguous(),
            "g_idx": groups_in_order(columns, scale.shape[1]).to(codes.device),
        }


@dataclass(frozen=True, kw_only=True)
class GPTQActOrder(GPTQWords):
    """GPTQ's layout, with inputs that belong to groups in any order: they were rounded in the order of their Hessian's
    diagonal (act-order), and a group has those that were rounded one after the other."""

    kind: ClassVar[str] = "gptq-act-order"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        parts = super().parts(rows, columns)
        return {**parts, "g_idx": parts["g_idx"]._replace(optional=False)}

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        sizes = torch.bincount(parts["g_idx"].clamp(-1, columns).long() + 1, minlength=columns + 2)[1:]
        groups, size = self.groups(columns), columns // self.groups(columns)
        if bool((sizes[:groups] != size).any()):
            raise CheckpointError(f"g_idx does not give each of {groups} groups {size} inputs")

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> StoredTerm:
        return InOrderOfGroups(self.sorted(parts, rows, columns), parts["g_idx"], self)

    def sorted(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Quantized:
        """The codes with the inputs of a group side by side."""
        held = self.quantized(parts, rows, columns)
        return replace(held, codes=held.codes[:, by_group(parts["g_idx"])])


@dataclass(frozen=True)
class InOrderOfGroups(StoredTerm):
    """Codes whose inputs are sorted by group. group: int32 [K], the group of each input before."""

    codes: Quantized
    group: Tensor
    format: GPTQActOrder

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return unsorted(self.codes.dequantize(dtype), self.group)

    def parts(self) -> dict[str, Tensor]:
        there = replace(self.codes, codes=unsorted(self.codes.codes, self.group))
        return {**self.format.tensors(there), "g_idx": self.group}

    def rows(self, part: slice) -> "InOrderOfGroups":
        return InOrderOfGroups(self.codes.rows(part), self.group, self.format)

    @classmethod
    def stacked(cls, terms: Sequence["InOrderOfGroups"]) -> "InOrderOfGroups":
        first = terms[0]
        if any(not torch.equal(first.group, term.group) for term in terms[1:]):
            raise CompressError("parts of a layer that were decided one by one differ in the groups of their inputs")
        return cls(Quantized.stacked([term.codes for term in terms]), first.group, first.format)


@dataclass(frozen=True, kw_only=True)
class AWQWords(WordsFormat):
    """AWQ's layout, version gemm."""

    kind: ClassVar[str] = "awq"

    def size(self, first: int, second: int) -> tuple[int, int]:
        return second * len(ORDER), first

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        words, groups = rows // len(ORDER), self.groups(columns)
        return {
            "qweight": Part((columns, words), (torch.int32,), role=Role.CODES),
            "qzeros": Part((groups, words), (torch.int32,), role=Role.ZEROS),
            "scales": Part((groups, rows), FLOATS, role=Role.SCALES),
        }

    def problem(self, rows: int, columns: int) -> str | None:
        if self.grid.bits != AWQ_BITS:
            return f"has codes of {self.grid.bits} bits; allowed: {AWQ_BITS}"
        return super().problem(rows, columns)

    def codes(self, parts: Mapping[str, Tensor], columns: int) -> Tensor:
        return _from_words(parts["qweight"]).t().contiguous()

    def zeros(self, parts: Mapping[str, Tensor], rows: int) -> Tensor:
        return _from_words(parts["qzeros"]).t().contiguous()

    def packed(self, codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
        return {
            "qweight": _to_words(codes.t()),
            "qzeros": _to_words(zero.t()),
            "scales": scale.t().contiguous(),
        }


def groups_in_order(columns: int, groups: int) -> Tensor:
    """The group [K] of each input, of groups that lie side by side."""
    return (torch.arange(columns) // (columns // groups)).to(torch.int32)


def by_group(group: Tensor) -> Tensor:
    """The inputs [K], sorted by their groups."""
    return group.argsort(stable=True)


def unsorted(columns: Tensor, group: Tensor) -> Tensor:
    """[N, K] columns that were sorted by group, in their own order."""
    found = torch.empty_like(columns)
    found[:, by_group(group)] = columns
    return found


def _to_words(codes: Tensor) -> Tensor:
    """[R, N] codes of 4 bits, eight of a row in a word of int32."""
    places = torch.arange(codes.shape[1]).view(-1, len(ORDER))[:, list(ORDER)].flatten()
    return pack_rows(codes[:, places.to(codes.device)].contiguous(), AWQ_BITS, signed=False)


def _from_words(words: Tensor) -> Tensor:
    """Inverse of `_to_words`: uint8."""
    count = words.shape[1] * len(ORDER)
    lying = unpack_rows(words.contiguous(), AWQ_BITS, count, signed=False).view(len(words), -1, len(ORDER))
    found = torch.empty_like(lying)
    found[:, :, list(ORDER)] = lying
    return found.view(len(words), count)


def grid_of_words(bits: int, group_size: int, symmetric: bool) -> Grid:
    """The grid of such codes. group_size: -1 for one scale per output. Raises InputError for one that cannot be."""
    if group_size == -1:
        return Grid(bits=bits, symmetric=symmetric)
    return Grid(bits=bits, symmetric=symmetric, granularity="group", group_size=group_size)
