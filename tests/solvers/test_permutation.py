"""Inputs that change groups of N:M: more is kept, the function stays, and what cannot move is named."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blocks import first_block, livelier
from commands import StopAfterOne
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build, tokens

import compress
from compress.model.structure.discovery import discover
from compress.model.structure.orders import find_orders, why_not
from compress.solvers.permutation import better_order, kept_of
from compress.weights.masks import Pattern, parse_pattern

TWO_OF_FOUR = Pattern(2, 4)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.sampled_from(["2:4", "1:4", "1:2", "3:5"]), st.integers(0, 99))
def test_an_order_keeps_as_much_as_none_and_has_every_channel_once(
    rows: int, groups: int, word: str, seed: int
) -> None:
    pattern = parse_pattern(word)
    score = torch.rand(rows, groups * pattern.length, generator=torch.Generator().manual_seed(seed)).pow(3)
    order = better_order(score, pattern, rounds=10)
    assert torch.equal(order.sort().values, torch.arange(score.shape[1]))
    assert kept_of(score[:, order], pattern) >= kept_of(score, pattern)
    rows_kept = [sorted(row, reverse=True)[: pattern.kept] for row in score.view(-1, pattern.length).tolist()]
    assert kept_of(score, pattern) == pytest.approx(sum(map(sum, rows_kept)), rel=1e-5)


def test_the_best_of_all_orders_is_found_where_there_are_few() -> None:
    """Eight channels in two groups: every way to split them."""
    found = []
    for seed in range(12):
        score = torch.rand(16, 8, generator=torch.Generator().manual_seed(seed)).pow(4)
        splits = [[*one, *set(range(8)).difference(one)] for one in itertools.combinations(range(8), 4)]
        best = max(kept_of(score[:, split], TWO_OF_FOUR) for split in splits)
        found.append(kept_of(score[:, better_order(score, TWO_OF_FOUR, rounds=20)], TWO_OF_FOUR) / best)
    assert min(found) > 0.985
    assert sum(one > 1 - 1e-6 for one in found) >= 8


def test_large_channels_that_lie_side_by_side_are_parted() -> None:
    score = torch.rand(64, 32, generator=torch.Generator().manual_seed(1))
    score[:, :8] += 10
    assert kept_of(score[:, better_order(score, TWO_OF_FOUR, rounds=50)], TWO_OF_FOUR) > 1.7 * kept_of(
        score, TWO_OF_FOUR
    )


@pytest.mark.parametrize(
    ("kind", "free", "per_head"),
    [
        ("llama", "mlp.down_proj", "self_attn.o_proj"),
        ("gpt2", "mlp.c_proj", "attn.c_proj"),
        ("opt", "fc2", "self_attn.out_proj"),
    ],
)
def test_channels_change_places_in_an_mlp_and_inside_a_head(kind: str, free: str, per_head: str) -> None:
    block, call = first_block(kind)
    orders = find_orders(block, call, discover(block, call).folds)
    widths = {name: each.shape for places in orders.found for name, each in places.consumers.items()}
    heads = 2 if kind == "llama" else 4  # of keys and values; their copies are query heads
    assert widths[free][1] in (64, 128)
    assert widths[per_head] == (4 // heads, 8)
    assert sum(per_head in places.consumers for places in orders.found) == heads
    assert not orders.rejected


def test_a_block_that_tells_its_channels_apart_keeps_their_order() -> None:
    """What knows a channel by its place (here a ramp over channels) is found out by trying."""
    block, call = first_block("llama")
    (places,) = (one for one in find_orders(block, call, ()).found if "mlp.down_proj" in one.consumers)
    assert why_not(block, call, places) is None
    before = {name: p.clone() for name, p in block.named_parameters()}
    block.mlp.act_fn = torch.nn.Sequential(block.mlp.act_fn, Ramp(torch.linspace(0.5, 2.0, 64)))
    assert why_not(block, call, places).startswith("permuted, what the block computes is off by ")
    assert not any("mlp.down_proj" in one.consumers for one in find_orders(block, call, ()).found)
    assert all(torch.equal(p, before[name]) for name, p in block.named_parameters())


class Ramp(torch.nn.Module):
    """A number per channel that is no tensor of the module."""

    def __init__(self, ramp: torch.Tensor) -> None:
        super().__init__()
        self.__dict__["ramp"] = ramp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.ramp.to(x)


@pytest.mark.parametrize("method", [compress.Magnitude, compress.Wanda, compress.SparseGPT], ids=lambda m: m.name)
def test_a_run_keeps_more_says_so_and_names_what_stays(method: type) -> None:
    model = livelier(build("llama"))
    result = compress.quantize(model, method(pattern="2:4", permute=20), calibration=tokens(8, 32))
    kept = {layer.name.rpartition(".")[2]: layer.figures for layer in result.record.layers}
    for name in ("o_proj", "down_proj"):
        assert kept[name]["kept_permuted"] > kept[name]["kept_in_order"]
    assert kept["q_proj"]["order"] == "no rows that make its inputs can change places with them"
    (said,) = (note for note in result.record.notes if "changed groups" in note)
    assert said.startswith("inputs of 4 of 14 layers have changed groups of a pattern, which keep ")
    assert "; of 10 layers they stay: no rows that make its inputs" in said
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            assert torch.all((parameter != 0).view(len(parameter), -1, 4).sum(-1) <= 2)


def test_magnitude_keeps_of_the_model_what_the_figures_say() -> None:
    model, plain = build("llama"), build("llama")
    one = compress.Magnitude(pattern="2:4", permute=20)
    result = compress.quantize(model, one, calibration=tokens())
    compress.quantize(plain, replace(one, permute=0))
    figures = {layer.name: layer.figures for layer in result.record.layers}
    for made, key in ((model, "kept_permuted"), (plain, "kept_in_order")):
        weight = made.model.layers[0].mlp.down_proj.weight.data
        whole = build("llama").model.layers[0].mlp.down_proj.weight.data.abs().sum()
        assert float(weight.abs().sum() / whole) == pytest.approx(figures["model.layers.0.mlp.down_proj"][key])


def test_a_run_that_permutes_resumes_and_is_what_transformers_loads(llama: Path, tmp_path: Path) -> None:
    passes = [compress.SparseGPT(pattern="2:4", permute=5), compress.GPTQ(scheme="w4a16", group_size=32)]
    how = {"calibration": tokens(16, 16), "verify": False}
    compress.quantize(llama, passes, output=tmp_path / "whole", **how)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(llama, passes, output=tmp_path / "out", reporter=StopAfterOne(), **how)
    compress.quantize(llama, passes, output=tmp_path / "out", resume=True, **how)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert files[0] == files[1]
    assert compress.verify(tmp_path / "out")["transformers"] == "compared"
    notes = [json.loads((tmp_path / name / "compress.json").read_text())["notes"] for name in ("whole", "out")]
    assert any("changed groups of a pattern" in note for note in notes[0])
    assert [n for n in notes[1] if "changed groups" in n] == [n for n in notes[0] if "changed groups" in n]


def test_layers_that_are_decided_about_stay_as_they_are() -> None:
    model = build("llama")
    first = compress.only(compress.Magnitude(pattern="2:4"), "*.up_proj")
    rest = compress.but(compress.Wanda(pattern="2:4", permute=5), "*.up_proj")
    result = compress.quantize(model, [first, rest], calibration=tokens())
    figures = {layer.name: layer.figures for layer in result.record.layers}
    assert figures["model.layers.0.mlp.down_proj"]["order"].startswith("an earlier pass has decided about it")
    assert "kept_permuted" in figures["model.layers.0.self_attn.o_proj"]
