"""Paths through a trellis: the search is exact, and nothing after the sweep raises the loss."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from published import mean_square, realistic_layer

from compress.base.errors import CompressError
from compress.kernels.cpu import trellis as compiled
from compress.kernels.layouts.trellis import MULTIPLIERS, Code, spread_of
from compress.solvers.gptq import gptq
from compress.solvers.hessian_with_drift import POLISH_DAMP
from compress.solvers.trellis import viterbi
from compress.solvers.trellis.solve import trellis
from compress.solvers.trellis.viterbi import best_states, best_states_by_torch, fed_back_by_torch
from compress.weights.formats.trellis import TrellisCodes
from compress.weights.grid import Grid

WEIGHT, X = realistic_layer(72, 64, seed=3)
H = mean_square(X)
FORMAT = TrellisCodes(bits=2, run=40)


def brute_force(x: torch.Tensor, d: torch.Tensor, code: Code) -> float:
    """The least cost over every state before the first number, and every symbol."""
    best = float("inf")
    for first in range(2**code.state_bits):
        for symbols in itertools.product(range(2**code.bits), repeat=len(x) - 1):
            states = [first]
            for symbol in symbols:
                states.append((states[-1] * 2**code.bits + symbol) % 2**code.state_bits)
            best = min(best, float((d * (x - code.levels(torch.tensor(states))).square()).sum()))
    return best


@pytest.mark.parametrize("bits", [1, 2])
def test_search_is_exact(bits: int):
    code = Code(bits, 5, MULTIPLIERS[12], 64)
    draw = torch.Generator().manual_seed(1)
    x, d = torch.randn(4, generator=draw), torch.rand(4, generator=draw) + 0.1
    for search in (best_states, best_states_by_torch):
        states = search(x, d, code)
        assert code.connected(states[:, None])
        found = float((d * (x - code.levels(states)).square()).sum())
        assert found == pytest.approx(brute_force(x, d, code), rel=1e-5)


@pytest.mark.usefixtures("trellis_loops")
@pytest.mark.parametrize(("bits", "states"), [(1, 12), (2, 12), (3, 12), (4, 12), (2, 16), (2, 10), (4, 10)])
def test_compiled_search_is_that_of_torch(bits: int, states: int):
    code = Code(bits, states, MULTIPLIERS[states], 300)
    if reasons := compiled.why_not(states, bits):
        pytest.skip("; ".join(reasons))
    draw = torch.Generator().manual_seed(2)
    x, d = torch.randn(700, generator=draw), torch.rand(700, generator=draw)
    assert torch.equal(best_states(x, d, code), best_states_by_torch(x, d, code))


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_search_on_a_gpu_that_finds_other_paths_is_not_used(wrong: int, monkeypatch, caplog):
    def there(x: torch.Tensor, d: torch.Tensor, code: Code) -> torch.Tensor:
        return best_states_by_torch(x, d, code) + wrong

    monkeypatch.setattr(viterbi, "why_not_on_gpu", lambda *_: [])
    monkeypatch.setattr(viterbi, "_best_states_by_triton", there)
    viterbi._searches.cache_clear()
    assert viterbi._searches(Code(2, 8, MULTIPLIERS[12], 64), torch.device("cpu")) == (not wrong)
    assert ("finds other paths" in caplog.text) == bool(wrong)
    viterbi._searches.cache_clear()


@pytest.mark.parametrize(("bits", "most", "scalar"), [(2, 0.077, 0.1175), (3, 0.021, 0.0345)])
def test_error_on_normal_numbers(bits: int, most: float, scalar: float):
    """0.071 and 0.019 of the variance on many; the best scalar codes of as many bits have 0.1175 and 0.0345 (Max
    1960)."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(4))
    code = Code(bits, 12, MULTIPLIERS[12], 1024)
    scale = math.sqrt(1 - 4.0**-bits) / spread_of(code)
    values = scale * code.levels(best_states(x / scale, torch.ones_like(x), code))
    assert float((x - values).square().mean()) < most < scalar


def test_steps_after_the_sweep_lower_the_loss():
    losses = [
        float(trellis(WEIGHT, H, format_=FORMAT, refit=refit, sweeps=sweeps).loss_N.sum())
        for refit, sweeps in ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2))
    ]
    bare, *polished = losses
    exact = trellis(WEIGHT, H, format_=FORMAT)
    error = WEIGHT - exact.weight.dequantize(WEIGHT.dtype)
    assert polished == sorted(polished, reverse=True)
    assert polished[0] < float(torch.trace(error @ H @ error.t())) * 1.001
    assert polished[-1] < 0.95 * bare


def test_a_trellis_loses_less_than_a_grid_of_as_many_bits():
    for bits in (2, 3, 4):
        code = trellis(WEIGHT, H, format_=replace(FORMAT, bits=bits), act_order="static", refit=2, sweeps=1)
        grid = gptq(WEIGHT, H, grid=Grid(bits=bits, signed_scale=True, range_choice="mse"), refit=2, sweeps=2)
        error, other = (WEIGHT - one.weight.dequantize(WEIGHT.dtype) for one in (code, grid))
        assert float(torch.trace(error @ H @ error.t())) < 0.8 * float(torch.trace(other @ H @ other.t()))


def test_outputs_of_zero_stay_zero():
    weight = WEIGHT.clone()
    weight[5], weight[50:] = 0.0, 0.0
    found = trellis(weight, H, format_=FORMAT, refit=1, sweeps=1).weight.dequantize()
    assert not found[5].any()
    assert not found[50:].any()
    assert torch.isfinite(found).all()
    assert found[:5].any()


def test_rows_cut_inside_a_run_are_no_weight():
    found = trellis(WEIGHT, H, format_=FORMAT).weight
    whole = found.parts()
    joined = type(found).stacked([found.rows(slice(0, 40)), found.rows(slice(40, None))])
    assert all(torch.equal(part, whole[name]) for name, part in joined.parts().items())
    with pytest.raises(CompressError, match="cuts runs of 40 outputs"):
        type(found).stacked([found.rows(slice(40, None)), found.rows(slice(0, 40))]).parts()


@pytest.mark.usefixtures("trellis_loops")
def test_search_with_feedback_decides_chunk_by_chunk():
    """As torch does, with runs of outputs that end inside a chunk, and sequences that end inside a run."""
    code, length = Code(2, 10, MULTIPLIERS[10], 96), 75
    draw = torch.Generator().manual_seed(5)
    x, d = torch.randn(140, generator=draw), torch.rand(140, generator=draw) + 0.1
    feedback = torch.randn(140, length, generator=draw) / 16
    found = best_states(x, d, code, feedback)
    assert torch.equal(found, fed_back_by_torch(x, d, code, feedback))
    assert code.connected(found[:, None])
    assert not torch.equal(found, best_states(x, d, code))


def test_paths_of_coupled_outputs_cost_the_loss_less():
    draw = torch.Generator().manual_seed(6)
    rows, columns = WEIGHT.shape
    g = torch.randn(60, rows, generator=draw) @ (torch.eye(rows) + torch.randn(rows, rows, generator=draw) / 4)
    outputs = (g.t() @ g / 60 + 0.05 * torch.eye(rows)).to(H)

    def loss(of_outputs: torch.Tensor | None, refit: int, sweeps: int) -> float:
        made = trellis(WEIGHT, H, format_=FORMAT, refit=refit, sweeps=sweeps, outputs_NS=of_outputs)
        error = WEIGHT.to(H) - made.weight.dequantize(H.dtype)
        damped = H + POLISH_DAMP * H.diagonal().mean() * torch.eye(columns).to(H)
        found = float((outputs @ error @ damped * error).sum())
        if of_outputs is not None and refit:
            assert float(made.loss_N.sum()) == pytest.approx(found, rel=1e-4)
        return found

    coupled = [loss(outputs, *rounds) for rounds in ((0, 0), (1, 0), (1, 1), (2, 2))]
    assert coupled == sorted(coupled, reverse=True)
    assert coupled[0] < 0.9 * loss(None, 0, 0)
    assert coupled[-1] < 0.85 * loss(None, 2, 2)
