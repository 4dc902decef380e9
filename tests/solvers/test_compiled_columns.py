"""The compiled loops of the solver decide what torch's operations do."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from combinations import every
from emulated import TARGETS, Emulated, emulated

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import processor
from compress.kernels.cpu.column_sweep import SweptBlock
from compress.solvers.gptq import GridRule, gptq
from compress.solvers.tile_rule import TileRule
from compress.weights.formats.tiles import Tiles
from compress.weights.grid import Grid, decode, encode, fit

COLUMNS, GROUP = 24, 8
GRIDS = {
    "signed scale": Grid(bits=4, signed_scale=True, granularity="group", group_size=GROUP, range_choice="mse"),
    "asymmetric": Grid(
        bits=3, symmetric=False, signed=False, granularity="group", group_size=GROUP, range_choice="mse"
    ),
    "narrow": Grid(bits=2, narrow=False, granularity="group", group_size=GROUP, range_choice="mse"),
    "levels": Grid(bits=4, type="float", granularity="group", group_size=GROUP),
    "levels without a sign": Grid(bits=4, type="nonlinear", granularity="group", group_size=GROUP),
    "unsigned": Grid(bits=4, signed=False, granularity="group", group_size=GROUP, range_choice="mse"),
}


@pytest.fixture(
    scope="module",
    params=["native", *(pytest.param(name, marks=pytest.mark.full) for name in ("avx2", "without OpenMP")), *TARGETS],
)
def compiled(request) -> Iterator[ctypes.CDLL | Emulated]:
    if request.param in processor.ARM:
        with emulated(request.param, "columns") as found:
            yield found
        return
    if cpu.machine_reasons():
        pytest.skip("; ".join(cpu.machine_reasons()))
    flags = cpu.flags_for("avx2" if request.param == "avx2" else processor.target())
    if request.param == "without OpenMP":
        flags = tuple(flag for flag in flags if flag != "-fopenmp")
    found, reasons = cpu.load_from_a_place("columns", flags)
    if found is None:
        pytest.skip("; ".join(reasons))
    yield found


@pytest.fixture
def library(compiled: ctypes.CDLL | Emulated, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL | Emulated:
    found = compiled
    monkeypatch.setattr(cpu, "library", lambda name: found)
    monkeypatch.setattr(cpu, "why_not", lambda name: ())
    return found


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "why_not", lambda name: ("asked to do without",))


def rule(grid: str, dtype: torch.dtype, rows: int, masks: str, swept: bool) -> GridRule | TileRule:
    """A rule that has scales already, for columns in an order of their own."""
    draw = torch.Generator().manual_seed(rows)
    group_of = (torch.randperm(COLUMNS, generator=draw) // GROUP).tolist()
    weight, cost = torch.randn(COLUMNS, rows, generator=draw), torch.rand(COLUMNS, generator=draw)
    groups = weight.view(-1, GROUP, rows).transpose(1, 2)
    price = torch.rand(rows, generator=draw) * 0.01 if "price" in masks else None
    exact = torch.rand(COLUMNS, rows, generator=draw) < 0.1
    codes = torch.randint(0, 4, (COLUMNS, rows), generator=draw).float()
    if grid in GRIDS:
        scale, zero = fit(groups, GRIDS[grid].with_range("minmax"), dtype)
        kept = torch.rand(COLUMNS, rows, generator=draw) < 0.6 if "kept" in masks else None
        numbers = (group_of, torch.ones(COLUMNS), cost, codes, scale, zero)
        return GridRule(GRIDS[grid], dtype, 0, *numbers, kept, None if price is None else exact, price, swept)
    low, high = groups.amin(2), groups.amax(2)
    scale, unused = (high - low) / 7, torch.zeros(0)
    zero = -low / scale
    scale[0, :3] = zero[0, :3] = 0.0
    extra = torch.zeros(COLUMNS, rows, dtype=dtype)
    small = (unused, unused, scale, zero, unused)
    format_ = Tiles(group_size=GROUP)
    return TileRule(format_, dtype, 0, group_of, cost, price, False, False, codes, extra, exact, *small, swept)


def block(rows: int) -> SweptBlock:
    draw = torch.Generator().manual_seed(rows + 1)
    weight, *parts = (torch.randn(COLUMNS, rows, generator=draw) for _ in range(4))
    matrix = torch.randn(COLUMNS, COLUMNS, generator=draw) / 4
    matrix.diagonal().abs_().add_(0.5)
    return SweptBlock(0, *parts, matrix, matrix.diagonal().clone(), weight, torch.zeros(rows))


@every("rows", [17, 130])
@every("masks", ["", "kept", "price", "kept, price"])
@every("dtype", [torch.float16, torch.bfloat16])
@every("grid", [*GRIDS, "tiles"])
@every("loop", ["run", "descend"])
def test_a_run_of_columns_is_decided_as_one_by_one(library, loop, grid, dtype, masks, rows):
    found: list[list[torch.Tensor]] = []
    for compiled in (True, False):
        made, here = rule(grid, dtype, rows, masks, swept=loop == "descend"), block(rows)
        if not compiled:
            made.compiled = lambda: None  # type: ignore[method-assign]
        assert (made.compiled() is not None) == compiled
        if loop == "descend":
            made.descend(here)
        else:
            made.run(here, 3, COLUMNS)
        decided = [made.exact] if "price" in masks and made.exact is not None else []
        decided += [made.extra] if isinstance(made, TileRule) else []
        found.append([made.codes, here.value, here.change, here.loss, *decided])
    # A sum of feedback is rounded once per column here, and there as torch likes it.
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@every("grid", list(GRIDS))
@every("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every("groups", [1, 16, 50])
@every("scales", ["stored", "float16"])
def test_the_range_that_is_found_has_the_least_error(library, monkeypatch, scales, groups, dtype, grid):
    searched = replace(GRIDS[grid], scales=scales)
    draw = torch.Generator().manual_seed(groups)
    x, weight = torch.randn(groups, 40, generator=draw).exp() - 1.5, torch.rand(40, generator=draw)
    x[0] = 0.0

    def error() -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero = (t.unsqueeze(1) for t in fit(x, searched, dtype, weight))
        values = decode(encode(x, scale, zero, searched), scale, zero, dtype)
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
