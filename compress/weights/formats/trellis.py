"""Trellis codes as a term of a weight: k bits for each weight, which depend on each other down a column
(`compress.kernels.layouts.trellis`).

N outputs, K inputs, R rows of symbols (N, and a few in front of each run).

    weight_packed   int32 [R, K k / 32]           symbols as a bit stream (`compress.kernels.layouts.words`), filled up
                                                  with zeros to multiples of 32 inputs
    weight_scale    model dtype [N]               of each output

    value = level * scale, computed in float32 (float64 where the scale is) and rounded once to the dtype of the scale

Bits per weight: k + 16 / K + (ceil(L / k) - 1) k / T; 3.01 for 3 bits, 4,096
inputs and runs of 1,024.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import CompressError
from compress.kernels.layouts.trellis import BITS, INPUTS, MULTIPLIERS, WORD, Code
from compress.kernels.layouts.words import pack_rows, unpack_rows, words_of
from compress.weights.grid import Grid, working_dtype
from compress.weights.roles import Role
from compress.weights.terms import FLOATS, Format, Part, StoredTerm


@dataclass(frozen=True, kw_only=True)
class TrellisCodes(Format):
    """Codes of a bitshift trellis. bits: of a weight, 1 to 4. state_bits: of a state, from bits + 3 to 16. multiplier:
    that makes levels of states. run: outputs after which sequences begin anew; a CPU is fast
    where it is a multiple of 32. inputs: of a layer that has no multiple of 32 of them; 0: the words tell."""

    kind: ClassVar[str] = "trellis"
    telling: ClassVar[str | None] = "weight_packed"
    trains: ClassVar[bool] = True

    bits: int = 3
    state_bits: int = 12
    multiplier: int = MULTIPLIERS[12]
    run: int = 1024
    inputs: int = 0

    @property
    def code(self) -> Code:
        return Code(self.bits, self.state_bits, self.multiplier, self.run)

    def size(self, first: int, second: int) -> tuple[int, int]:
        return self.code.rows(first), self.inputs or second * INPUTS // self.bits

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        size = (self.code.stored_rows(rows), words_of(filled(columns), self.bits))
        return {
            "weight_packed": Part(size, (torch.int32,), role=Role.CODES),
            "weight_scale": Part((rows,), FLOATS, by_row=True, role=Role.SCALES),
        }

    def problem(self, rows: int, columns: int) -> str | None:
        if self.bits not in BITS or not self.bits + 3 <= self.state_bits <= 16:
            return f"has {self.bits} bits and states of {self.state_bits}; allowed: 1 to 4, and bits + 3 to 16"
        if not 0 < self.multiplier < WORD or self.run < 1:
            return f"has the multiplier {self.multiplier} and runs of {self.run}; allowed: 1 to 2^32 - 1, 1 or more"
        return None if columns == (self.inputs or filled(columns)) else f"has {columns} inputs; the format says others"

    def words(self, inputs: Grid | None) -> str:
        return f"trellis {self.bits} bits, 2^{self.state_bits} states"

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> "Trellised":
        symbols = unpack_rows(parts["weight_packed"], self.bits, columns, signed=False)
        return Trellised(self.code.states(symbols, rows), parts["weight_scale"], self)

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        return self.read(parts, *self.size(*parts["weight_packed"].shape)).dequantize()


def filled(columns: int) -> int:
    """The least multiple of 32 that holds so many inputs."""
    return -(-columns // INPUTS) * INPUTS


@dataclass(frozen=True)
class Trellised(StoredTerm):
    """A term in `TrellisCodes`. states int16 [N, K], in two's complement where they have 16 bits; scale [N]."""

    states: Tensor
    scale: Tensor
    format: TrellisCodes

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.states.shape
        return rows, columns

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        work = working_dtype(self.scale)
        values = self.format.code.levels(self.states).to(work) * self.scale.to(work).unsqueeze(1)
        return values.to(self.scale.dtype).to(self.scale.dtype if dtype is None else dtype)

    def parts(self) -> dict[str, Tensor]:
        code = self.format.code
        if not code.connected(self.states):
            raise CompressError(f"rows of a layer were decided apart in a way that cuts runs of {code.run} outputs")
        columns = self.shape[1]
        symbols = torch.nn.functional.pad(code.symbols(self.states), (0, filled(columns) - columns))
        return {"weight_packed": pack_rows(symbols, code.bits, signed=False), "weight_scale": self.scale}

    def scaled(self, factor_N: Tensor) -> "Trellised":
        work = working_dtype(self.scale)
        scale = self.scale.to(work) * factor_N.to(self.scale.device, work)
        return Trellised(self.states, scale.to(self.scale.dtype), self.format)

    def rows(self, part: slice) -> "Trellised":
        return Trellised(self.states[part], self.scale[part], self.format)

    @classmethod
    def stacked(cls, terms: Sequence["Trellised"]) -> "Trellised":
        states, scale = (torch.cat([getattr(term, name) for term in terms]) for name in ("states", "scale"))
        return cls(states, scale, terms[0].format)
