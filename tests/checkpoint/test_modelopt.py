"""Checkpoints of ModelOpt, made by renaming our own."""

import json

import pytest
import torch
from commands import make_llama, save
from models import tokens
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import CheckpointError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import find_source

NAMES = {"weight_packed": "weight", "weight_scale": "weight_scale"}
INVERTED = {"weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}


@pytest.fixture(scope="module", params=["nvfp4", "nvfp4a16"])
def published(request, tmp_path_factory):
    """(Our checkpoint, the same in ModelOpt's names)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save(make_llama(num_hidden_layers=1).to(torch.bfloat16), folder / "model")
    ours, theirs = folder / "ours", folder / "theirs"
    compress.quantize(model, compress.RTN(scheme=request.param), calibration=tokens(), output=ours, verify=False)
    theirs.mkdir()
    found = {}
    for name, tensor in load_file(ours / "model.safetensors").items():
        layer, _, part = name.rpartition(".")
        if part in INVERTED:
            found[f"{layer}.{INVERTED[part]}"] = (1 / tensor).reshape(())
        else:
            found[f"{layer}.{NAMES.get(part, part)}"] = tensor
    save_file(found, theirs / "model.safetensors", {"format": "pt"})
    config = json.loads((ours / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    (theirs / "config.json").write_text(json.dumps(config))
    return ours, theirs


def test_a_checkpoint_of_modelopt_is_ours_in_other_names(published):
    schemes = [[str(layer.scheme) for layer in stored_in(find_source(str(p))).layers.values()] for p in published]
    assert schemes[0] == schemes[1]
    first, second = (compress.load(folder) for folder in published)
    ids = tokens()[:1] % first.config.vocab_size
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)
    stored, saved = load_file(published[1] / "model.safetensors"), second.state_dict()
    assert all(torch.equal(saved[name].reshape(held.shape).float(), held.float()) for name, held in stored.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "modelopt W4A8_AWQ in groups of 16; readable: NVFP4, FP8, MIXED_PRECISION"),
        ({"group_size": 32}, "modelopt NVFP4 in groups of 32; readable"),
        ({"kv_cache_quant_algo": "NVFP4"}, r"rounds its key-value cache \(NVFP4\); readable: FP8"),
        ({"kv_cache_quant_algo": "FP8"}, "has a key-value cache of fixed scales and holds none of them"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(change, says, published, tmp_path):
    _, theirs = published
    config = json.loads((theirs / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(theirs / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        compress.load(tmp_path)
