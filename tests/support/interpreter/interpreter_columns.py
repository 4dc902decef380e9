"""Sweeps and descent on a GPU, run as `interpreter_cases` runs the other kernels: the codes of the loops of a CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreter_cases import guarded  # noqa: F401  every test here is held to it
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compress.kernels.operators import columns
from compress.kernels.triton import column_sweep as triton_columns
from compress.solvers.column_sweep import BLOCK, Polish, sweep
from compress.solvers.gptq import GridRule, gptq
from compress.solvers.hessian_with_drift import Problem
from compress.solvers.spqr import spqr
from compress.weights import grid as grids
from compress.weights.formats.tiles import Tiles
from compress.weights.grid import Grid, fit

OUTPUTS, INPUTS, GROUP = 11, 32, 16
SIGNED = Grid(bits=4, signed_scale=True, granularity="group", group_size=GROUP, range_choice="mse")
ASYMMETRIC = replace(SIGNED, bits=3, signed_scale=False, symmetric=False, signed=False)
TABLE = Grid(bits=4, type="normal", granularity="group", group_size=GROUP)
MXFP4 = replace(TABLE, type="float", scales="e8m0")
ROUNDS = {"refit": 1, "sweeps": 1}


def layer(outputs: int = OUTPUTS, inputs: int = INPUTS) -> tuple[Tensor, Tensor]:
    """A weight [N, K] and the Hessian of its inputs."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20 * inputs, inputs, generator=g) @ torch.randn(inputs, inputs, generator=g)
    return torch.randn(outputs, inputs, generator=g), x.t() @ x / len(x)


def kept() -> Tensor:
    return torch.rand(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)) < 0.6


CASES: dict[str, dict[str, Any]] = {
    "signed scales": {"grid": SIGNED, **ROUNDS},
    "zero points, bfloat16": {"grid": ASYMMETRIC, "scale_dtype": torch.bfloat16, **ROUNDS},
    "extremes, by activations": {"grid": SIGNED.plain, "act_order": "group", "scale_dtype": torch.float16, "sweeps": 1},
    "fixed scales that float16 has": {"grid": replace(SIGNED, scales="float16"), "act_order": "static", "sweeps": 1},
    "a group of a channel": {"grid": replace(SIGNED, granularity="channel", group_size=None)},
    "pruned": {"grid": SIGNED, "kept_NK": kept(), "sweeps": 1},
    "outliers": {"grid": SIGNED, "outliers": 0.05, "scale_dtype": torch.bfloat16, "sweeps": 1},
    "coupled outputs": {"grid": SIGNED, "outputs_NS": torch.eye(4).repeat(3, 1)[:OUTPUTS] + 0.3, "sweeps": 1},
    "NF4": {"grid": TABLE, "scale_dtype": torch.bfloat16, "sweeps": 1},
    "MXFP4": {"grid": MXFP4, "scale_dtype": torch.bfloat16, "sweeps": 1},
}


@pytest.fixture
def in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in a block of few columns, one program, not all of whose rows are there, few ranges to search."""
    monkeypatch.setattr(triton_columns, "ROWS", 16)
    monkeypatch.setattr(triton_columns, "COLUMNS", 8)
    monkeypatch.setattr(grids, "SEARCH_STEPS", 5)


def on_both(monkeypatch: pytest.MonkeyPatch, solve: Callable[[], Any]) -> tuple[Any, Any]:
    """What Triton solves, and what the loops of a CPU do."""
    there = solve()
    monkeypatch.setattr(columns, "why_not_triton", lambda device: ("the CPU is asked for",))
    return there, solve()


@pytest.mark.parametrize("case", CASES)
def test_gptq(case: str, in_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of a search and of feedback between groups are in another order."""
    weight, hessian = layer()
    there, here = on_both(monkeypatch, lambda: gptq(weight, hessian, **CASES[case]))
    one, other = there.weight.terms[0], here.weight.terms[0]
    assert (one.codes.float() != other.codes.float()).float().mean() < 0.01
    torch.testing.assert_close(one.scale.float(), other.scale.float(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(there.loss_N.sum(), here.loss_N.sum(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_spqr(outliers: float, in_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = layer()
    how: dict[str, Any] = {"format_": Tiles(group_size=GROUP), "outliers": outliers, "scale_dtype": torch.bfloat16}
    there, here = on_both(monkeypatch, lambda: spqr(weight, hessian, **how, **ROUNDS))
    one, other = (solved.weight.dequantize(torch.float32) for solved in (there, here))
    assert (one != other).float().mean() < 0.01
    torch.testing.assert_close(there.loss_N.sum(), here.loss_N.sum(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("members", [40, 100])
def test_the_scales_that_are_found(members: int, in_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """More members than a tile has, and no importance."""
    x = torch.randn(OUTPUTS, members, generator=torch.Generator().manual_seed(0))
    there, here = on_both(monkeypatch, lambda: fit(x, ASYMMETRIC, torch.bfloat16))
    for one, other in zip(there, here, strict=True):
        assert torch.equal(one, other)


class Launches(TorchDispatchMode):
    """Counts the operations of torch that launch something, and stands in for a kernel that it counts, too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in func.name()
        return func(*args, **(kwargs or {}))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.count += 1
            self.kernels += 1

        return launch


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_block_of_columns_takes_three_launches(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets, the product of the errors so far, and the sweep with the search for the scales of all groups."""
    found = []
    for blocks in (2, 5):
        weight, hessian = layer(4, blocks * BLOCK)
        problem = Problem.of(hessian)
        grid = replace(SIGNED, group_size=group)
        rule = GridRule.of(weight, problem, grid, torch.float32, None, None, None)
        with Launches() as launches:
            monkeypatch.setattr(triton_columns, "columns_kernel", launches)
            sweep(weight, problem, rule)
        found.append(launches.count)
    assert found[1] - found[0] <= 3 * 3
    polish = Polish(weight, weight, rule, problem.polish_hessian())
    with Launches() as launches:
        monkeypatch.setattr(triton_columns, "columns_kernel", launches)
        polish.descend(slice(0, BLOCK))
    assert launches.kernels == 1
