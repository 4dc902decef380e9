"""Trellis codes in strips: the layout that CPUs read fastest, in which a model holds them there.

Sixteen columns side by side (a strip), and 32 rows of each (a block) in k words, the first row in the highest bits:

    words    int32 [B, S, 16 k]    of block b and strip s, word j of column i at 16 j + i
    before   int32 [R, S, 16]      of each run the symbols in front of it, the last one in the lowest bits

so that the state of a row is the lowest L bits of a window of two words that follow each other, for 16 columns in one
vector, and codes are read in the order of memory. Rows are padded to whole blocks with zeros.

It takes the place of words by rows (`layouts.trellis.TrellisWords`), never stands beside them; both ways are exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.layouts.trellis import Code, TrellisWords
from compress.kernels.layouts.words import pack_rows, unpack_rows, words_of

LANES = 16
BLOCK = 32  # rows whose symbols fill whole words


class TrellisStrips(NamedTuple):
    """A weight [N, K], as drawn above; scale [N] of each output."""

    words: Tensor
    before: Tensor
    scale: Tensor
    code: Code

    @property
    def rows(self) -> int:
        """N."""
        return len(self.scale)

    @property
    def columns(self) -> int:
        """K."""
        return self.words.shape[1] * LANES


def why_not_trellis_strips(code: Code) -> list[str]:
    """Reasons why codes cannot be laid out in strips; empty when they can."""
    return [f"runs of {code.run} outputs; allowed in strips: multiples of {BLOCK}"] if code.run % BLOCK else []


def empty_strips(weight: TrellisWords) -> TrellisStrips:
    """Strips of the sizes of a weight, not filled."""
    code, strips = weight.code, weight.columns // LANES
    words = weight.words.new_empty(-(-weight.rows // BLOCK), strips, code.bits * LANES)
    return TrellisStrips(words, weight.words.new_empty(code.runs(weight.rows), strips, LANES), weight.scale, code)


def _places(code: Code, device: torch.device) -> Tensor:
    """[H, 1], the lowest bit of each symbol in front of a run."""
    return code.bits * torch.arange(code.head - 1, -1, -1, device=device)[:, None]


def pack_trellis_strips(weight: TrellisWords) -> TrellisStrips:
    """A weight in strips, from words by rows."""
    code, strips = weight.code, empty_strips(weight)
    for run, (own, held) in enumerate(code.parts(weight.rows)):
        symbols = unpack_rows(weight.words[held], code.bits, weight.columns, signed=False)
        ahead, body = symbols[: code.head], symbols[code.head :]
        strips.before[run] = (ahead.long() << _places(code, ahead.device)).sum(0).view(-1, LANES)
        blocks = torch.nn.functional.pad(body, (0, 0, 0, -len(body) % BLOCK)).view(-1, BLOCK, weight.columns)
        # A row's codes lie in its words from the lowest bits on: the last row comes first.
        words = pack_rows(blocks.flip(1).transpose(1, 2).reshape(-1, BLOCK), code.bits, signed=False).flip(1)
        by_strip = words.view(len(blocks), -1, LANES, code.bits).transpose(2, 3)
        first = own.start // BLOCK
        strips.words[first : first + len(blocks)] = by_strip.reshape(*by_strip.shape[:2], -1)
    return strips


def unpack_trellis_strips(weight: TrellisStrips) -> TrellisWords:
    """Inverse of `pack_trellis_strips`."""
    code, columns = weight.code, weight.columns
    size = (code.stored_rows(weight.rows), words_of(columns, code.bits))
    row_words = weight.words.new_empty(size)
    for run, (own, held) in enumerate(code.parts(weight.rows)):
        ahead = (weight.before[run].view(1, -1) >> _places(code, row_words.device)) & (2**code.bits - 1)
        blocks = weight.words[own.start // BLOCK : -(-own.stop // BLOCK)]
        words = blocks.view(*blocks.shape[:2], code.bits, LANES).transpose(2, 3).reshape(-1, code.bits)
        symbols = unpack_rows(words.flip(1), code.bits, BLOCK, signed=False).view(len(blocks), columns, BLOCK)
        body = symbols.transpose(1, 2).flip(1).reshape(-1, columns)[: own.stop - own.start]
        row_words[held] = pack_rows(torch.cat([ahead.to(torch.uint8), body]), code.bits, signed=False)
    return TrellisWords(row_words, weight.scale, code)


def words_by_rows(weight: TrellisWords | TrellisStrips) -> TrellisWords:
    """A weight of either layout in words by rows."""
    return unpack_trellis_strips(weight) if isinstance(weight, TrellisStrips) else weight
