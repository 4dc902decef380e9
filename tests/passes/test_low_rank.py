"""Low rank against the paper's algorithm, and ranks shared out against every other way to share them out."""

from itertools import product
from math import inf

import pytest
import torch
from torch import Tensor

import compress
from compress.base.collectives import Comm
from compress.passes.protocol.base import Pass
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Decide, Finding
from compress.solvers.allocation import RankCurve, allocate
from compress.solvers.low_rank import approximate, spectrum
from compress.solvers.outliers import dearest
from compress.solvers.statistics.hessian import Hessian

SHAPES = [(24, 40), (40, 24), (32, 32)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(columns: int, tokens: int = 300, seed: int = 1) -> Tensor:
    """Tokens whose channels are mixed, and of different size."""
    return drawn(tokens, columns, seed) @ drawn(columns, columns, seed + 1) * drawn(1, columns, seed + 2).exp()


def hessian_of(x: Tensor) -> Tensor:
    return x.t() @ x / len(x)


def loss(error: Tensor, hessian: Tensor) -> float:
    return torch.einsum("ni,ij,nj->", error, hessian, error).item()


def truncated(weight: Tensor, hessian: Tensor, rank: int) -> Tensor:
    """SVD-LLM as its paper has it: whiten by the Cholesky factor of H, truncate, take the whitening back."""
    root = torch.linalg.cholesky(hessian)
    u, s, v = torch.linalg.svd(weight @ root)
    kept = torch.zeros(*weight.shape, dtype=weight.dtype)
    for i in range(rank):
        kept += s[i] * torch.outer(u[:, i], v[i])
    return kept @ torch.linalg.inv(root)


def best(weight: Tensor, hessian: Tensor, rank: int) -> Tensor:
    return approximate(Comm(), 0, weight, hessian, rank, torch.float64, 16).dequantize()


@every_shape
def test_it_is_the_truncated_decomposition_of_the_whitened_weight(shape):
    weight, hessian = drawn(*shape), hessian_of(inputs(shape[1]))
    found = spectrum(weight, hessian)
    for rank in (1, 5, min(shape) - 1, min(shape)):
        expected = truncated(weight, hessian, rank)
        torch.testing.assert_close(best(weight, hessian, rank), expected, rtol=1e-5, atol=1e-6)
        left = loss(weight - expected, hessian)
        assert found.values[rank:].sum().item() == pytest.approx(left, rel=1e-6, abs=1e-8 * found.values.sum().item())


@every_shape
def test_no_other_matrix_of_the_rank_has_less_loss(shape):
    weight, hessian, rank = drawn(*shape), hessian_of(inputs(shape[1])), 4
    least = loss(weight - best(weight, hessian, rank), hessian)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    diagonal = hessian.diagonal().sqrt()
    a, b, c = torch.linalg.svd(weight * diagonal, full_matrices=False)
    others = [
        (u * s)[:, :rank] @ v[:rank],  # the plain decomposition
        (a * b)[:, :rank] @ c[:rank] / diagonal,  # whitened by the diagonal, as LQER is
    ]
    vectors = spectrum(weight, hessian).vectors[:, :rank]
    for i, near in product(range(10), (1e-2, 1e3)):  # the best right factor beside any left one
        left = vectors + near * drawn(shape[0], rank, 100 + i)
        others.append(left @ torch.linalg.lstsq(left, weight).solution)
    assert all(loss(weight - other, hessian) > least for other in others)


@every_shape
def test_where_the_hessian_is_singular_it_is_the_optimum_closest_to_the_weight(shape):
    columns = shape[1]
    x = inputs(columns, tokens=6)  # rank 6
    x[:, [0, 7]] = 0
    weight, hessian = drawn(*shape), hessian_of(x)
    scale = loss(weight, hessian)
    assert loss(weight - best(weight, hessian, 6), hessian) < 1e-8 * scale
    damped = hessian + 1e-4 * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    for rank in (2, 4):
        assert loss(weight - best(weight, hessian, rank), hessian) <= loss(
            weight - truncated(weight, damped, rank), hessian
        ) * (1 + 1e-9)
    torch.testing.assert_close(best(weight, hessian, min(shape)), weight, rtol=1e-4, atol=1e-4)
    nothing = torch.zeros(columns, columns, dtype=torch.float64)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(best(weight, nothing, 3), (u * s)[:, :3] @ v[:3])
    assert not spectrum(weight, nothing).values.any()


def test_an_output_of_zeros_stays_one():
    weight = drawn(24, 40)
    weight[[3, 20]] = 0
    for bits in (16, 8):
        found = approximate(Comm(), 0, weight, hessian_of(inputs(40)), 9, torch.bfloat16, bits).dequantize()
        assert not found[[3, 20]].any()
        assert torch.isfinite(found).all()


# --- the method ----------------------------------------------------------------------------------------------------


def site_of(one: Pass, weights: dict[str, Tensor], x: Tensor, reference: Tensor | None = None) -> Site:
    statistic = one.needs()["hessian"](x.shape[1], torch.device("cpu"))
    compared = one.stage(Decide).reference
    statistic.update(x, (x if reference is None else reference) if compared else None)
    return Site(weights, {"hessian": statistic.result()}, dict.fromkeys(weights, torch.float64), Comm())


def test_rank_and_share_say_how_large_factors_are():
    x, weights = inputs(24), {"a": drawn(48, 24), "b": drawn(16, 24, 5)}
    for options, ranks in (
        ({"rank": 5}, (5, 5)),
        ({"share": 0.5}, (8, 4)),
        ({"share": 0.5, "factor_bits": 8}, (16, 9)),
        ({"share": 1.0}, (16, 9)),
        ({"rank": 5, "ranks": [["b", 2]]}, (5, 2)),
    ):
        one = compress.LowRank(statistics="float64", **options)
        one.check({name: tuple(weight.shape) for name, weight in weights.items()})
        decisions = one.apply(site_of(one, weights, x))
        assert tuple(decisions[n].figures["rank"] for n in weights) == ranks
        assert tuple(decisions[n].weight.terms[0].format.rank for n in weights) == ranks


def test_its_figure_is_the_loss_and_full_rank_has_none():
    x, weight = inputs(24), drawn(20, 24)
    one = compress.LowRank(rank=6, statistics="float64", shrink=False)
    decision = one.apply(site_of(one, {"a": weight}, x))["a"]
    hessian = hessian_of(x)
    left = loss(weight - decision.weight.dequantize(), hessian)
    assert decision.figures["loss"] == pytest.approx(left / loss(weight, hessian))
    full = compress.LowRank(rank=20, statistics="float64")
    found = full.apply(site_of(full, {"a": weight}, x))["a"]
    assert found.figures["loss"] < 1e-12
    torch.testing.assert_close(found.weight.dequantize(), weight)


def test_it_aims_at_what_makes_up_for_the_input_that_changed():
    x = inputs(24, tokens=4000)
    changed = x + 0.3 * x @ drawn(24, 24, 9) / 24
    weight = drawn(20, 24)

    def missed(drift: float) -> float:
        one = compress.LowRank(rank=10, statistics="float64", drift=drift)
        found = one.apply(site_of(one, {"a": weight}, changed, x))["a"]
        return (x @ weight.t() - changed @ found.weight.dequantize().t()).square().sum().item()

    assert missed(1.0) < 0.95 * missed(0.0)


def test_outliers_make_it_better_and_more_turns_never_worse():
    x, weight = inputs(24), drawn(20, 24)
    weight[torch.rand(20, 24, generator=torch.Generator().manual_seed(3)) < 0.02] *= 8
    losses = []
    for outliers, iterations in ((0.0, 1), (0.02, 1), (0.02, 2), (0.02, 6)):
        one = compress.LowRank(rank=4, outliers=outliers, iterations=iterations, statistics="float64")
        decision = one.apply(site_of(one, {"a": weight}, x))["a"]
        losses.append(decision.figures["loss"])
        if outliers:
            assert decision.weight.terms[1].format.entries == int(outliers * weight.numel())
    assert losses[1] < 0.8 * losses[0]
    assert losses == sorted(losses, reverse=True)


def test_the_dearest_are_chosen_and_the_first_of_equals():
    error, diagonal = torch.tensor([[1.0, 2.0, 3.0], [3.0, -2.0, 0.0]]), torch.tensor([9.0, 1.0, 1.0])
    assert dearest(error, diagonal, 0.5).tolist() == [[True, False, True], [True, False, False]]
    assert dearest(torch.ones(2, 3), torch.ones(3), 0.4).flatten().nonzero().flatten().tolist() == [0, 1]
    assert not dearest(error, diagonal, 0.0).any()


# --- the budget ----------------------------------------------------------------------------------------------------


def cost_of(curves: dict[str, RankCurve], ranks: dict) -> float:
    return sum(c.whole if ranks[n] is None else ranks[n] * c.cost for n, c in curves.items())


def loss_of(curves: dict[str, RankCurve], ranks: dict) -> float:
    return sum(0.0 if ranks[n] is None else c.values[ranks[n] :].sum().item() for n, c in curves.items())


def curves_of(seed: int, whole: float = inf) -> dict[str, RankCurve]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: RankCurve(torch.rand(4, generator=draw).double().sort(descending=True).values * size, 2.0, whole)
        for name, size in (("a", 1.0), ("b", 3.0), ("c", 0.5))
    }


@pytest.mark.parametrize("seed", range(6))
def test_no_other_allocation_of_the_budget_has_less_loss(seed):
    curves = curves_of(seed)
    for budget in range(0, 26, 2):
        found = allocate(curves, budget, least=0)
        assert cost_of(curves, found) <= budget
        others = [dict(zip(curves, ranks, strict=True)) for ranks in product(range(5), repeat=3)]
        least = min(loss_of(curves, ranks) for ranks in others if cost_of(curves, ranks) <= budget)
        assert loss_of(curves, found) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(6))
def test_with_layers_left_as_they_are_only_what_is_left_of_the_budget_could_do_better(seed):
    curves = curves_of(seed, whole=7.0)
    assert all(curve.most == 3 for curve in curves.values())
    options = [None, *range(4)]
    for budget in range(22):
        found = allocate(curves, budget, least=0)
        spent = cost_of(curves, found)
        assert spent <= budget
        others = [dict(zip(curves, ranks, strict=True)) for ranks in product(options, repeat=3)]
        fewer = [r for r in others if cost_of(curves, r) <= budget - 7]
        assert all(loss_of(curves, found) <= loss_of(curves, ranks) for ranks in fewer)
    assert set(allocate(curves, 21.0).values()) == {None}


def test_every_layer_has_the_least_and_equals_go_to_the_first():
    curves = {name: RankCurve(torch.ones(5).double(), 3.0) for name in "abc"}
    assert allocate(curves, 15.0) == {"a": 3, "b": 1, "c": 1}
    assert allocate({**curves, "d": RankCurve(torch.zeros(2).double(), 1.0)}, 10.0) == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_a_survey_finds_what_the_ranks_take_off_and_settles_the_pass():
    x = inputs(24)
    weights = {"a": drawn(48, 24), "b": drawn(16, 24, 5) * 0.01}
    one = compress.LowRank(share=0.5, allocate="layer-loss", statistics="float64")
    statistic = Hessian(24, torch.device("cpu"), dtype=torch.float64)
    statistic.update(x, None)
    site = Site(weights, {"hessian": statistic.result()}, dict.fromkeys(weights, torch.float64), Comm())
    found = one.look(site)
    hessian = statistic.result().shrunk().hessian
    for name, weight in weights.items():  # as parts of the output: a layer of small numbers counts as much
        assert found[name].sum().item() == pytest.approx(1)
        assert found[name][4:].sum().item() == pytest.approx(
            loss(weight - best(weight, hessian, 4), hessian) / loss(weight, hessian)
        )
    findings = {name: Finding("block", tuple(weights[name].shape), (each,)) for name, each in found.items()}
    made = one.settle(findings)
    settled = made.made
    ranks = dict(settled.ranks)
    assert settled.allocate == "uniform"
    assert not made.alone
    assert 16 * sum(ranks[n] * sum(weights[n].shape) for n in ranks) <= one.budget(
        {n: tuple(w.shape) for n, w in weights.items()}
    )
    everything = compress.LowRank(share=1.0, allocate="layer-loss").settle(findings)
    assert set(everything.alone) == {"a", "b"}
    assert not everything.made.wants("a")
