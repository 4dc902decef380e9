"""Pruning while training: the schedule, the masks, what penalties do to weights, and lottery tickets."""

import math

import pytest
import torch
from models import build, tokens
from torch import nn

import compress
from compress.base.collectives import Comm
from compress.base.progress import Silent
from compress.model.layers import Layer
from compress.passes.train import Train
from compress.recipes.studies.quality.tickets import Lottery, draw, lesson
from compress.train.inputs.samples import Rows
from compress.train.rounding.penalties import Penalties, penalized_weights
from compress.train.rounding.pruning import Prunable, pattern_at, progress_at, prune_to
from compress.weights.masks import Pattern, pattern_of

DATA = {"calibration": tokens(8), "training": tokens(16, seed=4), "batch_size": 4}
FEW = {"steps": 8, "rows": 8, "learning_rate": 1e-3, "held_out": 0.25, "prune_every": 2}


def of(*matrices):
    """Layers of these weights [N, K], of which everything stays yet."""
    layers = [Layer(str(i), nn.Linear(m.shape[1], m.shape[0], bias=False)) for i, m in enumerate(matrices)]
    for layer, matrix in zip(layers, matrices, strict=True):
        layer.parameter.data.copy_(matrix)
    return {layer.name: Prunable(layer, layer.parameter, torch.ones(layer.shape, dtype=torch.bool)) for layer in layers}


def test_the_schedule_is_the_papers():
    """Equation 1 of Zhu & Gupta by hand, with updates every dt steps; the last look is at the end of the way."""
    options = Train(sparsity=0.8, prune_from=0.1, prune_until=0.55, prune_every=15)
    found = {t: p for t in range(100) if (p := progress_at(t, 100, options)) is not None}
    assert list(found) == [10, 25, 40, 55]
    for i, (t, progress) in enumerate(found.items()):
        s_t = 0.8 + (0.0 - 0.8) * (1 - (t - 10) / (3 * 15)) ** 3
        assert 0.8 * progress == pytest.approx(s_t), i
    assert progress_at(0, 1, Train(sparsity=0.5)) == 1  # a single step has all of it
    assert [pattern_at(Pattern(2, 4), p) for p in (0.4, 0.5, 0.9, 1.0)] == [None, (3, 4), (3, 4), (2, 4)]


def test_masks_take_the_smallest_and_give_nothing_back():
    torch.manual_seed(0)
    one, two = torch.randn(8, 12), 3 * torch.randn(4, 16)
    layers = of(one, two)
    prune_to(layers, 0.25, "model", Comm())
    everything = torch.cat([one.flatten(), two.flatten()]).abs()
    gone = torch.cat([~each.kept.flatten() for each in layers.values()])
    assert gone.sum() == 40
    assert everything[gone].max() < everything[~gone].min() * (1 + 2**-9)  # to a bin of the ranking
    before = {name: each.kept.clone() for name, each in layers.items()}
    for each in layers.values():
        each.parameter.data.copy_(torch.randn(each.kept.shape))  # other weights are the smallest now
    for per in ("layer", "row"):
        prune_to(layers, 0.5, per, Comm())
        for name, each in layers.items():
            assert not (each.kept & ~before[name]).any()
    assert (layers["0"].kept.sum(1) <= 6).all()


PRUNED = {
    "share": ([Train(sparsity=0.6, **FEW)], 0.6),
    "all layers as one": ([Train(sparsity=0.6, prune_per="model", **FEW)], 0.6),
    "pattern on codes": ([compress.RTN(scheme="w4a16", group_size=16), Train(pattern="2:4", **FEW)], 0.5),
    "on top of a mask": ([compress.Magnitude(pattern="2:4"), Train(sparsity=0.75, **FEW)], 0.75),
}


@pytest.mark.parametrize("case", PRUNED)
def test_what_training_prunes_is_zero_in_the_result(tmp_path, case):
    passes, share = PRUNED[case]
    build("llama").save_pretrained(tmp_path / "model")
    result = compress.quantize(tmp_path / "model", passes, output=tmp_path / "out", verify=False, **DATA)
    said = [line["sparsity"] for line in result.record.training[0]["steps"] if "sparsity" in line]
    assert said == sorted(said)
    assert said[-1] == pytest.approx(share, abs=2e-3)
    loaded = compress.load(tmp_path / "out", dequantize=True)
    weights = [p for name, p in loaded.named_parameters() if "proj" in name]
    assert sum(int((p == 0).sum()) for p in weights) >= share * sum(p.numel() for p in weights) - len(weights)
    if "pattern" in case:
        assert all(int((p.unflatten(1, (-1, 4)) != 0).sum(-1).max()) <= 2 for p in weights)
    if "mask" in case:
        assert all(pattern_of((p != 0) | (p == 0)) is None for p in weights)
        dense = compress.quantize(build("llama"), passes[:1], **DATA).model
        for name, p in dense.named_parameters():
            assert "proj" not in name or not loaded.get_parameter(name)[p == 0].any()


class StopAt(Silent):
    def step(self, done: int, total: int, what: str) -> None:
        if what.startswith("step 6"):
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_keeps_its_masks(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    common = {"passes": [Train(sparsity=0.6, save_every=5, **FEW)], "verify": False, **DATA}
    whole = compress.quantize(tmp_path / "model", output=tmp_path / "whole", **common)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(tmp_path / "model", output=tmp_path / "out", reporter=StopAt(), **common)
    again = compress.quantize(tmp_path / "model", output=tmp_path / "out", resume=True, **common)
    assert again.record.training[0]["resumed"] == 5
    for (name, p), q in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_proximal_step_minimizes_the_penalty_beside_the_distance():
    """argmin_v 1/2 |v - w|^2 + r (l1 |v|_1 + lasso sum_g sqrt(n_g) |v_g|), found by its subgradient."""
    torch.manual_seed(0)
    rate, l1, lasso = 0.1, 0.5, 1.5
    for groups, dim in (("outputs", 0), ("inputs", 1)):
        (each,) = of(torch.randn(6, 5)).values()
        each.parameter.data[:, 0] *= 0.1
        each.parameter.data[0] *= 0.1
        w = each.parameter.detach().clone()
        Penalties(penalized_weights([each.layer], groups), l1, lasso, Comm())(rate)
        size = w.numel() / w.shape[dim]
        some_zero = False
        for v_g, w_g in zip(each.parameter.detach().unbind(dim), w.unbind(dim), strict=True):
            if not v_g.any():
                some_zero = True
                soft = (w_g.abs() - rate * l1).clamp(min=0)
                assert soft.norm() <= rate * lasso * size**0.5
                continue
            rest = v_g - w_g + rate * lasso * math.sqrt(size) * v_g / v_g.norm()
            inside = torch.where(v_g == 0, rest.clamp(-rate * l1, rate * l1), -rate * l1 * v_g.sign())
            torch.testing.assert_close(rest, inside, atol=1e-6, rtol=0)
        assert some_zero


def test_penalties_reach_the_layers_of_a_run():
    few = {key: value for key, value in FEW.items() if key != "prune_every"}
    model = compress.quantize(build("llama"), [Train(l1=5.0, **few)], **DATA).model
    plain = compress.quantize(build("llama"), [Train(**few)], **DATA).model
    for name, p in model.named_parameters():
        zeros, usual = (float((q == 0).double().mean()) for q in (p, plain.get_parameter(name)))
        assert zeros > usual + 0.2 if "proj" in name else zeros == usual, name


def samples(count: int) -> Rows:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return Rows({"input": x, "labels": (x[:, 0] > 0).long()})


def test_rewinding_goes_back_to_the_weights_or_to_the_rates():
    options = Train(teacher="none", logits=0, task=1, steps=12, rows=8, learning_rate=1e-2, held_out=0, save_every=0)
    for rewinds in ("weights", "learning-rate"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
        how = Lottery(sparsity=0.5, rate=0.3, rewind=rewinds, to=4)
        found: list[float] = []
        this = lesson([Layer("0", model[0]), Layer("2", model[2])], samples(40), options)
        ticket = draw(model, this, how, found.append)
        assert how.shares == pytest.approx([0.3, 0.5])
        assert found == pytest.approx([0, 0.3, 0.5], abs=0.02)
        dense, *rounds = ticket.histories
        for each in rounds:  # the rates of the steps that come after it
            assert [line["rate"] for line in each.steps] == [line["rate"] for line in dense.steps[4:]]
        assert all((model[int(name)].weight[~kept] == 0).all() for name, kept in ticket.masks.items())
        assert {type(module) for module in model} == {nn.Linear, nn.ReLU}
        # A ticket begins with the numbers of step 4, or with those that it was left with, of which zeros are some.
        zeros = int((ticket.start["0.weight"] == 0).sum())
        assert zeros == (0 if rewinds == "weights" else round(0.3 * 60))
