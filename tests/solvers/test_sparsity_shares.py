"""One budget of zeros shared out between layers: as published, and against every other way to share it out."""

import itertools
import math
from collections.abc import Mapping
from copy import deepcopy
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build, tokens
from torch import Tensor

import compress
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Finding, Settled
from compress.solvers.sparsity_shares import LEVELS, STEPS, by_losses, by_rows, convex, steps


def losses_of(power: float, scale: float) -> Tensor:
    return torch.tensor([scale * level**power for level in LEVELS], dtype=torch.float64)


def test_shares_by_losses_are_the_best_of_all() -> None:
    """Three layers of other sizes; every way to share the budget out in steps of 1/32 loses as much or more."""
    losses = {"a": losses_of(2, 0.2), "b": losses_of(3, 0.9), "c": losses_of(4, 0.05)}
    sizes = {"a": 3200, "b": 6400, "c": 1600}
    curves = {name: 1 - torch.cat([torch.zeros(1), steps(loss).cumsum(0)]) for name, loss in losses.items()}
    curves = {name: curve - curve[-1] for name, curve in curves.items()}

    def lost(shares: dict[str, float]) -> float:
        return sum(float(curves[name][round((1 - share) * STEPS)]) for name, share in shares.items())

    found = by_losses(losses, sizes, 0.5, dict.fromkeys(sizes, 1.0))
    assert sum(found[name] * sizes[name] for name in sizes) == pytest.approx(5600)
    others = []
    for first, second in itertools.product(range(33), repeat=2):
        last = (5600 - first / 32 * 3200 - second / 32 * 6400) / 1600
        if 0 <= last <= 1:
            others.append(lost({"a": first / 32, "b": second / 32, "c": last}))
    assert lost(found) <= min(others) + 1e-3
    assert lost(found) < 0.9 * lost(dict.fromkeys(sizes, 0.5))


def test_a_curve_goes_through_what_is_known_and_hulls_are_below_it() -> None:
    losses = losses_of(2.5, 0.6)
    kept = steps(losses)
    assert kept.sum().item() == pytest.approx(1)
    for level, loss in zip(LEVELS, losses, strict=True):
        assert kept[round((1 - level) * STEPS) :].sum().item() == pytest.approx(loss.item())
    ragged = torch.tensor([1.0, 3.0, 0.5, 0.5, 2.0, 0.1], dtype=torch.float64)
    hull = convex(ragged)
    assert torch.all(hull[:-1] >= hull[1:])
    assert torch.all(hull.cumsum(0) >= ragged.cumsum(0) - 1e-12)
    assert hull.sum() == ragged.sum()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=5))
def test_whole_numbers_of_each_row_keep_the_budget(layers: list[tuple[int, int, float]]) -> None:
    shapes = {str(i): (rows, columns) for i, (rows, columns, _) in enumerate(layers)}
    shares = {str(i): share for i, (_, _, share) in enumerate(layers)}
    total = sum(rows * columns for rows, columns in shapes.values())
    zeros = sum(share * math.prod(shapes[name]) for name, share in shares.items())
    found = by_rows(shares, shapes, zeros / total)
    for name, (_, columns) in shapes.items():
        assert abs(found[name] - shares[name]) < 1 / columns + 1e-9
    made = sum(found[name] * math.prod(shapes[name]) for name in shapes)
    assert made <= zeros + 1e-6
    rising = [shapes[n][0] for n in shapes if found[n] * shapes[n][1] < int(shares[n] * shapes[n][1]) + 0.5]
    assert (
        made + min(rising, default=math.inf) > zeros - 1e-6 or made + max(r for r, _ in shapes.values()) > zeros - 1e-6
    )


@pytest.mark.first
@pytest.mark.parametrize("method", [compress.Wanda, compress.SparseGPT], ids=lambda method: method.name)
def test_a_run_gives_its_layers_shares_that_spend_the_budget(method: type) -> None:
    sparsities = {}
    for options in ({"allocate": "layer-loss"}, {"allocate": "layer-loss", "per": "layer"}):
        model = build("llama")
        result = compress.quantize(model, method(sparsity=0.6, **options), calibration=tokens(16))
        found = {layer.name: layer.figures["sparsity"] for layer in result.record.layers}
        weights = {layer.name: math.prod(layer.shape) for layer in result.record.layers}
        zeros = sum(found[name] * weights[name] for name in found)
        assert 0.6 * sum(weights.values()) - 64 < zeros <= 0.6 * sum(weights.values()) + 1e-6, options
        assert len(set(found.values())) > 1, options
        least, most = min(found.values()), max(found.values())
        assert any(f"{method.name} makes {least:.1%} (" in note for note in result.record.notes), options
        assert any(f" to {most:.1%} (" in note for note in result.record.notes), options
        sparsities[tuple(options.values())] = found


class Remembering(compress.Wanda):
    """Keeps what it was told about its layers, and what it made of each alone."""

    found: ClassVar[dict[str, Finding]] = {}
    alone: ClassVar[dict[str, Tensor]] = {}

    def pruned_alone(self, site: Site) -> dict[str, Tensor]:
        made = super().pruned_alone(site)
        self.alone.update(made)
        return made

    def settle_by_losses(self, found: Mapping[str, Finding]) -> Settled:
        self.found.update(found)
        return super().settle_by_losses(found)


@torch.no_grad()
def test_the_damage_of_a_layer_is_the_kl_of_the_model_with_that_layer_alone_pruned() -> None:
    model, ids = build("llama"), tokens(8)
    for parameter in model.parameters():
        parameter.mul_(6.0)  # so that predictions differ
    other = deepcopy(model)
    expected = model(input_ids=ids).logits.log_softmax(-1)
    Remembering.found.clear()
    Remembering.alone.clear()
    compress.quantize(model, Remembering(sparsity=0.6, allocate="layer-loss"), calibration=ids)
    assert len(Remembering.found) == len(Remembering.alone) == 14
    for name, weight in Remembering.alone.items():
        parameter = other.get_submodule(name).weight
        whole = parameter.data
        parameter.data = weight.to(whole.dtype)
        found = other(input_ids=ids).logits.log_softmax(-1)
        parameter.data = whole
        kl = (expected.exp() * (expected - found)).sum(-1).mean().item()
        assert kl > 1e-5
        assert Remembering.found[name].damage == pytest.approx(kl, rel=1e-2), name


@pytest.mark.first
@pytest.mark.parametrize("one_block", [False, True])
def test_a_layer_that_hardly_moves_the_predictions_loses_more(one_block: bool) -> None:
    """A thousandth of a layer has the same loss, as a part of what it returns."""
    shares, layer = [], "model.layers.0.self_attn.o_proj"
    for scale in (1.0, 1e-3):
        model = build("llama")
        for parameter in model.parameters():
            parameter.data *= 6.0
        model.get_submodule(layer).weight.data *= scale
        one = compress.Wanda(sparsity=0.6, allocate="layer-loss")
        result = compress.quantize(model, one, calibration=tokens(16), one_block=one_block)
        shares.append({each.name: each.figures["sparsity"] for each in result.record.layers})
    assert shares[1][layer] == max(shares[1].values()) > 0.9 > shares[0][layer]
