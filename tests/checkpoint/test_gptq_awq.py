"""Layouts of GPTQ and AWQ: the decided values, read back by a transcription of the formats that shares no code."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import command, last_line, make_llama, save
from safetensors.torch import load_file, save_file
from transcribed import awq_weight, gptq_weight, layers_of

import compress
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.export.read_back import by_gptqmodel, read_by_us
from compress.inference.layers.linear import QuantLinear
from compress.passes.protocol.recipe import make_pass

TOKENS = torch.randint(2048, (6, 16), generator=torch.Generator().manual_seed(1))


def reads_back(out: Path, exported: Path) -> None:
    """Our reader finds the weights that were decided, runs on their codes, and saves these packed."""
    dense = compress.load(out, dequantize=True).state_dict()
    again = compress.load(exported, dequantize=True).state_dict()
    assert dense.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in dense.items())
    ours, theirs = compress.load(out), compress.load(exported)
    assert all(type(layer).__name__ == "PackedLinear" for layer in by_words(theirs))
    with torch.no_grad():
        assert torch.equal(ours(TOKENS).logits, theirs(TOKENS).logits)
    kept = load_file(out / "model.safetensors")
    words = {name: tensor for name, tensor in theirs.state_dict().items() if name.endswith("weight_packed")}
    assert len(words) == 14
    assert all(torch.equal(tensor, kept[name]) for name, tensor in words.items())


def by_words(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, QuantLinear)]


def run(tmp_path: Path, method: str = "rtn", dtype: torch.dtype = torch.float16, **options: object) -> Path:
    model = save(make_llama().to(dtype), tmp_path / "model")
    out = tmp_path / "out"
    compress.quantize(model, make_pass(method, options), calibration=TOKENS, output=out, verify=False)
    return out


@pytest.mark.first
@pytest.mark.parametrize(
    ("bits", "method", "group", "dtype"),
    [
        (2, "rtn", 32, torch.float16),
        (3, "rtn", 16, torch.bfloat16),
        (4, "gptq", 32, torch.float16),
        (8, "rtn", -1, torch.float16),
    ],
)
def test_gptq_holds_what_was_decided(bits, method, group, dtype, tmp_path):
    out = run(tmp_path, method, dtype, scheme=f"w{bits}a16", group_size=group)
    written = compress.export(out, tmp_path / "there", "gptq")
    dense = compress.load(out, dequantize=True).state_dict()
    layers = layers_of(written.output)
    assert len(layers) == written.layers == 14
    for name, parts in layers.items():
        assert torch.equal(gptq_weight(parts, bits).to(dtype), dense[f"{name}.weight"])
    reads_back(out, written.output)
    config = json.loads((written.output / "config.json").read_text())["quantization_config"]
    assert config == json.loads((written.output / "quantize_config.json").read_text())
    assert (config["quant_method"], config["bits"], config["group_size"], config["sym"]) == ("gptq", bits, group, True)


@pytest.mark.parametrize("grid", ["asymmetric", "signed-scale"])
def test_awq_holds_what_was_decided(grid, tmp_path):
    out = run(tmp_path, scheme="w4a16", group_size=32, grid=grid)
    written = compress.export(out, tmp_path / "there", "awq")
    dense = compress.load(out, dequantize=True).state_dict()
    layers = layers_of(written.output)
    assert len(layers) == written.layers == 14
    for name, parts in layers.items():
        assert torch.equal(awq_weight(parts, 32).half(), dense[f"{name}.weight"])
    reads_back(out, written.output)
    config = json.loads((written.output / "config.json").read_text())["quantization_config"]
    assert (config["version"], config["modules_to_not_convert"]) == ("gemm", ["lm_head"])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPTQ checkpoint of 4 bits."""
    here = tmp_path_factory.mktemp("gptq")
    return compress.export(run(here, scheme="w4a16", group_size=32), here / "gptq", "gptq").output


def test_an_export_is_read_back_and_again_later(exported, copy_of):
    recorded = json.loads((exported / "compress.json").read_text())["verification"]
    outcome = command("verify", exported)
    assert outcome.code == 0
    assert outcome.out == f"14 layers bit for bit; read by {recorded['reader']}\n"
    assert compress.verify(exported) == recorded
    changed = copy_of(exported)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qweight"][0, 0] ^= 1
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.qweight is not what the run wrote"):
        compress.verify(changed)
    with pytest.raises(CheckpointError, match=r"up_proj of .* does not hold the values that were exported"):
        read_by_us(changed, {"values": json.loads((changed / "compress.json").read_text())["values"]})


@pytest.mark.skipif(find_spec("gptqmodel") is None, reason="gptqmodel is not installed")
def test_gptqmodel_reads_the_same(exported):
    assert by_gptqmodel(exported)["differ"] == []
    assert compress.verify(exported)["reader"].startswith("gptqmodel ")


@pytest.mark.parametrize(
    ("to", "method", "options", "says"),
    [
        ("gptq", "rtn", {"scheme": "w4a16", "group_size": 32, "grid": "asymmetric"}, "asymmetric"),
        ("gptq", "rtn", {"scheme": "w5a16", "group_size": 32}, "5 bits; allowed: 2, 3, 4, 8"),
        ("awq", "rtn", {"scheme": "w8a16", "group_size": 32}, "8 bits; allowed: 4"),
        ("awq", "rtn", {"scheme": "w4a16", "group_size": 8}, "groups of 8"),
        ("gptq", "rtn", {"scheme": "w8a8"}, "rounds its input"),
        ("gptq", "spqr", {"group_size": 16}, "--to dense"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_before_work(to, method, options, says, tmp_path):
    out = run(tmp_path, method, **options)
    with pytest.raises(InputError, match=says):
        compress.export(out, tmp_path / "there", to)
    assert not (tmp_path / "there").exists()


def test_scales_that_float16_has_not_are_refused(tmp_path):
    out = run(tmp_path, dtype=torch.float32, scheme="w4a16", group_size=32)
    with pytest.raises(InputError, match="float16"):
        compress.export(out, tmp_path / "there", "gptq")


def test_the_command_says_what_fits(tmp_path):
    out = run(tmp_path, scheme="w4a16", group_size=32, grid="asymmetric")
    listed = command("export", out, "--list")
    assert listed.code == 0
    refused = command("export", out, "--to", "gptq", "--output", tmp_path / "there")
    assert refused.code == 2
    assert "asymmetric" in last_line(refused)
