"""Checkpoints of ModelOpt, made by renaming our own, and by our export."""

import json

import pytest
import torch
from combinations import every
from commands import make_llama, refusal_of_export, save
from modelopt_reader import read
from models import tokens
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import CheckpointError
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
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
        ({"quant_algo": "W4A8_AWQ"}, "modelopt W4A8_AWQ in groups of 16; readable: NVFP4, W4A16_NVFP4, FP8"),
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


FP8 = {"per_tensor": True, "activations": "static"}
EXPORTED = {
    "NVFP4": [compress.RTN(scheme="nvfp4")],
    "W4A16_NVFP4": [compress.RTN(scheme="nvfp4a16")],
    "FP8": [compress.RTN(scheme="fp8", **FP8), compress.KVCache(type="fp8", granularity="tensor")],
    "FP8_PER_CHANNEL_PER_TOKEN": [compress.RTN(scheme="fp8")],
    "MXFP8": [compress.RTN(scheme="mxfp8")],
    "MIXED_PRECISION": [
        compress.only(compress.RTN(scheme="nvfp4"), "*.mlp.*"),
        compress.but(compress.RTN(scheme="fp8", **FP8), "*.mlp.*", "*.o_proj"),
    ],
}


@pytest.mark.parametrize("algorithm", EXPORTED)
def test_an_export_is_read_back_by_a_reader_of_its_layout(algorithm, tmp_path):
    model = save(make_llama(num_hidden_layers=1).to(torch.bfloat16), tmp_path / "model")
    out, there = tmp_path / "out", tmp_path / "there"
    compress.quantize(model, EXPORTED[algorithm], calibration=tokens(), output=out, verify=False)
    compress.export(out, there, "modelopt")
    layers, caches = read(there)
    ours = stored_in(find_source(str(out))).layers
    assert layers.keys() == ours.keys()
    for name, layer in layers.items():
        first, second = (weight_of(find_source(str(p)), name, torch.float32).dequantize().float() for p in (out, there))
        assert torch.equal(layer.weight, second), name
        torch.testing.assert_close(layer.weight, first, rtol=2**-8, atol=0)  # a product of 16 bits in ours
        assert algorithm in (layer.algorithm, "MIXED_PRECISION")
    told = json.loads((there / "config.json").read_text())["quantization_config"]
    assert (told["quant_algo"], "kv_cache_scheme" in told) == (algorithm, bool(caches))
    assert told["ignore"] == [n for n in ("model.layers.0.self_attn.o_proj", "lm_head") if n not in layers]
    fused = [layers[f"model.layers.0.self_attn.{n}_proj"].input_scale for n in "qkv"]
    assert len(set(fused)) == 1
    assert len(caches) == (2 if algorithm == "FP8" else 0)
    with torch.no_grad():
        said = [compress.load(folder, torch.float32)(tokens()[:1] % 96).logits for folder in (out, there)]
    torch.testing.assert_close(said[1], said[0], rtol=0, atol=0.02 * float(said[0].abs().max()))
    assert compress.verify(str(there))["layers"] == len(layers)


@every(
    ("passes", "says"),
    [
        (compress.RTN(scheme="w4a16"), "is stored as w4a16 g32 symmetric; modelopt has nvfp4, nvfp4a16, mxfp8, fp8"),
        (compress.RTN(scheme="fp8", per_tensor=True), "and fp8 with per_tensor and activations=static"),
        (compress.but(compress.RTN(scheme="fp8"), "*.k_proj"), "q_proj, k_proj and v_proj, which differ; give all"),
        ([compress.RTN(scheme="fp8"), compress.KVCache(type="int8")], "modelopt has fp8 per tensor: --kv-cache fp8"),
    ],
)
def test_what_modelopt_has_no_word_for_is_one_line(passes, says, llama, tmp_path_factory):
    assert says in refusal_of_export(llama, passes, "modelopt", tmp_path_factory.mktemp("refused"))
