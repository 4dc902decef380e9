"""Rules for scales of small floats, against searches through every scale that there is."""

import math

import pytest
import torch

import compress
from compress.base.errors import InputError
from compress.solvers.awq import round_rows
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


def test_four_over_six_takes_the_better_of_two_scales():
    x, weight = groups_of(NVFP4)
    grid = NVFP4.with_range("4/6").reaching(float(x.abs().max()))
    found, _ = fit(x, grid, torch.bfloat16, weight)
    local = torch.stack([x.abs().amax(1) / level for level in (6, 4)], 1) * grid.global_scale
    two = local.to(FLOAT8).float() / grid.global_scale
    loss = errors(x, two, grid, weight)
    assert torch.equal(found, torch.where(loss[:, 1] < loss[:, 0], two[:, 1], two[:, 0]))
    assert 0.1 < (loss[:, 1] < loss[:, 0]).float().mean() < 0.9


@pytest.mark.parametrize(
    ("name", "exponent", "largest"), [("mxfp4", 2, 6.0), ("mxfp6", 2, 7.5), ("mxfp6e3m2", 4, 28.0), ("mxfp8", 8, 448.0)]
)
def test_floor_and_ceil_are_the_rules_of_their_sources(name, exponent, largest):
    grid = POWERS[name]
    amax = [1.0, 1.74, 1.75, 1.9999, 2.0, 3.0, 3.0001, 6.0, 7.5, 7.49, 448.0, 449.0, 0.4375]
    x = torch.zeros(len(amax), 32)
    x[:, 3] = torch.tensor(amax)
    floor, _ = fit(x, grid.with_range("floor"), torch.bfloat16)
    assert floor.tolist() == [2.0 ** (math.floor(math.log2(a)) - exponent) for a in amax]
    ceil, _ = fit(x, grid.with_range("ceil"), torch.bfloat16)
    assert ceil.tolist() == [2.0 ** math.ceil(math.log2(a / largest)) for a in amax]
    assert (torch.tensor(amax) <= largest * ceil).all()


def test_rules_stay_where_a_pass_wants_the_plain_range():
    x, weight = groups_of(POWERS["mxfp4"])
    grid = POWERS["mxfp4"].with_range("floor")
    assert grid.plain == grid
    assert torch.equal(
        round_rows(x, torch.diag(weight), grid, torch.bfloat16).scale[:, 0], fit(x, grid, torch.bfloat16)[0]
    )
    assert NVFP4.with_range("4/6").plain == NVFP4
    assert compress.GPTQ(scheme="mxfp4a16", scale_rule="floor").weight_grid().range_choice == "floor"
    assert compress.GPTQ(scheme="mxfp4a16").weight_grid().range_choice == "mse"
    assert compress.RTN(scheme="mxfp4a16").weight_grid().range_choice == "minmax"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "w4a16", "scale_rule": "floor"}, "'floor' is for mxfp4a16, .*; w4a16 has no such scales"),
        ({"scheme": "nvfp4a16", "scale_rule": "ceil"}, "'ceil' is for mxfp4a16, .*; nvfp4a16 has no such scales"),
        ({"scheme": "mxfp4", "scale_rule": "4/6"}, "'4/6' is for nvfp4a16, nvfp4; mxfp4 has no such scales"),
        ({"scheme": "mxfp4a16", "scale_rule": "floor", "clip": True}, "says how scales are chosen; leave clip out"),
        ({"scheme": "mxfp4a16", "scale_rule": "round"}, "scale_rule 'round'; allowed: clip, floor, ceil, 4/6"),
    ],
)
def test_rules_for_other_scales_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        compress.RTN(**options)
