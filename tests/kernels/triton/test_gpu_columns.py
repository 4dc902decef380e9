"""Sweeps, descent and the search for scales on a GPU beside the loops of a CPU. Run with `pytest -m gpu`."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.solvers.column_sweep import Solved
from compress.solvers.gptq import solve_on_grid
from compress.solvers.hessian_with_drift import Problem
from compress.solvers.k_quants.solve import KRule
from compress.solvers.tile_rule import TileRule
from compress.weights.formats.k_quants import KQuant
from compress.weights.formats.tiles import Tiles
from compress.weights.grid import Grid, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OUTPUTS, INPUTS = 300, 768
SIGNED = Grid(bits=4, signed_scale=True, granularity="group", group_size=128, range_choice="mse")
ASYMMETRIC = replace(SIGNED, signed_scale=False, symmetric=False, signed=False, bits=3, group_size=32)
GRIDS = {
    "groups of 128": SIGNED,
    "groups of 32 with zero points": ASYMMETRIC,
    "groups of 256": replace(SIGNED, group_size=256),
    "groups of 96": replace(SIGNED, group_size=96),
    "channels": replace(SIGNED, granularity="channel", group_size=None),
    "NF4": Grid(bits=4, type="normal", granularity="group", group_size=64),
    "MXFP4": Grid(bits=4, type="float", granularity="group", group_size=32, scales="e8m0"),
}


def check(solve: Callable[[Tensor, Problem], Solved], order: str = "none") -> None:
    """The same Problem on both: sums are of another order, and a code that differs is made up for by later ones."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4 * INPUTS, INPUTS, generator=g) @ torch.randn(INPUTS, INPUTS, generator=g) / 16
    weight = torch.randn(OUTPUTS, INPUTS, generator=g)
    problem = Problem.of(x.t() @ x / len(x), act_order=order, group_size=128)
    here = solve(weight, problem)
    there = solve(weight.cuda(), problem.converted(torch.device("cuda"), torch.float32))
    mine, its = here.weight.dequantize().float(), there.weight.dequantize().float().cpu()
    same = ((mine - its).abs() <= 1e-5 * mine.abs()).all(1)  # float32 scales differ by the order of sums
    assert same.float().mean() > 0.9
    torch.testing.assert_close(here.loss_N.sum(), there.loss_N.sum().cpu(), rtol=1e-3, atol=0)


@pytest.mark.kernels("column_sweep.columns_kernel", "column_sweep.search_kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", GRIDS)
def test_gptq(name: str, dtype: torch.dtype) -> None:
    check(lambda weight, problem: solve_on_grid(weight, problem, GRIDS[name], dtype, refit=1, sweeps=1))


@pytest.mark.kernels("column_sweep.columns_kernel")
@pytest.mark.parametrize("order", ["none", "static", "group"])
def test_gptq_of_a_pruned_layer_and_of_one_with_outliers(order: str) -> None:
    kept = torch.rand(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)) < 0.6

    def pruned(weight: Tensor, problem: Problem) -> Solved:
        mask = kept.to(weight.device)
        return solve_on_grid(weight, problem, SIGNED, torch.bfloat16, sweeps=1, kept_NK=mask)

    def with_outliers(weight: Tensor, problem: Problem) -> Solved:
        price = weight.new_full((OUTPUTS,), 0.5)
        return solve_on_grid(weight, problem, SIGNED, torch.bfloat16, sweeps=1, price_N=price)

    check(pruned, order)
    check(with_outliers, order)


@pytest.mark.kernels("column_sweep.columns_kernel")
@pytest.mark.parametrize("price", [None, 0.5])
def test_tiles(price: float | None) -> None:
    def solve(weight: Tensor, problem: Problem) -> Solved:
        price_N = None if price is None else weight.new_full((OUTPUTS,), price)
        return TileRule.of(weight, problem, Tiles(), torch.bfloat16, price_N).solve(weight, problem, 1, 1)

    check(solve)


@pytest.mark.kernels("column_sweep.columns_kernel")
@pytest.mark.parametrize("name", ["q2_k", "q4_k", "q6_k", "iq4_xs"])
def test_k_quants(name: str) -> None:
    check(lambda weight, problem: KRule.of(weight, problem, KQuant(type=name)).solve(weight, problem, 1, 1))


@pytest.mark.kernels("column_sweep.search_kernel")
@pytest.mark.parametrize("members", [16, 96, 4096])
def test_the_scales_that_are_found_are_those_of_a_cpu(members: int) -> None:
    x = torch.randn(1000, members, generator=torch.Generator().manual_seed(0))
    importance = torch.rand(members, generator=torch.Generator().manual_seed(1))
    for weight in (None, importance):
        here = fit(x, ASYMMETRIC, torch.bfloat16, weight)
        there = fit(x.cuda(), ASYMMETRIC, torch.bfloat16, None if weight is None else weight.cuda())
        assert (here[0] == there[0].cpu()).float().mean() > 0.99
