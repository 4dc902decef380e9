"""The compiled loops of the solver decide what torch's operations do."""

import ctypes

import pytest
import torch
from combinations import every

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu.columns import Block
from compress.passes.columns import gptq
from compress.passes.polish import GridRule, Settled
from compress.weights.grid import Grid, decode, encode, fit

COLUMNS, GROUP = 24, 8
GRIDS = {
    "signed scale": Grid(bits=4, signed_scale=True, granularity="group", group_size=GROUP, range_choice="mse"),
    "asymmetric": Grid(
        bits=3, symmetric=False, signed=False, granularity="group", group_size=GROUP, range_choice="mse"
    ),
    "narrow": Grid(bits=2, narrow=False, granularity="group", group_size=GROUP, range_choice="mse"),
    "unsigned": Grid(bits=4, signed=False, granularity="group", group_size=GROUP, range_choice="mse"),
}


@pytest.fixture(params=["native", "avx2"])
def library(request, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    if cpu.machine_reasons():
        pytest.skip("; ".join(cpu.machine_reasons()))
    found, reasons = cpu.build_and_load(cpu.cache_directory(), cpu.flags_for(request.param), "columns")
    if found is None:
        pytest.skip("; ".join(reasons))
    monkeypatch.setattr(cpu, "library", lambda name: found)
    monkeypatch.setattr(cpu, "why_not", lambda name: ())
    return found


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "why_not", lambda name: ("asked to do without",))


def rule(grid: Grid, dtype: torch.dtype, rows: int, kept: bool, price: bool, settled: bool) -> GridRule:
    """A rule that has scales already, for columns in an order of their own."""
    draw = torch.Generator().manual_seed(rows)
    group_of = torch.randperm(COLUMNS, generator=draw) // GROUP
    weight = torch.randn(COLUMNS, rows, generator=draw)
    scale, zero = fit(weight.view(-1, GROUP, rows).transpose(1, 2), grid.with_range("minmax"), dtype)
    made = GridRule(
        grid, dtype, 0, group_of.tolist(), torch.ones(COLUMNS), torch.rand(COLUMNS, generator=draw), weight, scale, zero
    )
    made.settled = settled
    made.codes = torch.randint(grid.qmin, grid.qmax + 1, (COLUMNS, rows), generator=draw).float()
    if kept:
        made.kept = torch.rand(COLUMNS, rows, generator=draw) < 0.6
    if price:
        made.price = torch.rand(rows, generator=draw) * 0.01
        made.exact = torch.rand(COLUMNS, rows, generator=draw) < 0.1
    return made


def block(rows: int) -> Block:
    draw = torch.Generator().manual_seed(rows + 1)
    parts = [torch.randn(COLUMNS, rows, generator=draw) for _ in range(4)]
    matrix = torch.randn(COLUMNS, COLUMNS, generator=draw) / 4
    matrix.diagonal().abs_().add_(0.5)
    return Block(0, *parts, matrix, matrix.diagonal().clone(), torch.zeros(rows))


def held(made: GridRule, here: Block) -> list[torch.Tensor]:
    return [made.codes, here.value, here.change, here.loss, *([] if made.exact is None else [made.exact])]


@every("rows", [17, 130])
@every("kept", [False, True])
@every("price", [False, True])
@every("dtype", [torch.float16, torch.bfloat16])
@every("grid", list(GRIDS))
@every("loop", ["run", "descend"])
def test_a_run_of_columns_is_decided_as_one_by_one(library, loop, grid, dtype, price, kept, rows):
    settled = loop == "descend"
    found = []
    for kind in (GridRule, Settled):
        made, here = rule(GRIDS[grid], dtype, rows, kept, price, settled), block(rows)
        if settled:
            kind.descend(made, here)
        else:
            kind.run(made, here, 3, COLUMNS)
        found.append(held(made, here))
    # Sums of feedback are rounded once per column here, and there as torch likes it.
    for compiled, plain in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


@every("grid", list(GRIDS))
@every("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every("groups", [1, 16, 50])
def test_the_range_that_is_found_has_the_least_error(library, monkeypatch, groups, dtype, grid):
    draw = torch.Generator().manual_seed(groups)
    x, weight = torch.randn(groups, 40, generator=draw).exp() - 1.5, torch.rand(40, generator=draw)
    x[0] = 0.0

    def error() -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero = (t.unsqueeze(1) for t in fit(x, GRIDS[grid], dtype, weight))
        values = decode(encode(x, scale, zero, GRIDS[grid]), scale, zero, dtype)
        return ((values - x).square() * weight).sum(1), scale

    least, scale = error()
    without(monkeypatch)
    expected, other = error()
    torch.testing.assert_close(least, expected, rtol=1e-5, atol=1e-12)
    assert (scale == other).float().mean() > 0.9


def test_gptq_loses_as_little_as_without_them(library, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(600, 96, generator=draw) @ torch.randn(96, 96, generator=draw)
    weight, hessian = torch.randn(40, 96, generator=draw), x.t() @ x / 600
    grid = Grid(bits=3, signed_scale=True, granularity="group", group_size=32, range_choice="mse")
    losses = []
    for _ in range(2):
        losses.append(gptq(weight, hessian, grid=grid, refit=2, sweeps=2, outliers=0.02).loss_N.sum())
        without(monkeypatch)
    torch.testing.assert_close(*losses, rtol=0.02, atol=0)
