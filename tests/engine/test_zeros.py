"""Pruned by one command, rounded or trained by the next: zeros that a model comes with stay zero."""

import copy
from pathlib import Path

import pytest
import torch
from commands import command, fast_gptq, last_line, make_llama
from models import tokens
from torch import nn

import compress
from compress.base.errors import CompressError, InputError
from compress.model.layers import Layer
from compress.passes.protocol.base import Pass
from compress.weights.grid import quantize
from compress.weights.masks import Earlier, zeros_in
from compress.weights.rounded_zeros import evidence, explained

CAME = "zeros_before"
FEW = {"steps": 2, "rows": 4, "warmup": 0}
KEEPING = {
    "gptq": fast_gptq(scheme="w4a16", group_size=32),
    "gptq, asymmetric": fast_gptq(scheme="w2a16", group_size=32, grid="asymmetric", outliers=0.02),
    "awq": compress.AWQ(scheme="w3a16", group_size=32),
    "ternary": compress.Ternary(group_size=32, steps=2, refit=0, sweeps=0),
    "rounded inputs": compress.RTN(scheme="w8a8"),
    "wanda": compress.Wanda(sparsity=0.6),
    "training": compress.Train(**FEW, learning_rate=1e-3, keep="last"),
}


def matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the layers inside the blocks."""
    return {name: p for name, p in model.named_parameters() if name.endswith("proj.weight")}


def halved() -> nn.Module:
    """A model that is 2:4 in every layer but one, which is half zeros."""
    model = make_llama()
    for name, weight in matrices(model).items():
        size = weight.data.abs().view(len(weight), -1, 4)
        smallest = size.argsort(dim=-1)[..., :2]
        mask = torch.ones_like(size, dtype=torch.bool).scatter_(-1, smallest, False).view_as(weight)
        weight.data *= mask.flip(1) if "o_proj" in name else mask
    return model


@pytest.fixture(scope="module")
def pruned() -> nn.Module:
    return halved()


@pytest.fixture(scope="module")
def folder(pruned: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pruned` as a plain checkpoint that no run has written."""
    path = tmp_path_factory.mktemp("pruned") / "model"
    pruned.save_pretrained(path)
    return path


@pytest.mark.parametrize("one", KEEPING.values(), ids=KEEPING)
def test_a_pass_keeps_the_zeros_that_a_model_comes_with(one: Pass, pruned: nn.Module) -> None:
    before, model = matrices(pruned), copy.deepcopy(pruned)
    record = compress.quantize(model, one, calibration=tokens(16, 16)).record
    changed = 0
    for name, weight in matrices(model).items():
        assert not weight[before[name] == 0].any(), name
        changed += int((weight != before[name]).sum())
    assert changed
    said = [note for note in record.notes if "14 of 14 layers came pruned, 50.0% of their weights" in note]
    assert len(said) == 1
    assert "--drop-zeros" in said[0]
    assert {layer.figures[CAME] for layer in record.layers} == {0.5}


def test_zeros_that_are_let_go_of_are_weights_like_others(pruned: nn.Module) -> None:
    before, model = matrices(pruned), copy.deepcopy(pruned)
    method = fast_gptq(scheme="w4a16", group_size=32)
    record = compress.quantize(model, method, calibration=tokens(16, 16), drop_zeros=True).record
    assert any(weight[before[name] == 0].any() for name, weight in matrices(model).items())
    assert not [note for note in record.notes if "zeros" in note]
    for one in (compress.Binary(**BARE), compress.Structure(channels=0.5)):
        compress.quantize(copy.deepcopy(pruned), one, calibration=tokens(16, 16), drop_zeros=True)


BARE = {"group_size": 32, "refit": 0, "sweeps": 0}
DROPPING = [compress.SpQR(group_size=8, tile_rows=8), compress.Binary(**BARE), compress.LQS(rank=2), compress.LowRank()]
DROPPING += [compress.Structure(channels=0.5), compress.Structure(layers=1)]


@pytest.mark.parametrize("one", DROPPING, ids=lambda one: one.name)
def test_a_pass_that_keeps_no_zeros_is_refused_before_any_work(one: Pass, pruned: nn.Module) -> None:
    before, model = {n: p.clone() for n, p in pruned.named_parameters()}, copy.deepcopy(pruned)
    with pytest.raises(InputError, match=rf"q_proj comes pruned \(50% .* {one.name} keeps no zeros; .* --drop-zeros"):
        compress.quantize(model, one, calibration=tokens(16, 16))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_zeros_that_no_look_at_some_rows_finds_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama()
    monkeypatch.setattr("compress.engine.plan.existing_zeros.LOOKED_AT", 2)
    model.model.layers[1].mlp.up_proj.weight.data[1:20, ::2] = 0
    with pytest.raises(CompressError, match=r"layers.1.mlp.up_proj comes pruned .* binary keeps no zeros"):
        compress.quantize(model, compress.Binary(**BARE), calibration=tokens(16, 16))


def test_the_command_line_keeps_zeros_or_says_how_to_let_go_of_them(folder: Path, token_file: Path, tmp_path: Path):
    how = ("--calibration", token_file, "--group-size", 32)
    words = ("quantize", folder, *how, "--set", "sweeps=0", "--set", "refit=0", "--output", tmp_path / "out")
    refused = command(*words, "--method", "binary")
    assert (refused.code, (tmp_path / "out").exists()) == (2, False)
    assert "q_proj comes pruned" in last_line(refused)
    kept = command(*words, "--method", "gptq")
    assert kept.code == 0, kept
    assert "14 of 14 layers came pruned" in " ".join((kept.err + kept.out).split())
    before = matrices(compress.load(folder))
    for name, weight in matrices(compress.load(tmp_path / "out", dequantize=True)).items():
        assert not weight[before[name] == 0].any()


def test_what_a_record_says_of_few_zeros_counts(llama: Path, tmp_path: Path) -> None:
    thin = tmp_path / "thin"
    compress.quantize(llama, compress.Magnitude(sparsity=0.03), output=thin, verify=False)
    done = compress.quantize(thin, compress.RTN(group_size=32)).record
    assert {CAME in layer.figures for layer in done.layers} == {True}
    with pytest.raises(InputError, match=r"comes pruned \(2% "):
        compress.quantize(thin, compress.Binary(**BARE), calibration=tokens(16, 16))
    alone = compress.quantize(compress.load(thin), compress.RTN(group_size=32)).record
    assert not [layer for layer in alone.layers if CAME in layer.figures]


def test_few_zeros_padding_and_layers_that_are_not_treated_are_no_pruning() -> None:
    model = make_llama()
    inner = model.model
    inner.embed_tokens.weight.data[:, ::2] = 0
    inner.layers[0].mlp.up_proj.weight.data[::2] = 0  # padding: whole outputs
    inner.layers[0].mlp.gate_proj.weight.data.flatten()[::25] = 0  # 4 %
    inner.layers[1].mlp.down_proj.weight.data[:] = 0
    inner.layers[1].self_attn.q_proj.weight.data[:, ::2] = 0
    method = compress.but(compress.RTN(group_size=32), "*1.self_attn.q_proj")
    record = compress.quantize(model, method).record
    assert not [layer.name for layer in record.layers if CAME in layer.figures]
    assert not [note for note in record.notes if "came pruned" in note]


def test_a_share_is_of_the_rows_that_hold_something() -> None:
    weight = torch.rand(4, 10, generator=torch.Generator().manual_seed(0)) + 1
    weight[0] = 0
    weight[1, :3] = 0
    assert zeros_in(weight) == (3, 30)
    assert Earlier().share("a", 3, 30) == pytest.approx(0.1)
    assert Earlier(kept=False).share("a", 3, 30) is None
    assert Earlier().share("a", 3, 100) is None
    assert Earlier(recorded={"a": 0.03}).share("a", 3, 100) == pytest.approx(0.03)
    assert Earlier(recorded={"a": 0.5}).share("a", 3, 100) is None, "trained since by somebody who keeps no record"
    assert Earlier().share("a", 0, 0) is None
    assert torch.equal(Earlier().mask("a", weight), weight != 0)


def test_zeros_of_a_grid_are_no_pruning_and_those_beside_them_are(llama: Path, tmp_path: Path) -> None:
    """A plain model with the values of 4 bits can be rounded by any method; pruned, its zeros stay."""
    rounded = compress.quantize(compress.load(llama), compress.RTN(scheme="w4a16", group_size=32)).model
    assert all(0.05 < (weight == 0).float().mean() < 0.2 for weight in matrices(rounded).values())
    rounded.save_pretrained(tmp_path / "plain")
    for one in (compress.SpQR(group_size=8, tile_rows=8, refit=0, sweeps=0), compress.RTN(group_size=32)):
        done = compress.quantize(tmp_path / "plain", one, calibration=tokens(16, 16) if one.calibrated else None)
        assert not [layer.name for layer in done.record.layers if CAME in layer.figures]
    compress.quantize(rounded, compress.Magnitude(sparsity=0.5))
    with pytest.raises(InputError, match="q_proj comes pruned"):
        compress.quantize(rounded, compress.Binary(**BARE), calibration=tokens(16, 16))


@pytest.mark.parametrize("scheme", ["w2a16", "w3a16", "w4a16", "nvfp4a16", "mxfp4a16", "nf4a16"])
@pytest.mark.parametrize("group_size", [32, -1])
def test_what_a_grid_explains(scheme: str, group_size: int) -> None:
    weight_NK = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    sized = {} if "f" in scheme else {"group_size": group_size}
    codes = quantize(weight_NK, compress.RTN(scheme=scheme, **sized).weight_grid(), torch.bfloat16)
    of_a_grid, halves = codes.dequantize().bfloat16(), weight_NK.view(64, -1, 4).abs().argsort(-1).argsort(-1) > 1
    assert explained(evidence(of_a_grid))
    assert explained(evidence(torch.where(torch.arange(64)[:, None] < 26, 0, of_a_grid)))  # with rows of padding
    assert not explained(evidence(of_a_grid * halves.view(64, 256)))
    for dtype in (torch.float32, torch.bfloat16):
        pruned = torch.where(weight_NK.abs() > 0.1, weight_NK, 0).to(dtype)
        assert 0.05 < (pruned == 0).float().mean() < 0.1
        assert not explained(evidence(pruned))


def test_layers_are_counted_where_they_are_stored_transposed() -> None:
    from transformers.pytorch_utils import Conv1D

    from compress.engine.plan.existing_zeros import _count_zeros

    module = Conv1D(6, 4)
    module.weight.data[:, 0] = 0
    module.weight.data[:2, 1] = 0
    assert _count_zeros(Layer("a", module), 64) == (2, 20, False)
