"""Which weights are exact: against every subset of a small group, and what must hold for any weight."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress import AWQ, GPTQ, RTN
from compress.base.collectives import Comm
from compress.passes.protocol.sites import Site
from compress.solvers.outliers import costs, exact_places, price_of, set_apart
from compress.solvers.statistics.hessian import Hessian
from compress.weights.grid import Grid, decode, encode, fit

GRIDS = {
    "signed scale": Grid(bits=3, granularity="group", group_size=6, signed_scale=True),
    "symmetric": Grid(bits=3, granularity="group", group_size=6),
    "asymmetric": Grid(bits=2, granularity="group", group_size=6, symmetric=False),
}


def price_paid(x: Tensor, chosen: Tensor, grid: Grid, cost: Tensor, price: float) -> float:
    """What a group costs with these of its weights exact."""
    scale, zero = (t.unsqueeze(-1) for t in fit(x.masked_fill(chosen, 0.0), grid, x.dtype))
    error = (decode(encode(x, scale, zero, grid), scale, zero, x.dtype) - x).square() * cost
    return float(error[~chosen].sum()) + price * int(chosen.sum())


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_what_is_chosen_is_close_to_the_best_of_all_subsets(grid):
    draw = torch.Generator().manual_seed(0)
    paid, best, none = 0.0, 0.0, 0.0
    for _ in range(60):
        x = torch.randn(6, generator=draw, dtype=torch.float64)
        x[int(torch.randint(6, (1,), generator=draw))] *= 4
        cost, price = torch.rand(6, generator=draw, dtype=torch.float64) + 0.2, 0.3
        chosen = exact_places(costs(x.unsqueeze(0), grid, x.dtype, cost), price)[0]
        subsets = [torch.tensor([i in s for i in range(6)]) for k in range(7) for s in combinations(range(6), k)]
        prices = [price_paid(x, subset, grid, cost, price) for subset in subsets]
        paid, best, none = paid + price_paid(x, chosen, grid, cost, price), best + min(prices), none + prices[0]
    assert best <= paid < best + 0.15 * (none - best)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(list(GRIDS)), st.sampled_from((6, 32, 200)))
def test_the_dearer_an_exact_weight_the_fewer_there_are(seed, name, length):
    x = torch.randn(7, 3, length, generator=torch.Generator().manual_seed(seed)) ** 3
    x[2] = 0
    found = costs(x, GRIDS[name], torch.bfloat16, torch.ones(length))
    counts = [int(exact_places(found, price).sum()) for price in (0.0, 1e-3, 1e-1, 10.0, 1e9, float("inf"))]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0
    assert not exact_places(found, 0.0)[2].any(), "a zero has a code"
    wanted = 0.05
    assert exact_places(found, price_of(wanted, found)).double().mean() <= wanted


def test_values_are_set_apart_exactly_and_a_dear_input_has_more_of_them():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    cost = torch.ones(128)
    cost[5] = 1e4
    rest, exact = set_apart(weight, Grid(bits=3, granularity="group", group_size=32), torch.bfloat16, 0.03, cost)
    chosen = exact.dequantize() != 0
    assert torch.equal(rest.to(torch.bfloat16) + exact.dequantize(), weight)
    assert chosen.double().mean() == pytest.approx(0.03, rel=0.2)
    assert chosen[:, 5].double().mean() > 0.9


def site_of(weight: Tensor) -> tuple[Site, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(600, 96, generator=draw) @ torch.randn(96, 96, generator=draw) / 96**0.5
    hessian = Hessian(96, x.device, dtype=torch.float64)
    hessian.update(x, None)
    return Site(
        {"a": weight, "b": weight[:8] * 2}, {"hessian": hessian.result()}, dict.fromkeys("ab", torch.bfloat16), Comm()
    ), x


@pytest.mark.parametrize(
    "options",
    [{}, {"grid": "asymmetric"}, {"group_size": -1}, {"grid": "narrow", "group_size": 96}],
    ids=lambda options: "-".join(map(str, options.values())) or "usual",
)
@pytest.mark.parametrize("kind", [RTN, GPTQ, AWQ])
def test_outliers_lower_the_error_of_every_method(kind, options):
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    weight[torch.rand(64, 96, generator=torch.Generator().manual_seed(4)) < 0.01] *= 6
    site, x = site_of(weight)
    more = {"drift": 0.0} if kind is GPTQ else {}
    errors = []
    for share in (0.0, 0.01, 0.04):
        decision = kind(scheme="w3a16", **{"group_size": 32, **options}, outliers=share, **more).apply(site)["a"]
        errors.append(float(((decision.weight.dequantize(x.dtype) - weight) @ x.t()).square().sum()))
        terms = decision.weight.terms
        assert len(terms) == 1 + (share > 0)
        if share:
            exact = terms[1].dequantize()
            assert (exact != 0).double().mean() == pytest.approx(share, rel=0.4)
            assert bool((terms[0].dequantize()[exact != 0] == 0).all()), "codes stand for 0 where a value is exact"
    assert errors[0] > 1.3 * errors[1] > 1.3 * errors[2]


@pytest.mark.parametrize("order", ["static", "group"])
def test_outliers_go_with_every_order_of_the_columns(order):
    site, _ = site_of(torch.randn(64, 96, generator=torch.Generator().manual_seed(5)) ** 3)
    how = {"scheme": "w3a16", "group_size": 32, "drift": 0.0, "act_order": order}
    plain, exact = (GPTQ(**how, outliers=share).apply(site)["a"] for share in (0.0, 0.02))
    assert exact.figures["loss"] < 0.8 * plain.figures["loss"]
    assert exact.figures["outliers"] == pytest.approx(0.02, rel=0.3)
