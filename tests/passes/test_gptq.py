"""GPTQ against the algorithm as published, its own additions against what they promise, and the pass around them."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from combinations import each, every, pairs
from published import (
    DAMP,
    GOLDEN_SETTINGS,
    GRIDS,
    STORED,
    assert_same_decisions,
    assert_same_quantized,
    make_grid,
    make_site,
    mean_square,
    published_gptq,
    realistic_layer,
    row_losses,
    seen,
)
from safetensors.torch import load_file
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import CompressError, InputError
from compress.passes.gptq import GPTQ
from compress.solvers.gptq import gptq
from compress.solvers.hessian_with_drift import POLISH_DAMP, add_damping, column_order, drift_correction, reliability
from compress.solvers.statistics.hessian import FEW
from compress.weights.grid import Grid, Quantized, quantize

# --- the code under test, as a notebook calls it ----------------------------------------------------------------------


def solve(
    weight: Tensor, hessian: Tensor, grid: Grid, act_order: str = "none", stored=torch.float32, **polish
) -> tuple[Quantized, Tensor]:
    solved = gptq(weight, hessian, grid=grid, damp=DAMP, act_order=act_order, scale_dtype=stored, **polish)
    assert solved.damp == DAMP
    return solved.weight, solved.loss_N


POLISH = {"refit": 2, "sweeps": 2}
# Group size -> K: several groups each, and more than one block of 128 columns but for one.
WIDTHS = {16: 176, 32: 64, 128: 384, -1: 200}


@every(
    ("name", "group_size", "bits", "act_order"), pairs([*GRIDS], [*WIDTHS], [2, 3, 4, 8], ["none", "static", "group"])
)
def test_codes_are_those_of_the_published_algorithm(name, group_size, bits, act_order):
    weight, x = realistic_layer(6, WIDTHS[group_size], seed=group_size + 1)
    hessian = mean_square(x)
    quantized, _ = solve(weight, hessian, make_grid(name, bits, group_size), act_order)
    expected = published_gptq(weight, hessian, name, bits, group_size, act_order)
    assert_same_decisions(quantized, expected, bits)


@every(("name", "stored"), each([*GRIDS], [torch.float16, torch.bfloat16]))
def test_codes_are_those_of_the_published_algorithm_with_16_bit_scales(name, stored):
    weight, x = realistic_layer(6, 192, seed=3)
    hessian = mean_square(x)
    for bits in (3, 8):
        quantized, _ = solve(weight, hessian, make_grid(name, bits, 32), stored=stored)
        assert quantized.scale.dtype == stored
        assert_same_decisions(quantized, published_gptq(weight, hessian, name, bits, 32, stored=stored), bits)


@every(("name", "act_order"), each([*GRIDS], ["none", "static", "group"]))
def test_codes_are_those_of_the_published_algorithm_with_searched_ranges(name, act_order):
    weight, x = realistic_layer(6, 160, seed=4)
    hessian = mean_square(x)
    quantized, _ = solve(weight, hessian, make_grid(name, 3, 32, clip=True), act_order)
    expected = published_gptq(weight, hessian, name, 3, 32, act_order, clip=True)
    assert_same_decisions(quantized, expected, 3)
    assert not torch.equal(expected[1], published_gptq(weight, hessian, name, 3, 32, act_order)[1])


@pytest.mark.parametrize("setting", GOLDEN_SETTINGS)
def test_stored_decisions_are_reproduced_bit_for_bit(setting):
    name, bits, group_size, act_order = GOLDEN_SETTINGS[setting]
    stored = load_file(STORED)
    weight, hessian = stored["weight"].double(), stored["hessian"].double()
    quantized, _ = solve(weight, hessian, make_grid(name, bits, group_size), act_order, torch.float16)
    assert torch.equal(quantized.codes, stored[f"{setting}.codes"])
    assert quantized.scale.dtype == torch.float16
    assert torch.equal(quantized.scale.view(torch.int16), stored[f"{setting}.scale"].view(torch.int16))
    if quantized.zero_point is not None:
        assert torch.equal(quantized.zero_point, stored[f"{setting}.zero_point"])
    # The stored layer tells the solvers apart: rounding decides otherwise.
    assert not torch.equal(quantize(weight, make_grid(name, bits, group_size), torch.float16).codes, quantized.codes)


# --- refit and coordinate descent -----------------------------------------------------------------------------------

# (refit, sweeps) before and after one more step of one kind.
STEPS = [((0, 0), (1, 0)), ((0, 0), (0, 1)), ((1, 0), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (2, 2))]
POLISHING = sorted({polish for step in STEPS for polish in step})


@every(
    ("name", "bits", "stored", "groups"),
    pairs(
        [*GRIDS],
        [2, 3, 4, 8],
        [torch.float32, torch.bfloat16, torch.float16],
        [(16, "none"), (48, "group"), (-1, "static")],
    ),
)
def test_refit_and_descent_never_raise_the_loss_of_a_row(name, bits, stored, groups):
    group_size, act_order = groups
    weight, x = realistic_layer(8, 144, seed=bits)
    hessian = mean_square(x)
    exact = add_damping(hessian, POLISH_DAMP)
    grid, losses = make_grid(name, bits, group_size), {}
    for refit, sweeps in POLISHING:
        quantized, reported = solve(weight, hessian, grid, act_order, stored, refit=refit, sweeps=sweeps)
        losses[refit, sweeps] = row_losses(weight - quantized.dequantize(torch.float64), exact)
        if (refit, sweeps) != (0, 0):
            assert torch.allclose(reported, losses[refit, sweeps], rtol=1e-8, atol=0)
    for before, after in STEPS:
        assert torch.all(losses[after] <= losses[before] * (1 + 1e-9)), (before, after)
    assert losses[2, 2].sum() < losses[0, 0].sum()


def test_loss_without_polishing_is_that_of_the_damped_hessian():
    weight, x = realistic_layer(8, 160, seed=1)
    hessian = mean_square(x)
    quantized, reported = solve(weight, hessian, make_grid("asymmetric", 3, 32), "group")
    error = weight - quantized.dequantize(torch.float64)
    assert torch.allclose(reported, row_losses(error, add_damping(hessian, DAMP)), rtol=1e-9, atol=0)


def test_descent_ends_where_no_single_code_can_be_improved():
    weight, x = realistic_layer(4, 48, seed=2)
    hessian = mean_square(x)
    grid = make_grid("asymmetric", 3, 16)
    quantized, _ = solve(weight, hessian, grid, sweeps=50)
    exact = add_damping(hessian, POLISH_DAMP)
    best = row_losses(weight - quantized.dequantize(torch.float64), exact)
    for column, move in product(range(48), (-1, 1)):
        codes = quantized.codes.clone()
        codes[:, column] = (codes[:, column].int() + move).clamp(grid.qmin, grid.qmax).to(torch.int8)
        moved = Quantized(codes, quantized.scale, quantized.zero_point, grid).dequantize(torch.float64)
        assert torch.all(row_losses(weight - moved, exact) >= best * (1 - 1e-9))


def test_refit_finds_the_best_scale_of_one_group_for_its_codes():
    weight, x = realistic_layer(4, 64, seed=3)
    hessian = mean_square(x)
    plain, _ = solve(weight, hessian, make_grid("signed-scale", 3, -1), stored=torch.float64)
    refitted, _ = solve(weight, hessian, make_grid("signed-scale", 3, -1), stored=torch.float64, refit=1)
    assert torch.equal(plain.codes, refitted.codes)
    exact = add_damping(hessian, POLISH_DAMP)
    codes = plain.codes.double()
    best = torch.einsum("ni,ij,nj->n", weight, exact, codes) / row_losses(codes, exact)
    assert torch.allclose(refitted.scale[:, 0], best, rtol=1e-10)
    assert not torch.allclose(plain.scale[:, 0], best, rtol=1e-3)


@pytest.mark.parametrize("name", GRIDS)
def test_refit_keeps_the_sign_of_every_scale(name):
    # Groups of two at 2 bits: the best scale for the codes has the other sign in some of these 8000 groups.
    weight, x = realistic_layer(2000, 8, seed=5)
    hessian = mean_square(x)
    plain, refitted = (solve(weight, hessian, make_grid(name, 2, 2), refit=refit)[0] for refit in (0, 1))
    assert torch.all(plain.scale * refitted.scale > 0)
    assert not torch.equal(plain.scale, refitted.scale)


@every(("name", "bits", "group_size"), pairs([*GRIDS], [2, 3, 4, 8], [16, 64, -1]))
def test_loss_is_below_that_of_rounding_to_nearest(name, bits, group_size):
    weight, x = realistic_layer(32, 192, seed=bits)
    # Two bits need the searched range: a min-max one has so few codes that the errors carried along saturate, and the
    # algorithm as published can lose to rounding.
    hessian, grid = mean_square(x), make_grid(name, bits, group_size, clip=bits == 2)
    rounded = quantize(weight, grid.with_range("minmax"), torch.float32)
    nearest = row_losses(weight - rounded.dequantize(torch.float64), hessian).sum()
    solved = solve(weight, hessian, grid)[0].dequantize(torch.float64)
    assert row_losses(weight - solved, hessian).sum() < 0.8 * nearest


# --- input drift ----------------------------------------------------------------------------------------------------


def drifting(columns: int, tokens: int, seed: int, rows: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, inputs of the original model, the same inputs behind a compressed prefix)."""
    weight, x = realistic_layer(rows, columns, seed, tokens)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 100), dtype=torch.float64)
    return weight, x, 0.97 * x + 0.1 * x.std(0) * noise + 0.05 * x.roll(1, 1)


def test_without_drift_there_is_nothing_to_correct():
    _, x = realistic_layer(1, 96, seed=5)
    assert drift_correction(seen(x, x.clone()), DAMP) is None
    step, noise = drift_correction(seen(x, x * (1 + 1e-12)), DAMP).matrices
    assert torch.allclose(step, torch.zeros(96, 96, dtype=torch.float64), rtol=0, atol=1e-10)
    assert torch.allclose(noise, torch.zeros(96, 96, dtype=torch.float64), rtol=0, atol=1e-10)


def test_full_drift_correction_is_the_least_squares_weight():
    weight, x, drifted = drifting(48, 400, seed=6)
    target = weight + weight @ drift_correction(seen(drifted, x), 1e-13).matrices[0]
    best = torch.linalg.lstsq(drifted, x @ weight.t()).solution.t()
    assert torch.allclose(target, best, rtol=1e-6, atol=1e-8 * best.abs().max().item())
    wanted = x @ weight.t()
    error, least, uncorrected = ((wanted - drifted @ q.t()).square().sum() for q in (target, best, weight))
    assert error <= least * (1 + 1e-9)
    assert error < 0.8 * uncorrected


def test_drift_correction_keeps_the_weights_of_dead_channels():
    _, x, drifted = drifting(32, 300, seed=8)
    drifted[:, [4, 20]] = 0
    for matrix in drift_correction(seen(drifted, x), DAMP).matrices:
        assert torch.isfinite(matrix).all()
        assert torch.all(matrix[:, [4, 20]] == 0)


@pytest.mark.parametrize("rows", [1, 24, 25])
def test_a_correction_is_the_same_of_few_rows_and_of_many(rows):
    weight, x, drifted = drifting(48, 400, seed=9, rows=rows)
    statistics = seen(drifted, x)
    inverse = torch.linalg.inv(add_damping(statistics.hessian, DAMP))
    for moment, found in zip(
        (statistics.drift, statistics.contrast), drift_correction(statistics, DAMP).of(weight), strict=True
    ):
        wanted = weight @ moment @ inverse
        assert torch.allclose(found, wanted, rtol=0, atol=1e-10 * wanted.abs().max().item())


# --- few tokens -----------------------------------------------------------------------------------------------------


def test_a_correction_that_is_noise_alone_is_left_out_and_one_that_is_none_is_kept():
    weight, x, _ = drifting(64, 4000, seed=10, rows=64)
    noise = x.std(0) * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shares = {}
    for kind, reference in {"noise": x + 0.1 * noise, "both": 0.99 * x + 0.1 * noise, "linear": 0.9 * x}.items():
        statistics = seen(x, reference)
        step, other = (weight @ matrix for matrix in drift_correction(statistics, DAMP).matrices)
        shares[kind] = reliability(Comm(), step, other, statistics.hessian)
    # Two squares of 64 x 64 elements are compared, each good to about 1 / 64.
    assert shares["noise"] < 0.1
    assert shares["noise"] < shares["both"] < shares["linear"]
    assert shares["linear"] > 0.95


def test_the_share_of_a_correction_is_the_best_one_of_new_tokens():
    weight, x, drifted = drifting(96, 6000, seed=11, rows=64)
    statistics = seen(drifted[:1000], x[:1000])
    step, noise = (weight @ matrix for matrix in drift_correction(statistics, DAMP).matrices)
    share = reliability(Comm(), step, noise, statistics.hessian)
    wanted, move = (x - drifted)[1000:] @ weight.t(), drifted[1000:] @ step.t()
    best = ((wanted * move).sum() / move.square().sum()).item()
    assert 0.2 < best < 0.95
    assert share == pytest.approx(best, abs=0.15)


def test_a_correction_of_unknown_noise_is_left_out():
    weight, x, drifted = drifting(32, 60, seed=12)
    assert seen(drifted, x, batch=1).contrast is None
    decision = GPTQ(group_size=32).apply(make_site({"a": weight}, drifted, x, batch=1))["a"]
    alone = GPTQ(group_size=32, drift=0.0).apply(make_site({"a": weight}, drifted, batch=1))["a"]
    assert decision.figures["drift"] == 0
    assert_same_quantized(decision.weight, alone.weight)


@pytest.mark.full
@every(("tokens", "scheme", "seed"), pairs([12, 48, 96, 192], ["w3a16", "w4a16", "w8a8"], [0, 1, 2]))
def test_few_tokens_do_not_make_it_worse_than_rounding(tokens, scheme, seed):
    """Output error on new tokens, of inputs that quantizing the layers before has changed, against the original."""
    weight, x, drifted = drifting(96, 2000, seed, rows=64)
    options = {"scheme": scheme, "group_size": -1 if scheme == "w8a8" else 32, "statistics": "float64"}
    site = make_site({"a": weight}, drifted[:tokens], x[:tokens], batch=24)
    wanted, given = x[1000:] @ weight.t(), drifted[1000:]

    def error(quantized: Quantized) -> float:
        return (wanted - given @ quantized.dequantize(torch.float64).t()).square().sum().item()

    grid = GPTQ(**options).weight_grid()
    rounded = min(error(quantize(weight, grid.with_range(choice), torch.bfloat16)) for choice in ("minmax", "mse"))
    found = {shrink: error(GPTQ(shrink=shrink, **options).apply(site)["a"].weight) for shrink in (True, False)}
    assert found[True] <= 1.02 * rounded
    assert found[True] < found[False]


@pytest.mark.parametrize("shrink", [False, True])
def test_refit_and_descent_serve_new_tokens_however_few_they_are_fitted_to(shrink):
    for tokens in (24, 48, 96):
        ratios = []
        for seed in range(3):
            weight, x = realistic_layer(32, 96, seed, tokens=2000)
            site, hessian = make_site({"a": weight}, x[:tokens], batch=24), mean_square(x[1000:])
            plain, polished = (
                one.solve_targets(site, {"a": weight.double()}, one.problem(site.stats["hessian"]))["a"]
                for one in (
                    GPTQ(scheme="w4a16", group_size=32, drift=0, clip=False, shrink=shrink, refit=n, sweeps=n)
                    for n in (0, 2)
                )
            )
            errors = [row_losses(weight - q.dequantize(torch.float64), hessian).sum().item() for q in (plain, polished)]
            ratios.append(errors[1] / errors[0])
        assert sum(ratios) / len(ratios) < (1 if shrink else 0.95), (tokens, ratios)


def mirrored(count: int, columns: int, flip: bool) -> Tensor:
    """Pairs of channels that say the same; with `flip`, the second half of the tokens says the opposite."""
    half = torch.randn(count, columns // 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sign = torch.ones(count, 1, dtype=torch.float64)
    sign[count // 2 :] = -1 if flip else 1
    return torch.stack([half, sign * half], 2).reshape(count, columns)


def test_what_half_of_the_tokens_suggest_must_hold_on_the_other_half():
    weight, _ = realistic_layer(64, 64, seed=4)
    one = GPTQ(group_size=32, drift=0.0, statistics="float64")
    rounded = quantize(weight, one.weight_grid().with_range("minmax"), torch.bfloat16)
    found = {flip: one.apply(make_site({"a": weight}, mirrored(80, 64, flip)))["a"] for flip in (False, True)}
    assert found[False].figures["solution"] == "gptq"
    assert not torch.equal(found[False].weight.codes, rounded.codes)
    assert found[True].figures["solution"] == "rounding"
    assert found[True].figures["loss"] == found[True].figures["rtn_loss"]
    assert_same_quantized(found[True].weight, replace(rounded, grid=found[True].weight.grid))
    # With tokens enough, and where it is asked to trust what it sees, nothing is held back.
    enough = one.apply(make_site({"a": weight}, mirrored(FEW * 64, 64, flip=True)))["a"]
    trusting = replace(one, shrink=False).apply(make_site({"a": weight}, mirrored(80, 64, flip=True)))["a"]
    assert [d.figures["solution"] for d in (enough, trusting)] == ["gptq", "gptq"]


@pytest.mark.parametrize("tokens", [0, 1])
def test_tokens_that_cannot_be_halved_are_no_reason_to_do_more_than_round(tokens):
    weights, x, reference = attention()
    for name, decision in GPTQ(group_size=32).apply(make_site(weights, x[:tokens], reference[:tokens])).items():
        assert decision.figures["solution"] == "rounding"
        rounded = quantize(weights[name].double(), decision.weight.grid, torch.bfloat16)
        assert torch.equal(decision.weight.codes, rounded.codes)


def test_more_tokens_shrink_less_and_serve_better():
    weight, x, drifted = drifting(96, 9000, seed=13, rows=64)
    wanted, given = x[5000:] @ weight.t(), drifted[5000:]
    errors, shrinkages, shares = [], [], []
    for tokens in (24, 96, 768, 4800):
        site = make_site({"a": weight}, drifted[:tokens], x[:tokens], batch=24)
        decision = GPTQ(scheme="w3a16", group_size=32, statistics="float64").apply(site)["a"]
        errors.append((wanted - given @ decision.weight.dequantize(torch.float64).t()).square().sum().item())
        shrinkages.append(decision.figures["shrinkage"])
        # What is left of the correction once there are tokens enough to do all that was asked for.
        shares += [decision.figures["drift"]] if tokens >= FEW * 96 else []
    assert errors == sorted(errors, reverse=True)
    assert shrinkages == sorted(shrinkages, reverse=True)
    assert shares == sorted(shares)
    assert len(shares) == 2
    assert shrinkages[-1] < 0.05
    assert shares[-1] > 0.8


def test_quantizing_the_corrected_weight_brings_the_output_closer():
    weight, x, drifted = drifting(96, 800, seed=9)
    errors = {}
    for drift in (0.0, 1.0):
        decision = GPTQ(group_size=32, drift=drift, statistics="float64").apply(make_site({"a": weight}, drifted, x))
        output = drifted @ decision["a"].weight.dequantize(torch.float64).t()
        errors[drift] = (x @ weight.t() - output).square().sum().item()
    assert errors[1.0] < 0.8 * errors[0.0]


# --- column order ---------------------------------------------------------------------------------------------------


def test_columns_keep_their_order_without_act_order():
    assert column_order(torch.rand(12), "none", 4).tolist() == list(range(12))


@pytest.mark.parametrize("group_size", [8, None])
def test_static_order_follows_the_diagonal_and_ends_with_dead_columns(group_size):
    diagonal = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 1000
    diagonal[[0, 13, 40]] = 0
    order = column_order(diagonal, "static", group_size)
    assert sorted(order.tolist()) == list(range(64))
    assert torch.all(diagonal[order].diff() <= 0)
    assert order[-3:].tolist() == [0, 13, 40]


def test_group_order_keeps_groups_together_and_sorts_inside_and_outside():
    diagonal = torch.rand(64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    diagonal[16:24] = 0
    diagonal[3] = 0
    order = column_order(diagonal, "group", 8)
    assert sorted(order.tolist()) == list(range(64))
    runs = order.reshape(8, 8)
    assert torch.all((runs // 8) == (runs[:, :1] // 8))
    assert torch.all(diagonal[runs].diff(dim=1) <= 0)
    assert torch.all(diagonal[runs[:, 0]].diff() <= 0)
    assert runs[-1].tolist() == list(range(16, 24))
    assert runs[runs[:, 0] // 8 == 0][0, -1] == 3


def test_group_order_of_a_channel_is_the_static_order():
    diagonal = torch.rand(32, generator=torch.Generator().manual_seed(3))
    assert torch.equal(column_order(diagonal, "group", None), column_order(diagonal, "static", None))


# --- the pass -------------------------------------------------------------------------------------------------------


def attention(seed: int = 0) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Float32 q, k and v of unequal heights, the inputs behind a compressed prefix and the original ones."""
    _, x, drifted = drifting(128, 500, seed)
    generator = torch.Generator().manual_seed(seed + 50)
    heights = {"block.q_proj": 24, "block.k_proj": 8, "block.v_proj": 1}
    weights = {name: torch.randn(rows, 128, generator=generator) / 11 for name, rows in heights.items()}
    return weights, drifted, x


OPTIONS = [
    {"scheme": "w3a16", "group_size": 32},
    {"scheme": "w4a16", "group_size": 32, "grid": "asymmetric", "act_order": "group"},
    {"scheme": "w2a16", "group_size": 64, "grid": "symmetric", "act_order": "static"},
    {"scheme": "w4a16", "group_size": -1, "grid": "narrow", "drift": 0.5},
    {"scheme": "w8a16", "group_size": -1, "per_tensor": True, "refit": 0},
    {"scheme": "w4a16", "group_size": -1, "per_tensor": True, "refit": 0, "grid": "asymmetric", "act_order": "group"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layers_solved_together_are_the_layers_solved_alone(options):
    weights, x, reference = attention()
    one = GPTQ(statistics="float64", **options)
    together = one.apply(make_site(weights, x, reference))
    assert list(together) == list(weights)
    for name, weight in weights.items():
        alone = one.apply(make_site({name: weight}, x, reference))[name]
        assert_same_quantized(together[name].weight, alone.weight)
        figures, expected = (dict(d.figures) for d in (together[name], alone))
        assert figures.pop("solution") == expected.pop("solution")
        assert figures == pytest.approx(expected, rel=1e-9)


def test_layers_with_scales_of_different_dtypes_keep_their_own():
    weights, x, reference = attention()
    dtypes = dict(zip(weights, (torch.float16, torch.bfloat16, torch.float16), strict=True))
    one = GPTQ(statistics="float64", group_size=32)
    together = one.apply(make_site(weights, x, reference, dtypes))
    assert set(together) == set(weights)
    for name, dtype in dtypes.items():
        assert together[name].weight.scale.dtype == dtype
        alone = one.apply(make_site({name: weights[name]}, x, reference, {name: dtype}))[name]
        assert_same_quantized(together[name].weight, alone.weight)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("act_order", ["none", "static", "group"])
def test_the_plain_pass_is_the_published_algorithm(act_order, clip):
    weights, x, _ = attention()
    options = {"drift": 0, "clip": clip, "refit": 0, "sweeps": 0, "shrink": False}
    options |= {"grid": "asymmetric", "group_size": 32}
    decisions = GPTQ(statistics="float64", act_order=act_order, damp=DAMP, **options).apply(make_site(weights, x))
    hessian = make_site(weights, x).stats["hessian"].hessian
    for name, weight in weights.items():
        expected = published_gptq(weight.double(), hessian, "asymmetric", 4, 32, act_order, torch.bfloat16, clip)
        assert_same_decisions(decisions[name].weight, expected, 4)


@pytest.mark.parametrize(("drift", "shrink"), [(0.0, False), (0.0, True), (1.0, False), (1.0, True), (0.5, True)])
def test_figures_are_those_of_the_decision(drift, shrink):
    weights, x, reference = attention()
    x[:, [3, 9]] = 0
    one = GPTQ(scheme="w3a16", group_size=32, drift=drift, shrink=shrink, statistics="float64", damp=0.02)
    site = make_site(weights, x, reference if drift else None)
    statistics = site.stats["hessian"].shrunk() if shrink else site.stats["hessian"]
    for name, decision in one.apply(site).items():
        weight, figures, share = weights[name].double(), decision.figures, 0.0
        target = weight
        if drift:
            correction = drift_correction(statistics, 0.02 + 128 / 500 * shrink)
            step, noise = (weight @ matrix for matrix in correction.matrices)
            share = drift * (reliability(Comm(), step, noise, statistics.hessian) if shrink else 1)
            target = weight + share * step
        nearest = quantize(weight, one.weight_grid().with_range("minmax"), torch.bfloat16)
        energy = row_losses(target, statistics.hessian).sum()
        loss, rtn_loss = (
            (row_losses(target - q.dequantize(torch.float64), statistics.hessian).sum() / energy).item()
            for q in (decision.weight, nearest)
        )
        assert figures["loss"] == pytest.approx(loss, rel=1e-9)
        assert figures["rtn_loss"] == pytest.approx(rtn_loss, rel=1e-9)
        assert figures["loss"] < figures["rtn_loss"]
        assert figures["damp"] == 0.02
        assert figures["dead_channels"] == 2
        assert figures["tokens"] == len(x)
        assert figures["drift"] == pytest.approx(share, rel=1e-9)
        assert (0 < figures["drift"] < 1) == (drift > 0 and shrink) or figures["drift"] == drift
        assert figures["shrinkage"] == (statistics.shrinkage if shrink else 0)


def test_raised_damping_is_reported_and_used_for_the_drift_correction_too():
    weights, x, reference = attention()
    # 20 tokens span 20 of 128 directions: in float32 a damping of 1e-12 cannot make that definite.
    site = make_site(weights, x[:20], reference[:20], statistics=torch.float32)
    decisions = GPTQ(group_size=32, damp=1e-12, shrink=False).apply(site)
    used = decisions["block.q_proj"].figures["damp"]
    assert used >= 1e-4
    again = GPTQ(group_size=32, damp=used, shrink=False).apply(site)
    for name in weights:
        assert_same_quantized(decisions[name].weight, again[name].weight)


def test_statistics_that_are_not_finite_are_refused():
    weights, x, reference = attention()
    x[7, 7] = float("nan")
    with pytest.raises(CompressError, match="non-finite activations"):
        GPTQ(group_size=32).apply(make_site(weights, x, reference))


@pytest.mark.parametrize("grid", ["signed-scale", "asymmetric"])
@pytest.mark.parametrize("act_order", ["none", "static", "group"])
def test_per_tensor_has_one_scale_per_layer_fitted_to_that_layer(act_order, grid):
    weights, x, _ = attention()
    weights["block.k_proj"] *= 10
    options = {"scheme": "w8a16", "grid": grid, "act_order": act_order}
    one = GPTQ(per_tensor=True, group_size=-1, refit=0, drift=0, clip=False, statistics="float64", **options)
    decisions = one.apply(make_site(weights, x))
    for name, weight in weights.items():
        quantized = decisions[name].weight
        expected = quantize(weight, one.weight_grid(), torch.bfloat16)
        assert quantized.scale.shape == (1, 1)
        assert torch.equal(quantized.scale, expected.scale)
        assert quantized.zero_point is None or torch.equal(quantized.zero_point, expected.zero_point)
        assert quantized.dequantize().shape == weight.shape
        assert decisions[name].figures["loss"] < decisions[name].figures["rtn_loss"]


def test_dead_channels_keep_their_rounded_weight():
    weights, x, reference = attention()
    x[:, [5, 70]] = 0
    one = GPTQ(group_size=32, grid="asymmetric", clip=False, act_order="static", refit=0, statistics="float64")
    decisions = one.apply(make_site(weights, x, reference))
    for name, weight in weights.items():
        quantized = decisions[name].weight
        step = quantized.scale.double().repeat_interleave(32, 1)[:, [5, 70]]
        error = (quantized.dequantize(torch.float64) - weight.double())[:, [5, 70]].abs()
        assert torch.all(error <= step * (0.5 + 16 * 2**-8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damp": 0}, "damp 0; allowed: above 0"),
        ({"damp": -0.1}, "damp -0.1; allowed: above 0"),
        ({"drift": 1.5}, "drift 1.5; allowed: 0 .* to 1"),
        ({"drift": -0.5}, "drift -0.5; allowed: 0 .* to 1"),
        ({"act_order": "desc"}, "act_order 'desc'; allowed: none, static, group"),
        ({"statistics": "bfloat16"}, r"statistics 'bfloat16'; .*allowed: float32, float64"),
        ({"per_tensor": True, "group_size": -1}, "set refit=0 with per_tensor"),
        ({"per_tensor": True, "refit": 0, "group_size": 32}, "give -1 with it"),
        ({"scheme": "w9a16"}, "scheme 'w9a16'; allowed: w2a16, .*w8a16"),
        ({"scheme": "w4"}, r"scheme 'w4'; did you mean 'w4a16'\? allowed: w2a16"),
        ({"group_size": -2}, "group size -2; allowed: a positive number, or -1"),
        ({"refit": -1}, "refit -1; allowed: 0 or more"),
        ({"sweeps": -1}, "sweeps -1; allowed: 0 or more"),
        ({"grid": "float"}, "grid 'float'; allowed: signed-scale, symmetric, narrow, asymmetric"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        GPTQ(**options)


def test_the_reference_stream_is_asked_for_exactly_when_drift_is_on():
    for drift in (0.0, 0.5, 1.0):
        for statistics in ("float32", "float64"):
            one = GPTQ(drift=drift, statistics=statistics)
            assert one.decide_stage.reference == (drift > 0)
            made = one.needs()["hessian"](8, torch.device("cpu"))
            assert (made.drift is not None) == one.decide_stage.reference
            assert made.total.dtype == getattr(torch, statistics)


# --- grids of levels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["mxfp4a16", "nvfp4a16", "nf4a16", "iq4_nl"])
def test_every_step_lowers_the_loss_on_grids_of_levels(scheme):
    """Rounding to nearest, then the sweep, refit and descent."""
    weight, x = realistic_layer(24, 128, seed=3)
    hessian, grid = mean_square(x), GPTQ(scheme=scheme).weight_grid()
    found = [quantize(weight, grid, torch.float32), *(solve(weight, hessian, grid, **how)[0] for how in ({}, POLISH))]
    losses = [float(row_losses(weight - one.dequantize(weight.dtype), hessian).sum()) for one in found]
    assert losses[2] < losses[1] < 0.7 * losses[0]


def test_layers_of_a_site_share_the_global_scale_of_nvfp4_however_they_are_cut():
    weight, x = realistic_layer(16, 64, seed=5)
    weights = {name: weight * size for name, size in {"q": 1, "k": 9, "v": 0.1}.items()}
    site, one = make_site(weights, x), GPTQ(scheme="nvfp4a16", drift=0.0)
    made = one.apply(site)
    assert len({float(decision.parts()["weight_global_scale"]) for decision in made.values()}) == 1
    part = site.rows({"q": slice(0, 7), "v": slice(3, 16)}).rows({"v": slice(0, 2)})
    assert part.reached(one.weight_grid()) == site.reached(one.weight_grid())
    for name, weight in weights.items():
        assert (made[name].weight.dequantize() - weight).norm() < 0.15 * weight.norm()
