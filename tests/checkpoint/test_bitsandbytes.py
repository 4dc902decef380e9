"""Exports as bitsandbytes' NF4, against a transcription of its formula, and against itself where it is installed."""

import json

import pytest
import torch
from commands import make_llama, refusal_of_export, save
from models import tokens
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import CheckpointError
from compress.checkpoint.export.read_back import read_by_us

LEVELS = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def exported(request, tmp_path_factory):
    """(Our checkpoint, the same in the layout of bitsandbytes)."""
    folder = tmp_path_factory.mktemp("bitsandbytes")
    model = make_llama(num_hidden_layers=1, hidden_size=128, intermediate_size=192).to(request.param)
    asked = compress.GPTQ(scheme="nf4a16", refit=0, sweeps=0)
    compress.quantize(save(model, folder / "model"), asked, calibration=tokens(), output=folder / "out", verify=False)
    compress.export(folder / "out", folder / "there", "bitsandbytes")
    return folder / "out", folder / "there"


@pytest.mark.first
def test_the_formula_of_bitsandbytes_finds_what_was_decided(exported):
    out, there = exported
    held, decided = load_file(there / "model.safetensors"), compress.load(out, dequantize=True)
    layers = [name.removesuffix(".absmax") for name in held if name.endswith(".absmax")]
    assert len(layers) == 7
    for name in layers:
        state = json.loads(bytes(held[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
        weight = decided.get_parameter(name)
        assert state == {
            "quant_type": "nf4",
            "blocksize": 64,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "shape": list(weight.shape),
        }
        assert held[name].shape == (weight.numel() // 2, 1)
        codes = torch.stack([held[name].int() >> 4, held[name].int() & 15], -1).view(-1, 64)
        values = torch.tensor(LEVELS)[codes] * held[f"{name}.absmax"][:, None]
        assert torch.equal(values.view(weight.shape).to(weight.dtype), weight)
    config = json.loads((there / "config.json").read_text())["quantization_config"]
    assert config["llm_int8_skip_modules"] == ["lm_head"]
    assert (config["quant_method"], config["bnb_4bit_quant_type"]) == ("bitsandbytes", "nf4")


def test_our_reader_runs_on_the_same_codes(exported):
    _, there = exported
    first, second = (compress.load(folder, dequantize=True).state_dict() for folder in exported)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    reader = json.loads((there / "compress.json").read_text())["verification"]["reader"]
    assert "bitsandbytes" in reader
    verified = compress.verify(str(there))
    assert verified["layers"] == 7


def test_transformers_loads_them(exported):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    pytest.importorskip("accelerate", reason="transformers loads bitsandbytes' layers with accelerate")
    from transformers import AutoModelForCausalLM

    out, there = exported
    ids = tokens()[:2]
    theirs, ours = AutoModelForCausalLM.from_pretrained(there), compress.load(out, dequantize=True)
    with torch.no_grad():
        found, expected = (model(ids).logits.float() for model in (theirs, ours))
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_a_changed_scale_is_named(exported, copy_of):
    _, there = exported
    folder = copy_of(there)
    values = json.loads((folder / "compress.json").read_text())["values"]
    held = load_file(folder / "model.safetensors")
    held["model.layers.0.mlp.up_proj.weight.absmax"][7] += 0.5
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj of .* does not hold the values that were exported"):
        read_by_us(folder, {"values": values})


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        ({"scheme": "w4a16", "group_size": 32}, "is stored as w4a16 g32 symmetric; quantize with --scheme nf4a16"),
        ({"scheme": "mxfp4a16"}, "is stored as mxfp4a16; quantize with --scheme nf4a16"),
    ],
)
def test_other_codes_are_refused_in_a_line(scheme, says, llama, tmp_path):
    assert says in refusal_of_export(llama, compress.RTN(**scheme), "bitsandbytes", tmp_path)
