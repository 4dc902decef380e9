"""The bitshift trellis: windows of symbols are states, and states are levels, as the equations say, bit by bit."""

import pytest
import torch

from compress.kernels.layouts.trellis import BITS, MULTIPLIERS, Code, TrellisWords, level_table, run_blocks, spread_of
from compress.kernels.layouts.words import pack_rows
from compress.solvers.trellis.viterbi import best_states

CODES = [Code(bits, states, MULTIPLIERS[states], 5) for bits in BITS for states in (12, 16)]


@pytest.mark.parametrize("code", CODES, ids=str)
def test_states_follow_the_equations(code: Code):
    rows, columns = 13, 32  # two runs, and a short one
    draw = torch.Generator().manual_seed(0)
    symbols = torch.randint(2**code.bits, (code.stored_rows(rows), columns), dtype=torch.uint8, generator=draw)
    states = code.states(symbols, rows)
    assert code.rows(len(symbols)) == rows
    assert code.connected(states)
    for own, held in code.parts(rows):
        state = torch.zeros(columns, dtype=torch.int64)
        for n, symbol in enumerate(symbols[held].long()):
            state = (state * 2**code.bits + symbol) % 2**code.state_bits
            if n >= code.head:
                row = own.start + n - code.head
                assert torch.equal(states[row].long() % 2**code.state_bits, state)
                product = state * code.multiplier % 2**32
                total = sum(product // 256**byte % 256 for byte in range(4))
                assert torch.equal(code.levels(states[row]), (total - 510) / 128)
    # The top symbol in front of a run has more bits than the state, where k does not divide L.
    again = code.symbols(states)
    assert torch.equal(code.states(again, rows), states)
    if code.state_bits % code.bits == 0:
        assert torch.equal(again, symbols)
    blocks = run_blocks(TrellisWords(pack_rows(symbols, code.bits, signed=False), torch.ones(rows), code))
    assert torch.equal(torch.cat([levels for _, levels in blocks]), code.levels(states))


def test_a_path_that_is_cut_is_seen():
    code = CODES[0]
    states = torch.zeros(10, 32, dtype=torch.int16)
    states[7] = 1  # inside the second run
    assert not code.connected(states)
    states[7], states[5] = 0, 4095  # the first of a run is free, but not what follows it
    assert not code.connected(states)
    states[6:] = torch.tensor([4094, 4092, 4088, 4080]).to(torch.int16)[:, None]
    assert code.connected(states)


@pytest.mark.parametrize("states", MULTIPLIERS)
def test_levels_are_nearly_normal(states: int):
    """Their moments are those of a normal distribution, up to what four bytes can be."""
    code = Code(2, states, MULTIPLIERS[states], 1024)
    levels = level_table(code, torch.device("cpu")) / spread_of(code)
    assert abs(float(levels.mean())) < 0.02
    beside = 0.25 if states == 10 else 0.1  # of few levels
    assert abs(float(levels.pow(4).mean()) - 2.7) < beside  # of the sum of four uniform numbers: 3 - 6 / 5 / 4


@pytest.mark.parametrize(("bits", "more"), [(2, 1.05), (3, 1.08), (4, 1.12)])
def test_fewer_states_have_a_little_more_error(bits: int, more: float):
    x = torch.randn(16384, generator=torch.Generator().manual_seed(1))

    def error(states: int) -> float:
        code, scale = Code(bits, states, MULTIPLIERS[states], 1024), 0.8
        for _ in range(3):  # the scale of least squares
            level = code.levels(best_states(x / scale, torch.ones_like(x), code))
            scale = float(level @ x / level.square().sum())
        return float((level * scale - x).square().mean())

    assert error(10) / error(12) == pytest.approx(more, abs=0.02)
