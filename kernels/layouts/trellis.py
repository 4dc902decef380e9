"""The bitshift trellis: a code in which each weight's value depends on the bits of a window of weights (QTIP, arXiv
2406.11235, section 3).

A sequence of weights has k bits each, b_0, b_1, ... The state of weight t is the last L of all bits up to its own,

    s_t = (s_{t-1} 2^k + b_t) mod 2^L       level_t = ((sum of the four bytes of s_t C mod 2^32) - 510) / 128

and its value is its level times a scale. C is a multiplier, the same for all weights: a product scatters the levels of
states that follow each other, and the sum of four bytes is nearly normal, as weights are. (The form is `mul1` of EXL3,
after 1MAD of the paper; the multipliers were searched for the least error on normal numbers.)

A matrix [N, K] has a sequence for each column, down its rows. Sequences begin anew every T rows: the state before the
first row of a run is free, and its L - k bits are H = ceil(L / k) - 1 symbols in front of the run's own. So the state
of each row is a window of H + 1 symbols, and all rows are decoded at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.layouts.words import unpack_rows

MIDDLE = 510  # half of the largest sum of four bytes
UNIT = 128.0  # levels are whole numbers of 1 / 128, exact in float32
WORD = 2**32
# {L: the multiplier C} of least error on normal numbers among those tried, for k = 2 and 3.
MULTIPLIERS = {10: 0x849167C9, 12: 0x868EE2BB, 14: 0x9B4C7B71, 16: 0x82D9D721}
BITS = (1, 2, 3, 4)
INPUTS = 32  # symbols of so many inputs fill whole words


@dataclass(frozen=True)
class Code:
    """A trellis. bits: k, of a weight. state_bits: L. multiplier: C. run: T, the rows after which sequences begin
    anew."""

    bits: int
    state_bits: int
    multiplier: int
    run: int

    @property
    def head(self) -> int:
        """H, the symbols in front of a run."""
        return -(-self.state_bits // self.bits) - 1

    def runs(self, rows: int) -> int:
        """The number of runs of so many rows."""
        return -(-rows // self.run)

    def stored_rows(self, rows: int) -> int:
        """Rows of symbols that a matrix of so many rows takes, those in front of runs included."""
        return rows + self.head * self.runs(rows)

    def rows(self, stored_rows: int) -> int:
        """The inverse of `stored_rows`."""
        return stored_rows - self.head * -(-stored_rows // (self.run + self.head))

    def parts(self, rows: int) -> list[tuple[slice, slice]]:
        """(Rows of the matrix, rows of symbols) of each run."""
        found = []
        for number, first in enumerate(range(0, rows, self.run)):
            last, ahead = min(first + self.run, rows), self.head * number
            found.append((slice(first, last), slice(first + ahead, last + ahead + self.head)))
        return found

    def levels(self, states: Tensor) -> Tensor:
        """float32, the levels of states: from -3.98 to 3.98."""
        product = (states.to(torch.int64) & (2**self.state_bits - 1)) * self.multiplier % WORD
        total = sum((product >> shift) & 255 for shift in (0, 8, 16, 24))
        return (total - MIDDLE).to(torch.float32) / UNIT

    def states(self, symbols: Tensor, rows: int) -> Tensor:
        """int16 [N, K], the states of rows from symbols [stored_rows, K], uint8. States of 16 bits are held in two's
        complement."""
        states = symbols.new_empty((rows, symbols.shape[1]), dtype=torch.int16)
        for own, held in self.parts(rows):
            part, length = symbols[held].to(torch.int32), own.stop - own.start
            window = torch.zeros(length, part.shape[1], dtype=torch.int32, device=part.device)
            for i in range(self.head + 1):
                window |= part[self.head - i : self.head - i + length] << (self.bits * i)
            states[own] = (window & (2**self.state_bits - 1)).to(torch.int16)
        return states

    def symbols(self, states: Tensor) -> Tensor:
        """uint8 [stored_rows, K], the inverse of `states`."""
        rows, columns = states.shape
        found = torch.empty(self.stored_rows(rows), columns, dtype=torch.uint8, device=states.device)
        for own, held in self.parts(rows):
            part = states[own].to(torch.int32) & (2**self.state_bits - 1)
            ahead = [(part[:1] >> (self.bits * i)) for i in range(self.head, 0, -1)]
            found[held] = (torch.cat([*ahead, part]) & (2**self.bits - 1)).to(torch.uint8)
        return found

    def connected(self, states: Tensor) -> bool:
        """True where each state follows from the one above it, inside each run."""
        whole = states.to(torch.int32) & (2**self.state_bits - 1)
        expected = (whole[:-1] << self.bits) & (2**self.state_bits - 1)
        follows = (expected == (whole[1:] & ~(2**self.bits - 1))).all(1)
        follows[self.run - 1 :: self.run] = True
        return bool(follows.all())


@cache
def level_table(code: Code, device: torch.device) -> Tensor:
    """float32 [2^L], the level of each state."""
    return code.levels(torch.arange(2**code.state_bits, device=device))


def levels_of(code: Code, states: Tensor) -> Tensor:
    """float32, `Code.levels` of states by look-up."""
    at = states.to(torch.int64) & (2**code.state_bits - 1)  # states of 16 bits are in two's complement
    return level_table(code, states.device).index_select(0, at.flatten()).view(at.shape)


def spread_of(code: Code) -> float:
    """The root mean square of the levels of all states: about 1.15."""
    return float(level_table(code, torch.device("cpu")).square().mean().sqrt())


class TrellisWords(NamedTuple):
    """A weight as kernels read it: words int32 [stored rows, K k / 32], symbols as a bit stream; scale [N] of each
    output."""

    words: Tensor
    scale: Tensor
    code: Code

    @property
    def rows(self) -> int:
        """N."""
        return len(self.scale)

    @property
    def columns(self) -> int:
        """K."""
        return self.words.shape[1] * INPUTS // self.code.bits


def run_blocks(weight: TrellisWords) -> Iterator[tuple[slice, Tensor]]:
    """(Rows, their levels float32 [rows, K]) of each run."""
    code = weight.code
    for own, held in code.parts(weight.rows):
        symbols = unpack_rows(weight.words[held], code.bits, weight.columns, signed=False)
        yield own, code.levels(code.states(symbols, own.stop - own.start))
