"""Rules for scales of small floats, against searches through every scale that there is."""

import pytest
import torch

import compress
from compress.weights.formats.levels import LEVEL_FORMATS
from compress.weights.grid import Grid, decode, encode, fit
from compress.weights.scale_numbers import FLOAT8

POWERS = {name: LEVEL_FORMATS[name].on for name in ("mxfp4", "mxfp6", "mxfp6e3m2", "mxfp8")}
NVFP4 = LEVEL_FORMATS["nvfp4"].on
ROWS = 200


def groups_of(grid: Grid, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(Groups with outliers, weights of their members' errors, of which some are 0)."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, grid.group_size, generator=draw) * torch.randn(ROWS, 1, generator=draw).exp()
    x[torch.rand(x.shape, generator=draw) < 0.02] *= 5
    weight = torch.randn(grid.group_size, generator=draw).exp()
    weight[::7] = 0
    return x, weight


def errors(x: torch.Tensor, scales: torch.Tensor, grid: Grid, weight: torch.Tensor) -> torch.Tensor:
    """[groups, scales]: weighted squared errors with each of the scales [scales] or [groups, scales]."""
    s = scales.expand(len(x), -1).unsqueeze(-1)
    values = decode(encode(x.unsqueeze(1), s, torch.zeros_like(s), grid), s, torch.zeros_like(s), torch.float32)
    return ((values - x.unsqueeze(1)).square() * (weight / weight.mean())).sum(-1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", POWERS)
def test_a_search_finds_the_best_of_all_powers_of_two(name, weighted):
    grid = POWERS[name].with_range("mse")
    x, weight = groups_of(grid)
    weight = weight if weighted else torch.ones_like(weight)
    found, _ = fit(x, grid, torch.bfloat16, weight)
    every = 2.0 ** torch.arange(-20, 12)
    best = errors(x, every, grid, weight).amin(1)
    assert torch.equal(errors(x, found.unsqueeze(1), grid, weight)[:, 0], best)
    usual, _ = fit(x, POWERS[name], torch.bfloat16)
    assert (errors(x, usual.unsqueeze(1), grid, weight)[:, 0] >= best).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_search_of_nvfp4_finds_the_best_float8_scale_from_half_to_twice_the_whole_range(weighted):
    x, weight = groups_of(NVFP4)
    weight = weight if weighted else torch.ones_like(weight)
    grid = NVFP4.with_range("mse").reaching(float(x.abs().max()))
    divisor = grid.global_scale
    every = torch.arange(1, 127, dtype=torch.uint8).view(FLOAT8).float() / divisor
    whole = x.abs().amax(1, keepdim=True) / 6
    loss = errors(x, every, grid, weight)
    loss[(every < whole / 2) | (every > whole * 2)] = torch.inf
    found, _ = fit(x, grid, torch.bfloat16, weight)
    assert torch.isin(found, every).all()
    assert (errors(x, found.unsqueeze(1), grid, weight)[:, 0] <= loss.amin(1)).all()


def test_gptq_searches_and_rounding_does_not():
    assert compress.GPTQ(scheme="mxfp4a16").weight_grid().range_choice == "mse"
    assert compress.RTN(scheme="mxfp4a16").weight_grid().range_choice == "minmax"
