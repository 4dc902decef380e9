"""Trellis codes in strips: a state is the lowest bits of two words that follow each other, and both ways are exact."""

import pytest
import torch
from trellises import trellis_of

from compress.kernels.layouts.trellis import BITS, Code
from compress.kernels.layouts.trellis_strips import pack_trellis_strips, unpack_trellis_strips, why_not_trellis_strips
from compress.kernels.layouts.words import unpack_rows


@pytest.mark.parametrize("states", [12, 16])
@pytest.mark.parametrize("bits", BITS)
def test_windows_of_words_are_states(bits: int, states: int):
    rows, columns, run = 150, 64, 64  # two runs of two blocks, and a short one
    weight, _ = trellis_of(bits, states, rows, columns, run, torch.float32)
    strips = pack_trellis_strips(weight)
    assert (strips.rows, strips.columns) == (rows, columns)
    code = weight.code
    wanted = code.states(unpack_rows(weight.words, bits, columns, signed=False), rows)
    for row in (0, 1, 31, 32, 63, 64, 127, 128, 149):
        block, end = row // 32, bits * (row % 32 + 1)
        for column in (0, 15, 16, 63):
            strip, lane = divmod(column, 16)
            first = row % run < 32
            ahead = strips.before[row // run, strip] if first else strips.words[block - 1, strip, -16:]
            stream = 0
            for word in (ahead[lane], *strips.words[block, strip].view(bits, 16)[:, lane]):
                stream = stream << 32 | int(word) % 2**32
            window = stream >> 32 * bits - end & 2**states - 1
            assert window == int(wanted[row, column]) % 2**states
    assert torch.equal(unpack_trellis_strips(strips).words, weight.words)


def test_runs_that_cut_blocks_are_named():
    assert "runs of 100" in why_not_trellis_strips(Code(2, 12, 1, 100))[0]
    assert why_not_trellis_strips(Code(2, 12, 1, 96)) == []
