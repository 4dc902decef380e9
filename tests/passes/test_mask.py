"""Weights that an earlier pass has pruned: they stay exactly zero, and GPTQ's survivors make up for them."""

import copy
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest
import torch
from combinations import every, pairs
from models import build, tokens
from pruning import Largest, largest
from published import (
    GRIDS,
    assert_same_decisions,
    assert_same_quantized,
    make_grid,
    make_site,
    mean_square,
    published_gptq,
    realistic_layer,
    row_losses,
)
from torch import Tensor

import compress
from compress.base.errors import InputError
from compress.engine.layer_versions import Versions
from compress.model.layers import Layer
from compress.passes.binary import Binary
from compress.passes.gptq import GPTQ
from compress.passes.protocol.base import Aspect
from compress.passes.protocol.sites import Site
from compress.passes.rtn import RTN
from compress.solvers.gptq import gptq
from compress.solvers.hessian_with_drift import POLISH_DAMP, add_damping
from compress.weights.decision import Decision
from compress.weights.grid import Grid, Quantized, quantize


@dataclass(frozen=True, kw_only=True)
class Magnitude(Largest):
    """Its survivors are codes of 8 bits: a mask may come with any term."""

    name: ClassVar[str] = "magnitude"

    def stands_for(self, weight: Tensor, dtype: torch.dtype) -> Quantized:
        return quantize(weight, Grid(bits=8, granularity="group", group_size=16), dtype)


@dataclass(frozen=True, kw_only=True)
class Careless(RTN):
    """A pass that says nothing about zeros."""

    name: ClassVar[str] = "careless"
    keeps_zeros: ClassVar[bool] = False


def pruned_site(weights: dict[str, Tensor], x: Tensor, kept: dict[str, Tensor], before: bool = True) -> Site:
    """The site behind a pass that has pruned the layers of `kept`."""
    site = make_site({n: w * kept[n] if n in kept else w for n, w in weights.items()}, x)
    decided = {n: Decision(quantize(site.weights[n], Grid(bits=8)), kept=mask) for n, mask in kept.items()}
    return replace(site, decided=decided, before={n: weights[n] for n in kept} if before else {})


def assert_zero_where_pruned(quantized: Quantized, kept: Tensor) -> None:
    """In the values, and in the codes: at the zero point."""
    assert torch.all(quantized.dequantize()[~kept] == 0)
    groups = quantized.codes.double().unflatten(1, (quantized.scale.shape[1], -1))
    if quantized.zero_point is not None:
        groups = groups - quantized.zero_point.double().unsqueeze(-1)
    assert torch.all(groups.flatten(1)[~kept] == 0)


@every(
    ("name", "act_order", "group_size", "clip", "bits"),
    pairs([*GRIDS], ["none", "static", "group"], [32, -1], [False, True], [3, 4]),
)
def test_codes_are_those_of_the_loop_over_columns(name, act_order, group_size, clip, bits):
    weight, x = realistic_layer(6, 160, seed=21)
    hessian, kept = mean_square(x), largest(weight, 0.6)
    kept[2] = True
    grid = make_grid(name, bits, group_size, clip)
    # As it was and with the zeros in it: what is pruned may have any value.
    for given in (weight, weight * kept):
        solved = gptq(given, hessian, grid=grid, act_order=act_order, scale_dtype=torch.float32, kept_NK=kept)
        expected = published_gptq(given, hessian, name, bits, group_size, act_order, clip=clip, kept=kept)
        assert_same_decisions(solved.weight, expected, bits)
        assert_zero_where_pruned(solved.weight, kept)


@pytest.mark.parametrize("name", GRIDS)
def test_groups_and_rows_may_be_pruned_entirely(name):
    weight, x = realistic_layer(4, 96, seed=25)
    kept = largest(weight, 0.5)
    kept[0], kept[1, :32] = False, False
    for act_order in ("none", "static", "group"):
        grid = make_grid(name, 3, 32, clip=True)
        solved = gptq(weight, mean_square(x), grid=grid, act_order=act_order, refit=2, sweeps=2, kept_NK=kept)
        assert_zero_where_pruned(solved.weight, kept)
        assert torch.isfinite(solved.weight.scale).all()
        assert torch.isfinite(solved.loss_N).all()


def test_a_mask_that_keeps_everything_changes_nothing():
    weight, x = realistic_layer(6, 96, seed=22)
    hessian, grid = mean_square(x), make_grid("asymmetric", 3, 32, clip=True)
    for act_order in ("none", "static", "group"):
        plain, masked = (
            gptq(weight, hessian, grid=grid, act_order=act_order, refit=2, sweeps=2, kept_NK=kept)
            for kept in (None, torch.ones_like(weight, dtype=torch.bool))
        )
        assert_same_quantized(plain.weight, masked.weight)
        assert torch.equal(plain.loss_N, masked.loss_N)


OPTIONS = [
    {"scheme": "w3a16", "group_size": 32},
    {"scheme": "w4a16", "group_size": 32, "grid": "asymmetric", "act_order": "group"},
    {"scheme": "w2a16", "group_size": 64, "grid": "symmetric", "act_order": "static"},
    {"scheme": "w4a16", "group_size": -1, "grid": "narrow"},
    {"scheme": "w8a16", "group_size": -1, "per_tensor": True, "refit": 0, "grid": "asymmetric"},
    {"scheme": "fp8"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_survivors_beat_plain_rounding_of_the_masked_weight(options):
    weight, x = realistic_layer(32, 128, seed=23)
    weights = {"a": weight, "b": weight.flip(0) + 0.01, "c": weight.roll(1, 1)}
    kept = {n: largest(weights[n], 0.5) for n in "ab"}  # c is not pruned
    hessian, one = mean_square(x), GPTQ(statistics="float64", drift=0.0, shrink=False, **options)
    found = {before: one.apply(pruned_site(weights, x, kept, before)) for before in (False, True)}
    nearest = one.weight_grid().with_range("minmax")
    for name, mask in kept.items():
        masked = weights[name] * mask
        rounded = quantize(masked, nearest, torch.bfloat16).dequantize(torch.float64)
        values = {before: made[name].weight.dequantize(torch.float64) for before, made in found.items()}
        for made in found.values():
            assert_zero_where_pruned(made[name].weight, mask)
        # Against the masked weight, and against what the layer was before: then pruning is made up for, too.
        against = {False: masked, True: weights[name]}
        for before, wanted in against.items():
            losses = [row_losses(wanted - q, hessian).sum() for q in (values[before], rounded)]
            assert losses[0] < (0.8 if before else 0.95) * losses[1], (name, before)
    # A layer beside pruned ones is decided as it is alone.
    alone = one.apply(make_site({"c": weights["c"]}, x))["c"]
    assert_same_quantized(found[True]["c"].weight, alone.weight)


@every("bits", [3, 4])
def test_survivors_move_before_they_are_rounded_where_that_costs_less(bits):
    weight, x = realistic_layer(16, 96, seed=71, tokens=2000)
    hessian, grid = mean_square(x), Grid(bits=bits, granularity="group", group_size=32)
    kept = weight.abs().unflatten(1, (-1, 2)).argmax(2, keepdim=True) == torch.arange(2)
    how = {"grid": grid, "kept_NK": kept.flatten(1), "damp": 1e-6}
    as_rounded, before = (gptq(weight, hessian, **how, steps=steps) for steps in (0, 64))
    assert_zero_where_pruned(before.weight, how["kept_NK"])
    expected = row_losses(weight - before.weight.dequantize(), add_damping(hessian, POLISH_DAMP))
    torch.testing.assert_close(before.loss_N, expected)
    assert torch.all(before.loss_N <= as_rounded.loss_N * (1 + 1e-9))
    assert (before.loss_N < 0.9 * as_rounded.loss_N).sum() >= 4


@pytest.mark.parametrize("grid", ["signed-scale", "asymmetric"])
def test_one_scale_for_a_layer_is_that_of_its_survivors(grid):
    weight, x = realistic_layer(8, 64, seed=26)
    kept = ~largest(weight, 0.25)
    one = GPTQ(scheme="w8a16", per_tensor=True, refit=0, drift=0.0, clip=False, grid=grid, statistics="float64")
    (decision,) = one.apply(pruned_site({"a": weight}, x, {"a": kept})).values()
    expected = quantize(weight * kept, one.weight_grid(), torch.bfloat16)
    assert torch.equal(decision.weight.scale, expected.scale)
    assert_zero_where_pruned(decision.weight, kept)


@pytest.mark.parametrize("count", [0, 24, 90])
def test_few_tokens_leave_zeros_alone(count):
    weight, x = realistic_layer(200, 96, seed=24)  # more rows than a solution is judged by
    kept = largest(weight, 0.5)
    (decision,) = GPTQ(group_size=32, drift=0.0).apply(pruned_site({"a": weight}, x[:count], {"a": kept})).values()
    assert_zero_where_pruned(decision.weight, kept)


def zeros_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p == 0 for n, p in model.named_parameters() if n.endswith("proj.weight")}


@pytest.mark.parametrize("method", [GPTQ(group_size=16), RTN(group_size=16), compress.AWQ(group_size=16)])
def test_a_run_prunes_and_then_rounds_what_is_left(method):
    model = build("llama")
    pruned = copy.deepcopy(model)
    compress.quantize(pruned, Magnitude())
    first = "model.layers.0.self_attn.q_proj.weight"
    original, zeros = model.get_parameter(first).detach().clone(), zeros_of(pruned)
    assert {round(float(z.float().mean()), 2) for z in zeros.values()} == {0.5}
    seen = []

    class Watching(type(method)):
        def apply(self, site: Site) -> dict[str, Decision]:
            seen.append(site)
            return super().apply(site)

    watching = Watching(**{f.name: getattr(method, f.name) for f in fields(method)})
    compress.quantize(model, [Magnitude(), watching], calibration=tokens())
    for name, zero in zeros_of(model).items():
        if name.startswith("model.layers.0.self_attn"):  # its masks depend on nothing before it
            assert torch.all(zero[zeros[name]])
        assert zero.float().mean() >= 0.5
    for site in seen:
        assert set(site.decided) == set(site.before) == set(site.weights)
        for name, weight in site.weights.items():
            assert torch.all(weight[~site.kept(name)] == 0)
    (mine,) = (s.before[first.removesuffix(".weight")] for s in seen if first.removesuffix(".weight") in s.before)
    assert torch.equal(mine, original)


def test_a_mask_stays_with_a_layer_whatever_is_decided_about_it_afterwards():
    seen = []

    class Later(Magnitude):
        """After what has rounded: sees the mask of the pass before that."""

        name: ClassVar[str] = "later"
        reads: ClassVar[Aspect] = "quantized weight"
        keeps_zeros: ClassVar[bool] = True

        def apply(self, site: Site) -> dict[str, Decision]:
            seen.extend((site.weights[n].clone(), site.kept(n)) for n in site.weights)
            return super().apply(site)

    compress.quantize(build("llama"), [Magnitude(), RTN(group_size=16), Later(share=1.0)])
    assert len(seen) == 14
    for weight, kept in seen:
        assert kept.float().mean() == pytest.approx(0.5, abs=0.01)
        assert torch.all(weight[~kept] == 0)


def test_a_layer_that_is_decided_twice_has_one_original():
    """The reference stream runs through what it was before the mask."""
    linear, versions = torch.nn.Linear(2, 2, bias=False), Versions()
    torch.nn.init.zeros_(linear.weight)
    for value in (1.0, 2.0):
        versions.install(Layer("linear", linear), torch.full((2, 2), value))
    for _ in range(2):
        with versions.original():
            assert torch.all(linear.weight == 0)
        assert torch.all(linear.weight == 2)


def test_a_pass_that_does_not_keep_zeros_is_refused_before_any_work():
    for later, message in (
        (
            Careless(group_size=16),
            "'careless' does not keep the zeros of model.layers.0.*, which 'magnitude' has pruned",
        ),
        (Magnitude(), "'magnitude' does not keep the zeros"),
        (Binary(group_size=16), "'binary' does not keep the zeros"),
    ):
        model = build("llama")
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        with pytest.raises(InputError, match=message) as refused:
            compress.quantize(model, [Magnitude(), later], calibration=tokens())
        assert "\n" not in str(refused.value)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    parts = [compress.only(Magnitude(), "*.mlp.*"), compress.but(Careless(group_size=16), "*.mlp.*")]
    compress.quantize(build("llama"), parts)
    with pytest.raises(InputError, match=r"'magnitude' needs the dense weight of .*'rtn' has quantized"):
        compress.quantize(build("llama"), [RTN(group_size=16), Magnitude()])
