"""What holds for every pass that writes a mask. A new one joins `PRUNING` and gets all of it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from threading import Barrier

import pytest
import torch
from pruning import Largest
from thread_ranks import TwoRanks
from torch import Tensor

from compress.base.collectives import Comm, RowShard
from compress.passes.magnitude import Magnitude
from compress.passes.protocol.base import Pass, but, only
from compress.passes.protocol.recipe import PASSES, pass_class
from compress.passes.protocol.sites import Site
from compress.passes.sparsegpt import SparseGPT
from compress.passes.taylor import Taylor
from compress.passes.wanda import Wanda
from compress.weights.decision import Decision
from compress.weights.formats.dense import dense

DTYPES = {"model.layers.0.q_proj": torch.bfloat16, "model.layers.0.k_proj": torch.float16}
ROWS = dict(zip(DTYPES, (12, 5), strict=True))


def scored(one: Taylor) -> Pass:
    """As it is once it has seen gradients."""
    generator = torch.Generator().manual_seed(9)
    scores = {n: torch.rand(rows, 32, generator=generator, dtype=torch.float64) for n, rows in ROWS.items()}
    return one.settle_by_gradients({n: RowShard(score, len(score), Comm()) for n, score in scores.items()}).made


# One instance per pass that prunes, with the options that make it exact to repeat.
PRUNING: list[Pass] = [
    Largest(),
    Largest(share=0.25),
    Magnitude(),
    Magnitude(sparsity=0.3, per="layer"),
    Magnitude(pattern="1:4"),
    Wanda(),
    Wanda(pattern="2:4"),
    Wanda(sparsities=(("model.layers.0.k_proj", 0.75),)),
    SparseGPT(statistics="float64", drift=0.0),
    SparseGPT(statistics="float64", drift=0.0, per="layer", sparsity=0.7, act_order="static", steps=0),
    SparseGPT(statistics="float64", drift=0.0, pattern="2:4"),
    SparseGPT(statistics="float64", drift=0.0, pattern="4:8", act_order="group"),
    SparseGPT(statistics="float64", drift=0.0, sparsities=(("model.layers.0.k_proj", 0.75),)),
    scored(Taylor(sparsity=0.3)),
    scored(Taylor(per="layer")),
]

every_pass = pytest.mark.parametrize("one", PRUNING, ids=lambda one: f"{one.name}{PRUNING.index(one)}")


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = {name: torch.randn(rows, 32, generator=generator) for name, rows in ROWS.items()}
    weights["model.layers.0.q_proj"][3] = 0  # a dead output
    return weights


def make_site(one: Pass, weights: dict[str, Tensor]) -> Site:
    """With the statistics that the pass asks for, of inputs of its width."""
    inputs = torch.randn(200, 32, generator=torch.Generator().manual_seed(8))
    statistics = {name: make(32, torch.device("cpu")) for name, make in one.needs().items()}
    for statistic in statistics.values():
        statistic.update(inputs, None)
    return Site(weights, {name: statistic.result() for name, statistic in statistics.items()}, DTYPES, Comm())


def test_every_pass_that_prunes_is_here() -> None:
    kinds = [pass_class(name) for name in PASSES if pass_class(name).writes == "mask"]
    assert all(any(isinstance(one, kind) for one in PRUNING) for kind in kinds)


@every_pass
def test_zeros_are_where_the_mask_says_and_stay_in_the_dtype_of_the_model(one: Pass) -> None:
    weights = make_weights()
    decisions = one.apply(make_site(one, weights))
    assert decisions.keys() == weights.keys()
    assert all(torch.equal(weights[name], before) for name, before in make_weights().items())
    for name, decision in decisions.items():
        kept, values = decision.kept, decision.weight.dequantize()
        assert kept is not None
        assert (kept.shape, kept.dtype, values.dtype) == (weights[name].shape, torch.bool, DTYPES[name])
        assert not values[~kept].any()
        assert 0 < kept.float().mean() < 1


@every_pass
def test_the_same_is_decided_again(one: Pass) -> None:
    first, second = (one.apply(make_site(one, make_weights())) for _ in range(2))
    for name, decision in first.items():
        assert torch.equal(decision.kept, second[name].kept)
        assert torch.equal(decision.weight.dequantize(), second[name].weight.dequantize())


@every_pass
def test_two_ranks_decide_what_one_decides(one: Pass) -> None:
    site, desk, barrier = make_site(one, make_weights()), [None, None], Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        work = [threads.submit(one.apply, replace(site, comm=TwoRanks(rank, desk, barrier))) for rank in (0, 1)]
        ranks = [each.result() for each in work]
    for name, alone in one.apply(site).items():
        for decisions in ranks:
            assert torch.equal(decisions[name].kept, alone.kept)
            assert torch.equal(decisions[name].weight.dequantize(), alone.weight.dequantize())


@every_pass
def test_a_layer_is_decided_alone_as_with_its_neighbours(one: Pass) -> None:
    together = one.apply(make_site(one, make_weights()))
    for name, weight in make_weights().items():
        (alone,) = one.apply(make_site(one, {name: weight})).values()
        assert torch.equal(alone.kept, together[name].kept)
        assert torch.equal(alone.weight.dequantize(), together[name].weight.dequantize())


@pytest.mark.parametrize("one", [one for one in PRUNING if one.keeps_zeros], ids=lambda one: f"{one.name}")
def test_what_adds_to_a_mask_leaves_its_zeros_and_counts_them(one: Pass) -> None:
    """Of two layers one has a mask already: more than the half of a row, and a row of nothing else."""
    weights, (first, _) = make_weights(), DTYPES
    kept = weights[first].abs() > weights[first].abs().median()
    kept[5] = False
    site = make_site(one, {**weights, first: weights[first] * kept})
    site = replace(site, before=weights, decided={first: Decision(dense(site.weights[first]), kept=kept)})
    decisions = one.apply(site)
    assert not decisions[first].kept[~kept].any()
    assert not decisions[first].weight.dequantize()[~decisions[first].kept].any()
    fresh = one.apply(make_site(one, weights))
    assert all(torch.equal(d.kept, fresh[n].kept) for n, d in decisions.items() if n != first)
    assert decisions[first].kept.sum() <= fresh[first].kept.sum()


@every_pass
def test_options_are_frozen_and_filters_keep_them(one: Pass) -> None:
    with pytest.raises(FrozenInstanceError):
        one.where = ()
    for combine in (only, but):
        part = combine(one, "*.q_proj")
        assert (part.writes, part.calibrated, type(part)) == ("mask", one.calibrated, type(one))
        assert part.wants("model.layers.0.q_proj") == (combine is only)
