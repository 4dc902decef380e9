"""2:4 weights: of every four consecutive inputs (a quad) at most two are not zero, and only two are stored.

N outputs, K inputs, G groups, n bits. H = K / 2. Layouts are those of `kernels.layouts.pairs24`:

    Sparse24         value               model dtype [N, H]          the kept weights of each quad, in order
                     position            int32 [N, ceil(H 2 / 32)]   their places in the quad, 0 to 3, rising; two bits
    PackedSparse24   weight_packed       int32 [N, ceil(H n / 32)]   the kept codes, as a bit stream
                     position            as above
                     weight_scale        model dtype [N, G]
                     weight_zero_point   int32 [ceil(N n / 32), G]   asymmetric only, packed along N

Bits per weight: 16 / 2 + 1 = 9 of 16-bit numbers; n / 2 + 1 + 16 / g of symmetric codes in groups of g, 3.125 for 4
bits and 128. A pruned code equals its group's zero point and so stands for exactly 0. A quad with fewer than two kept
weights also stores its first pruned ones: equal weights are always equal bits, but for the sign of a zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import CheckpointError, InputError
from compress.kernels.layouts.pairs24 import (
    KEPT,
    QUAD,
    pack_positions,
    position_words,
    positions_of,
    spread,
    take,
    unpack_positions,
)
from compress.kernels.layouts.words import pack_rows, unpack_rows, words_of
from compress.weights.formats.codes import Codes, CodesFormat, Packed, packed_zeros
from compress.weights.formats.dense import Dense
from compress.weights.grid import Grid, Quantized
from compress.weights.matrix import Term
from compress.weights.roles import Role
from compress.weights.terms import FLOATS, Format, Part, StoredTerm

# The name of this pattern in options and recipes.
TWO_OF_FOUR = "2:4"


def half(columns: int) -> int:
    """The number of kept weights in a row of so many inputs: half of them."""
    return columns * KEPT // QUAD


def quads_problem(columns: int) -> str | None:
    """The reason why rows of so many inputs do not split into quads; None where they do."""
    return f"has {columns} inputs, which are not whole groups of {QUAD}" if columns % QUAD else None


def check_positions(words: Tensor, columns: int) -> None:
    """Raises CheckpointError where the two positions of a quad do not rise."""
    position = unpack_positions(words, columns).view(len(words), -1, KEPT)
    wrong = (position[..., 1] <= position[..., 0]).nonzero()
    if len(wrong):
        row, quad = wrong[0].tolist()
        first = QUAD * quad
        raise CheckpointError(
            f"position holds {position[row, quad].tolist()} for inputs {first} to {first + QUAD - 1} of row {row}; of "
            f"two kept weights the second stands behind the first ({len(wrong)} such places)"
        )


@dataclass(frozen=True, kw_only=True)
class Sparse24(Format):
    """Plain numbers, of which two of four are stored."""

    kind: ClassVar[str] = "sparse-24"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "value": Part((rows, half(columns)), FLOATS, by_row=True, role=Role.SURVIVORS),
            "position": Part((rows, position_words(columns)), (torch.int32,), by_row=True, role=Role.MASKS),
        }

    def problem(self, rows: int, columns: int) -> str | None:
        return quads_problem(columns)

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        check_positions(parts["position"], columns)

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        value = parts["value"]
        return spread(value, unpack_positions(parts["position"], value.shape[1] * QUAD // KEPT))

    def words(self, inputs: Grid | None) -> str:
        return "2:4"


@dataclass(frozen=True, kw_only=True)
class PackedSparse24(CodesFormat):
    """Codes of 2 to 8 bits, of which two of four are stored."""

    kind: ClassVar[str] = "pack-sparse-24"

    def __post_init__(self) -> None:
        if self.grid.type != "int" or not self.grid.signed:
            raise InputError("2:4 codes are signed integers: floats and signs have no zero point to prune to")

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        packed = Packed(grid=self.grid).parts(rows, columns)
        return {
            **packed,
            "weight_packed": Part((rows, words_of(half(columns), self.grid.bits)), (torch.int32,), role=Role.CODES),
            "position": Part((rows, position_words(columns)), (torch.int32,), role=Role.MASKS),
        }

    def problem(self, rows: int, columns: int) -> str | None:
        group = self.grid.group_size
        if group is not None and group % QUAD:
            return f"has groups of {group} inputs, which are not whole groups of {QUAD}"
        return quads_problem(columns) or super().problem(rows, columns)

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        check_positions(parts["position"], columns)

    def tensors(self, quantized: Quantized) -> dict[str, Tensor]:
        codes, zero = quantized.codes, zeros_of(quantized)
        position = positions_of(codes != zero)
        packed = Packed(grid=self.grid).tensors(quantized)
        kept = pack_rows(take(codes, position), self.grid.bits)
        return {**packed, "weight_packed": kept, "position": pack_positions(position)}

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        position = unpack_positions(parts["position"], columns)
        kept = unpack_rows(parts["weight_packed"], self.grid.bits, half(columns))
        zero_point = packed_zeros(parts, self.grid, rows)
        codes = kept.new_zeros(rows, columns)
        found = Quantized(codes, parts["weight_scale"], zero_point, self.grid)
        return self.term(Quantized(spread(kept, position, zeros_of(found)), found.scale, zero_point, self.grid))

    def words(self, inputs: Grid | None) -> str:
        return f"{super().words(inputs)} 2:4"


def zeros_of(quantized: Quantized) -> Tensor:
    """[N, K]: for each place, the code that stands for 0."""
    rows, columns = quantized.codes.shape
    if quantized.zero_point is None:
        return quantized.codes.new_zeros(1, 1).expand(rows, columns)
    zero = quantized.zero_point.expand(rows, -1)
    return zero.repeat_interleave(columns // zero.shape[1], 1)


def is_halved(weight_NK: Tensor) -> bool:
    """True for a weight in which every quad has at most two values that are not zero."""
    columns = weight_NK.shape[1]
    if quads_problem(columns) is not None:
        return False
    return bool((weight_NK.reshape(-1, QUAD) != 0).sum(1).le(KEPT).all())


def sparse24(term: Term) -> StoredTerm:
    """Converts a dense term, or codes with zeros, to the 2:4 term of exactly the same values; returns a 2:4 term as it
    is.

    Raises InputError, in one line without the layer's name, for a weight that is not 2:4, and for a format that has no
    2:4 form.
    """
    if isinstance(term, StoredTerm) and isinstance(term.format, Sparse24 | PackedSparse24):
        return term
    rows, columns = term.shape
    if isinstance(term, Quantized):
        format_ = PackedSparse24(grid=term.grid)
        _check_size(format_, rows, columns)
        positions_of(term.codes != zeros_of(term))
        return format_.term(term)
    assert isinstance(term, StoredTerm)
    if not isinstance(term.format, Dense):
        raise InputError(f"stored as {term.format.kind}, which has no 2:4 form")
    weight = term.dequantize()
    _check_size(Sparse24(), rows, columns)
    position = positions_of(weight != 0)
    return Sparse24().read({"value": take(weight, position), "position": pack_positions(position)}, rows, columns)


def _check_size(format_: Format, rows: int, columns: int) -> None:
    problem = format_.problem(rows, columns)
    if problem is not None:
        raise InputError(problem)
