"""What holds for every pass that writes a mask. A new one joins `PRUNING` and gets all of it."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from pruning import Largest
from torch import Tensor

from compress.comm import Comm
from compress.passes.base import Pass
from compress.passes.sites import Site
from compress.passes.where import but, only
from compress.recipe import PASSES, pass_class

# One instance per pass that prunes, with the options that make it exact to repeat.
PRUNING: list[Pass] = [Largest(), Largest(share=0.25)]
DTYPES = {"model.layers.0.q_proj": torch.bfloat16, "model.layers.0.k_proj": torch.float16}

every_pass = pytest.mark.parametrize("one", PRUNING, ids=lambda one: f"{one.name}{PRUNING.index(one)}")


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = {name: torch.randn(rows, 32, generator=generator) for name, rows in zip(DTYPES, (12, 5), strict=True)}
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
    kinds = {type(one) for one in PRUNING}
    assert {pass_class(name) for name in PASSES if pass_class(name).writes == "mask"} <= kinds


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
def test_options_are_frozen_and_filters_keep_them(one: Pass) -> None:
    with pytest.raises(FrozenInstanceError):
        one.where = ()
    for combine in (only, but):
        part = combine(one, "*.q_proj")
        assert (part.writes, part.calibrated, type(part)) == ("mask", one.calibrated, type(one))
        assert part.wants("model.layers.0.q_proj") == (combine is only)
