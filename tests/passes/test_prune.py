"""Masks: exactly as many as asked for, whatever the scores are, and those of the published algorithms."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build, tokens
from published import DAMP, make_site, mean_square, realistic_layer, row_losses
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import compress
from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.passes.options.prune import Prune
from compress.passes.protocol.recipe import describe, parse_recipe
from compress.passes.protocol.sites import Site
from compress.solvers import sparsegpt
from compress.solvers.hessian_with_drift import POLISH_DAMP, add_damping
from compress.solvers.sparsegpt import fit_survivors
from compress.weights.decision import Decision
from compress.weights.formats.dense import dense
from compress.weights.masks import Pattern, largest_of_each, largest_share, parse_pattern, pattern_of, pruned_before

PLAIN = {"drift": 0.0, "shrink": False, "steps": 0, "statistics": "float64"}  # the paper's


def published_wanda(weight: Tensor, x: Tensor, prune_n: int, prune_m: int, sparsity: float) -> Tensor:
    """Which weights stay, arXiv 2306.11695, weight by weight. Zero are `prune_n` of `prune_m` inputs, or a share of
    each output."""
    rows, columns = weight.shape
    kept = torch.ones_like(weight, dtype=torch.bool)
    length, count = (prune_m, prune_n) if prune_m else (columns, int(columns * sparsity))
    for i in range(rows):
        for first in range(0, columns, length):
            score = [
                abs(float(weight[i, j])) * float(x[:, j].square().sum().sqrt()) for j in range(first, first + length)
            ]
            for place in sorted(range(length), key=lambda place, score=score: score[place])[:count]:
                kept[i, first + place] = False
    return kept


def published_sparsegpt(
    weight: Tensor, hessian: Tensor, keep: tuple[int, int] | None, sparsity: float, layer: bool, block: int = 128
) -> tuple[Tensor, Tensor]:
    """(pruned weight, which stay), arXiv 2301.00774, algorithm 1, column by column in float64, by inverses."""
    rows, columns = weight.shape
    w = weight.clone()
    h = hessian + DAMP * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    kept = torch.ones_like(weight, dtype=torch.bool)
    block = keep[1] if keep else block
    for j in range(columns):
        if j % block == 0:
            last = min(j + block, columns)
            score = w[:, j:last] ** 2 / upper.diagonal()[j:last] ** 2
            if keep:
                zeros = [(block - keep[0])] * rows
            elif layer:
                zeros = [int(rows * last * sparsity) - int(rows * j * sparsity)]
                score = score.reshape(1, -1)
            else:
                zeros = [int(last * sparsity) - int(j * sparsity)] * rows
            lost = torch.zeros_like(score, dtype=torch.bool)
            for i, count in enumerate(zeros):
                lost[i, torch.argsort(score[i])[:count]] = True
            kept[:, j:last] = ~lost.reshape(rows, -1)
        value = torch.where(kept[:, j], w[:, j], 0.0)
        error = (w[:, j] - value) / upper[j, j]
        w[:, j:] -= error[:, None] * upper[j, j:]
        w[:, j] = value
    return w, kept


def site_of(one: Prune, weights: dict[str, Tensor], x: Tensor) -> Site:
    """With the statistics that the pass asks for, and values stored in float64."""
    statistics = {name: make(x.shape[1], torch.device("cpu")) for name, make in one.needs().items()}
    for statistic in statistics.values():
        statistic.update(x, x)
    found = {name: statistic.result() for name, statistic in statistics.items()}
    return Site(weights, found, dict.fromkeys(weights, torch.float64), Comm())


def applied(one: Prune, weight: Tensor, x: Tensor) -> Decision:
    return one.apply(site_of(one, {"a": weight}, x))["a"]


# Scores that are often equal, and groups of zeros.
few_values = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 1e-30, 3e38])


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.integers(2, 9))
def test_exactly_so_many_of_each_stay(data: st.DataObject, rows: int, groups: int, length: int) -> None:
    pattern = Pattern(data.draw(st.integers(1, length - 1)), length)
    count = rows * groups * length
    values = data.draw(st.lists(few_values, min_size=count, max_size=count))
    score = torch.tensor(values).view(rows, groups * length)
    kept = largest_of_each(score, pattern)
    assert torch.all(kept.view(rows, groups, length).sum(-1) == pattern.kept)
    grouped, stays = score.view(-1, length), kept.view(-1, length)
    assert torch.all(grouped.masked_fill(~stays, torch.inf).amin(1) >= grouped.masked_fill(stays, -1).amax(1))
    weight = score * torch.randn(score.shape, generator=torch.Generator().manual_seed(count)).sign()
    for one in (compress.Magnitude(pattern=str(pattern)), compress.Wanda(pattern=str(pattern))):
        decision = applied(one, weight.double(), torch.zeros(3, score.shape[1], dtype=torch.float64))
        assert torch.equal(decision.kept, kept)  # no input is active: by size
        assert torch.equal(decision.weight.dequantize(), weight.double() * kept)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 99), st.booleans())
def test_exactly_a_share_becomes_zero(rows: int, columns: int, percent: int, together: bool) -> None:
    score = torch.randint(0, 3, (rows, columns), generator=torch.Generator().manual_seed(percent)).float()
    places = columns * rows if together else columns
    pruned = pruned_before(places, percent / 100)
    assert pruned == places * percent // 100
    kept = largest_share(score, pruned, together)
    left = kept.sum() if together else kept.sum(1)
    assert torch.all(left == places - pruned)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(2, 6), st.sampled_from(["none", "group"]), st.integers(0, 99))
def test_sparsegpt_keeps_exactly_so_many_of_each(rows: int, groups: int, length: int, order: str, seed: int) -> None:
    weight, x = realistic_layer(rows, groups * length, seed, tokens=50)
    weight[0] = 0
    weight[:, :length] = weight[:, :1]
    x[:, 0] = 0
    pattern = f"{1 + seed % (length - 1)}:{length}"
    one = compress.SparseGPT(pattern=pattern, act_order=order, drift=0.0, statistics="float64")
    decision = applied(one, weight, x)
    values = decision.weight.dequantize()
    assert torch.all(decision.kept.view(rows, groups, length).sum(-1) == 1 + seed % (length - 1))
    assert torch.all(values[~decision.kept] == 0)
    assert torch.isfinite(values).all()
    assert not values[0].any()


@pytest.mark.parametrize("options", [{"pattern": "2:4"}, {"pattern": "1:3"}, {"sparsity": 0.6}, {}], ids=str)
def test_wanda_is_the_published_one(options: dict[str, object]) -> None:
    weight, x = realistic_layer(7, 48, seed=31)
    one = compress.Wanda(**options)
    pattern = one.of_each or Pattern(0, 0)
    decision = applied(one, weight, x)
    kept = published_wanda(weight, x, pattern.length - pattern.kept, pattern.length, one.sparsity)
    assert torch.equal(decision.kept, kept)
    assert torch.equal(decision.weight.dequantize(), weight * kept)


def test_inputs_that_are_never_active_are_pruned_first_and_among_themselves_by_size() -> None:
    weight, x = realistic_layer(5, 32, seed=32)
    x[:, 4:9] = 0
    kept = applied(compress.Wanda(sparsity=0.125), weight, x).kept
    assert torch.all(kept.sum(1) == 28)
    for row, stays in zip(weight, kept, strict=True):
        assert torch.equal((~stays).nonzero().flatten(), row[4:9].abs().argsort()[:4].sort().values + 4)


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({"pattern": "2:4"}, 96),
        ({"pattern": "3:8"}, 160),
        ({"sparsity": 0.5}, 300),
        ({"sparsity": 0.7, "per": "layer"}, 300),
        ({"sparsity": 0.25, "per": "layer"}, 64),
    ],
    ids=str,
)
def test_sparsegpt_is_the_published_one(options: dict[str, object], columns: int) -> None:
    weight, x = realistic_layer(6, columns, seed=33)
    one = compress.SparseGPT(**options, **PLAIN)
    decision = applied(one, weight, x)
    keep = None if one.of_each is None else tuple(one.of_each)
    values, kept = published_sparsegpt(weight, mean_square(x), keep, one.sparsity, one.per == "layer")
    assert torch.equal(decision.kept, kept)
    torch.testing.assert_close(decision.weight.dequantize(), values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("options", [{"pattern": "2:4"}, {"sparsity": 0.6}], ids=str)
def test_survivors_come_to_the_optimum_in_the_mask(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsegpt, "LEAST_GAIN", 0.0)
    weight, x = realistic_layer(4, 48, seed=34, tokens=2000)
    hessian, losses = mean_square(x), []
    hessian = add_damping(hessian, POLISH_DAMP + len(hessian) / len(x))  # as far as the tokens carry
    for steps in (0, 2, 20, 400):
        one = compress.SparseGPT(**options, **{**PLAIN, "steps": steps})
        decision = applied(one, weight, x)
        losses.append(row_losses(weight - decision.weight.dequantize(), hessian).sum())
    assert losses[0] > losses[1] > losses[2] >= losses[3] * (1 - 1e-12)
    best = 0.0
    for row, stays in zip(weight, decision.kept, strict=True):
        own = hessian[stays][:, stays]
        error = row.clone()
        error[stays] -= torch.linalg.solve(own, (hessian @ row)[stays])
        best += float(error @ hessian @ error)
    assert losses[3] == pytest.approx(best, rel=1e-6)
    wanda = applied(compress.Wanda(**options), weight, x)
    assert losses[1] < 0.8 * row_losses(weight - wanda.weight.dequantize(), hessian).sum()


def test_survivors_stop_once_a_step_gains_little_and_each_row_by_itself() -> None:
    weight, x = realistic_layer(24, 96, seed=37, tokens=2000)
    hessian = add_damping(mean_square(x), 0.01)
    kept = compress.SparseGPT(sparsity=0.6).choice("").kept(weight.abs(), None)
    kept[0] = True  # has nothing to make up for
    asked = Multiplications()
    with asked:
        found = fit_survivors(weight, weight * kept, hessian, kept)
    assert not found[~kept].any()
    assert torch.equal(found[0], weight[0])
    lost = [row_losses(weight - values, hessian) for values in (weight * kept, found)]
    best = torch.stack([row - stays * row for row, stays in zip(weight, kept, strict=True)])
    for row, stays, error in zip(weight, kept, best, strict=True):
        error[stays] = row[stays] - torch.linalg.solve(hessian[stays][:, stays], (hessian @ row)[stays])
    least = row_losses(best, hessian)
    assert (lost[1] - least <= 0.02 * (lost[0] - least)).all()
    steps = asked.rows / len(weight) - 1  # one product is of the residual at the start
    assert 2 < steps < 16, "of 64"
    parts = [
        fit_survivors(weight[part], (weight * kept)[part], hessian, kept[part]) for part in (slice(7), slice(7, None))
    ]
    torch.testing.assert_close(torch.cat(parts), found)


class Multiplications(TorchDispatchMode):
    """Counts the rows that are multiplied by a matrix."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.rows += len(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [0, 24, 90])
def test_very_few_tokens_do_no_harm(count: int) -> None:
    weight, x = realistic_layer(200, 96, seed=35)
    site = make_site({"a": weight}, x[:count])
    decision = compress.SparseGPT(pattern="2:4", drift=0.0).apply(site)["a"]
    assert torch.all(decision.kept.view(200, -1, 4).sum(-1) == 2)
    assert decision.figures["solution"] in ("wanda", "sparsegpt")
    if not count:  # then wanda is magnitude
        assert torch.equal(decision.kept, applied(compress.Magnitude(pattern="2:4"), weight, x).kept)


def test_a_second_mask_is_of_what_the_first_has_left() -> None:
    weight, x = realistic_layer(6, 64, seed=36)
    first = applied(compress.Magnitude(sparsity=0.25), weight, x)
    for one in (compress.Magnitude(), compress.Wanda(), compress.SparseGPT(drift=0.0)):
        site = site_of(one, {"a": first.weight.dequantize()}, x)
        decided = {"a": Decision(dense(weight), kept=first.kept)}
        kept = one.apply(replace(site, decided=decided, before={"a": weight}))["a"].kept
        assert not kept[~first.kept].any()
        assert torch.all(kept.sum(1) == 32)


@pytest.mark.parametrize("word", ["2:4", "4:8", "1:4", "3:8"])
def test_the_pattern_of_a_mask_is_found(word: str) -> None:
    score = torch.rand(16, 64, generator=torch.Generator().manual_seed(1))
    assert str(pattern_of(largest_of_each(score, parse_pattern(word)))) == word
    assert pattern_of(largest_share(score, 32, together=False)) is None
    assert pattern_of(torch.zeros(3, 8, dtype=torch.bool)) is None


def test_options_say_what_they_come_to_and_are_read_back() -> None:
    for one, sparsity in (
        (compress.Magnitude(), 0.5),
        (compress.Wanda(pattern="1:3"), 1 - 1 / 3),
        (compress.SparseGPT(sparsity=0.7, per="layer"), 0.7),
    ):
        assert one.sparsity == sparsity
        assert parse_recipe(describe([one]), "here") == (one,)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pattern": "2:4", "sparsity": 0.7}, "pattern 2:4 makes 0.5 of weights zero, not sparsity 0.7"),
        ({"pattern": "2:4", "per": "layer"}, "per layer has no say in pattern 2:4"),
        ({"pattern": "4:4"}, "pattern '4:4'; allowed: N:M"),
        ({"pattern": "half"}, "pattern 'half'; allowed: N:M"),
        ({"sparsity": 1.0}, "sparsity 1.0; allowed: above 0, below 1"),
        ({"per": "block"}, "per 'block'; allowed: row, layer"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, object], says: str) -> None:
    for kind in (compress.Magnitude, compress.Wanda, compress.SparseGPT):
        with pytest.raises(InputError, match=says):
            kind(**options)


def test_a_run_in_memory_prunes_behind_what_is_pruned_and_rounds_survivors() -> None:
    model = build("llama")
    # The second mask adds to the first, and GPTQ leaves the zeros of both.
    recipe = [compress.Magnitude(sparsity=0.25), compress.SparseGPT(pattern="2:4"), compress.GPTQ(group_size=16)]
    compress.quantize(model, recipe, calibration=tokens(16, 16))
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            assert torch.all((parameter != 0).view(len(parameter), -1, 4).sum(-1) <= 2)


def test_widths_that_a_pattern_does_not_divide_are_refused_before_any_work() -> None:
    with pytest.raises(InputError, match=r"pattern 3:5 needs inputs in multiples of 5; model\.layers\.0\..* has 32"):
        compress.quantize(build("llama"), compress.Magnitude(pattern="3:5"))
