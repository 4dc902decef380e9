"""Codes of two or three levels as a term of a weight, below two bits each.

N outputs, K inputs, G groups. value = code * scale, as on every grid.

    Ternary    weight_packed   uint8 [N, ceil(K / 5)]     codes -1, 0 and 1, five in a byte (`kernels.layouts.trits`)
               weight_scale    model dtype [N, G]
    Binary     weight_packed   int32 [N, ceil(K / 32)]    codes -1 and 1 as bits 0 and 1 (`kernels.layouts.words`)
               weight_scale    model dtype [N, G]

Ternary codes of two bits need no format of their own: they are codes of the narrow grid of w2a16 in `codes.Packed`,
which compressed-tensors can express.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import CheckpointError, InputError
from compress.kernels.layouts.trits import bytes_of, limits, pack_trits, unpack_trits
from compress.kernels.layouts.words import pack_rows, unpack_rows, words_of
from compress.weights.formats.codes import Codes, CodesFormat
from compress.weights.grid import Grid, Quantized
from compress.weights.roles import Role
from compress.weights.terms import FLOATS, Part


@dataclass(frozen=True, kw_only=True)
class FewLevelCodes(CodesFormat):
    """Base of formats that pack codes row by row in their own way, with a scale for each row and group."""

    def pack(self, codes: Tensor) -> Tensor:
        """Packs codes [R, K] int8 into stored rows."""
        raise NotImplementedError

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Inverse of `pack`."""
        raise NotImplementedError

    def tensors(self, quantized: Quantized) -> dict[str, Tensor]:
        scale = quantized.scale.expand(len(quantized.codes), -1)
        return {"weight_scale": scale, "weight_packed": self.pack(quantized.codes)}

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        codes = self.unpack(parts["weight_packed"], columns)
        return self.term(Quantized(codes, parts["weight_scale"], None, self.grid))

    def words(self, inputs: Grid | None) -> str:
        group = "channel" if self.grid.group_size is None else f"g{self.grid.group_size}"
        return f"{self.kind} {group}" if inputs is None else f"{self.kind} a{inputs.bits} {group}"


@dataclass(frozen=True, kw_only=True)
class TernaryCodes(FewLevelCodes):
    """Codes -1, 0 and 1 in 1.6 bits."""

    kind: ClassVar[str] = "ternary"

    def __post_init__(self) -> None:
        if not self.grid.ternary:
            raise InputError("ternary codes are on the narrow, symmetric grid of 2 bits")

    @property
    def code_bits(self) -> float:
        return math.log2(3)

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "weight_scale": Part((rows, self.groups(columns)), FLOATS, role=Role.SCALES),
            "weight_packed": Part((rows, bytes_of(columns)), (torch.uint8,), role=Role.CODES),
        }

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        super().check(parts, rows, columns)
        packed = parts["weight_packed"]
        if bool((packed >= limits(columns, packed.device)).any()):
            raise CheckpointError(
                f"weight_packed holds bytes up to {int(packed.max())}; five ternary codes are at most 242, fewer in a "
                "last byte less"
            )

    def pack(self, codes: Tensor) -> Tensor:
        return pack_trits(codes)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        return unpack_trits(packed, columns)


@dataclass(frozen=True, kw_only=True)
class BinaryCodes(FewLevelCodes):
    """Codes -1 and 1 in a bit."""

    kind: ClassVar[str] = "binary"

    def __post_init__(self) -> None:
        if not self.grid.signs:
            raise InputError("binary codes are on the grid of signs")

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "weight_scale": Part((rows, self.groups(columns)), FLOATS, role=Role.SCALES),
            "weight_packed": Part((rows, words_of(columns, 1)), (torch.int32,), role=Role.CODES),
        }

    def pack(self, codes: Tensor) -> Tensor:
        return pack_rows((codes > 0).to(torch.uint8), 1, signed=False)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        return unpack_rows(packed, 1, columns, signed=False).to(torch.int8) * 2 - 1
