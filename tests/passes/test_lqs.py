"""Codes, a low rank and exact weights in turns: what each turn finds, and that none of it is worse than codes alone."""

import pytest
import torch
from torch import Tensor

import compress
from compress.base.collectives import Comm
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Finding
from compress.solvers.gptq import gptq
from compress.solvers.low_rank import approximate
from compress.weights.formats.lowrank import LowRankFactors
from compress.weights.grid import Quantized

ROWS, COLUMNS, RANK = 24, 32, 3
PLAIN = {"drift": 0.0, "shrink": False, "clip": False, "refit": 0, "sweeps": 0, "statistics": "float64"}
COARSE = {"scheme": "w2a16", "group_size": 16, "rank": RANK}


def drawn(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHT = drawn(ROWS, COLUMNS, 0)
WEIGHT[torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(9)) < 0.02] *= 6
X = drawn(400, COLUMNS, 1) @ drawn(COLUMNS, COLUMNS, 2)
HESSIAN = X.t() @ X / len(X)


def site_of(one: compress.LQS, weights: dict[str, Tensor], x: Tensor = X, dtype: torch.dtype = torch.float64) -> Site:
    statistic = one.needs()["hessian"](x.shape[1], torch.device("cpu"))
    statistic.update(x, x if one.drift else None)
    return Site(weights, {"hessian": statistic.result()}, dict.fromkeys(weights, dtype), Comm())


def decided(**options):
    one = compress.LQS(**{**COARSE, **PLAIN, **options})
    return one.apply(site_of(one, {"a": WEIGHT}))["a"]


def loss(values: Tensor) -> float:
    error = WEIGHT - values
    return torch.einsum("ni,ij,nj->", error, HESSIAN, error).item()


def transcribed(iterations: int) -> list[float]:
    """The losses of all turns: codes alone, then low rank of the rest, codes of the rest, and so on."""
    grid = compress.LQS(**COARSE, **PLAIN).weight_grid()
    codes = gptq(WEIGHT, HESSIAN, grid=grid).weight.dequantize()
    losses, low = [loss(codes)], torch.zeros_like(WEIGHT)
    for turn in range(iterations + 1):
        if turn:
            codes = gptq(WEIGHT - low, HESSIAN, grid=grid).weight.dequantize()
        low = approximate(Comm(), 0, WEIGHT - codes, HESSIAN, RANK, torch.float64, 16).dequantize()
        losses.append(loss(codes + low))
    return losses


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_it_is_codes_and_low_rank_each_of_what_the_other_leaves(iterations):
    decision = decided(iterations=iterations)
    losses = transcribed(iterations)
    assert loss(decision.weight.dequantize()) == pytest.approx(min(losses))
    energy = loss(torch.zeros_like(WEIGHT))
    assert decision.figures["loss"] == pytest.approx(min(losses) / energy)
    assert decision.figures["codes_loss"] == pytest.approx(losses[0] / energy)
    assert decision.figures["rank"] == RANK


@pytest.mark.parametrize("more", [{}, {"factor_bits": 8}, {"outliers": 0.03}], ids=str)
def test_more_rounds_are_never_worse_and_all_are_better_than_codes_alone(more):
    losses = [loss(decided(iterations=n, **more).weight.dequantize()) for n in range(5)]
    assert losses == sorted(losses, reverse=True)
    alone = compress.GPTQ(**{k: v for k, v in {**COARSE, **PLAIN}.items() if k != "rank"})
    assert losses[0] < loss(alone.apply(site_of(alone, {"a": WEIGHT}))["a"].weight.dequantize())


def test_where_nothing_is_gained_codes_stay_alone():
    one = compress.LQS(**COARSE, **PLAIN)
    decision = one.apply(site_of(one, {"a": torch.zeros_like(WEIGHT)}))["a"]
    assert [type(term) for term in decision.weight.terms] == [Quantized]
    assert (decision.figures["rank"], decision.figures["loss"]) == (0, 0.0)


def test_exact_weights_are_gptqs_and_codes_are_zero_beneath():
    codes, low, exact = decided(outliers=0.03, iterations=1).weight.terms
    assert isinstance(low.format, LowRankFactors)
    places = exact.dequantize() != 0
    assert places.double().mean() == pytest.approx(0.03, rel=0.4)
    assert not codes.dequantize()[places].any()


@pytest.mark.parametrize("shape", [(40, 16), (16, 48)], ids=str)
def test_full_rank_leaves_nothing(shape):
    rows, columns = shape
    weight, x = drawn(rows, columns, 5), drawn(300, columns, 6)
    one = compress.LQS(**{**COARSE, **PLAIN, "rank": 16})
    decision = one.apply(site_of(one, {"a": weight}, x))["a"]
    assert decision.figures["loss"] < 1e-12
    torch.testing.assert_close(decision.weight.dequantize(), weight)


def test_with_few_tokens_it_gets_what_they_bear_out():
    one = compress.LQS(**COARSE)
    decision = one.apply(site_of(one, {"a": WEIGHT.float()}, X[:20].float()))["a"]
    assert decision.figures["solution"] in ("rounding", "gptq without drift", "gptq")
    few = compress.LQS(**COARSE).apply(site_of(one, {"a": WEIGHT.float()}, X[:1].float()))["a"]
    assert few.figures["solution"] == "rounding"
    assert few.figures["rank"] == 0
    assert few.figures["codes_loss"] == few.figures["loss"]


def test_its_budget_goes_by_what_rounding_leaves():
    other = WEIGHT * 1e-3
    other[:, 5] *= 100
    one = compress.LQS(**{**COARSE, **PLAIN, "allocate": "layer-loss"})
    found = one.look(site_of(one, {"a": WEIGHT, "b": other}))
    made = one.settle({name: Finding("block", tuple(WEIGHT.shape), (each,)) for name, each in found.items()})
    settled = made.made
    assert not made.alone
    assert sum(rank for _, rank in settled.ranks) == 2 * RANK
    decisions = settled.apply(site_of(one, {"a": WEIGHT, "b": other}))
    assert {name: d.figures["rank"] for name, d in decisions.items()} == dict(settled.ranks)
