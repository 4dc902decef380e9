"""Checkpoints that compressed-tensors itself writes, as llm-compressor does, against its own decompressor."""

import math

import pytest
import torch
from commands import make_llama, save
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import CheckpointError
from compress.inference.layers.compressed_layers import compressed_layers

pytest.importorskip("compressed_tensors", reason="needs the hf extra")

# Presets, and what their layers are here. Those without a form of their own here are shown as others.
PRESETS = {
    "W4A16_ASYM": "w4a16 g128 asymmetric",
    "W4A8": "w4a8 g128 symmetric, input dynamic symmetric",
    "W3A8": "w3a8 g128 symmetric, input dynamic symmetric",
    "W4AFP8": "w4afp8 g128 symmetric, input dynamic",
    "FP8_BLOCK": "fp8 block 128x128, input dynamic g128",
    "NVFP4": "nvfp4, input 4-bit dynamic g16",
    "MXFP4": "mxfp4, input 4-bit dynamic g32",
    "MXFP4XFP8": "mxfp4, input dynamic g128",
    "MXFP6A8": "mxfp6, input dynamic g32",
    "MXFP8": "mxfp8, input dynamic g32",
}


def ranges(weight, args):
    """(Least, largest) weight of every channel, group or block."""
    if args.block_structure:
        rows, columns = args.block_structure
        N, K = (math.ceil(size / block) for size, block in zip(weight.shape, args.block_structure, strict=True))
        whole = torch.zeros(N * rows, K * columns)
        whole[: len(weight), : weight.shape[1]] = weight
        weight = whole.view(N, rows, K, columns).permute(0, 2, 1, 3).flatten(2)
    elif args.group_size:
        weight = weight.view(len(weight), -1, args.group_size)
    else:
        weight = weight[:, None]
    return weight.amin(-1), weight.amax(-1)


def written(folder, scheme):
    """A checkpoint of a random Llama by compressed-tensors, and its model, decompressed again."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = make_llama(num_hidden_layers=1, hidden_size=128, intermediate_size=256).to(torch.bfloat16)
    save(model, folder)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        shared = None
        if hasattr(module, "weight_global_scale"):
            shared = generate_gparam(module.weight.amin().reshape(1), module.weight.amax().reshape(1))
            module.weight_global_scale.data = shared
            module.input_global_scale.data.fill_(400.0)
        found = ranges(module.weight.data, scheme.weights)
        scale, zero = calculate_qparams(*found, scheme.weights, global_scale=shared)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    save_file({name: part.contiguous() for name, part in model.state_dict().items()}, folder / "model.safetensors")
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return model


def preset(name, **weights):
    from compressed_tensors.quantization import is_preset_scheme, preset_name_to_scheme

    if not is_preset_scheme(name):
        pytest.skip(f"this compressed-tensors has no preset {name}; 0.20 has")
    scheme = preset_name_to_scheme(name, ["Linear"])
    for key, value in weights.items():
        setattr(scheme.weights, key, value)
    return scheme


def assert_read(folder, theirs, said):
    ours = compress.load(folder)
    assert {str(layer.scheme) for _, layer in compressed_layers(ours)} == {said}
    layers = [name for name, module in theirs.named_modules() if hasattr(module, "quantization_scheme")]
    assert len(layers) == 7
    for name in layers:
        assert torch.equal(ours.get_submodule(name).weight, theirs.get_submodule(name).weight), name
    # Inputs are rounded alike. Theirs are bfloat16 weights; ours are not rounded to it in float32.
    wide, theirs = compress.load(folder, torch.float32), theirs.float()
    for name in layers:
        layer, other = wide.get_submodule(name), theirs.get_submodule(name)
        x = torch.randn(8, layer.in_features, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            found, expected = layer(x), by_token(x, other) if per_token(other) else other(x)
        assert (found - expected).norm() < 0.01 * expected.norm(), name


def per_token(layer):
    inputs = layer.quantization_scheme.input_activations
    return inputs is not None and inputs.strategy == "token"


def by_token(x, layer):
    """The product with inputs rounded over the whole range of a token, whose largest number has the largest code;
    compressed-tensors divides by half a step more, when it simulates integers."""
    inputs = layer.quantization_scheme.input_activations
    largest = 448 if inputs.type == "float" else 2 ** (inputs.num_bits - 1) - 1
    step = x.abs().amax(-1, keepdim=True) / largest
    codes = (x / step).to(torch.float8_e4m3fn).float() if inputs.type == "float" else (x / step).round()
    return codes * step @ layer.weight.t()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PRESETS)
def test_what_compressed_tensors_writes_has_the_values_that_it_decompresses(name, tmp_path):
    folder = tmp_path / "model"
    assert_read(folder, written(folder, preset(name)), PRESETS[name])


@pytest.mark.filterwarnings("ignore")
def test_inputs_of_4_bits_are_read_beside_weights_in_bytes(tmp_path):
    theirs = written(tmp_path / "model", preset("W4A4"))
    name, ours = "model.layers.0.mlp.up_proj", compress.load(tmp_path / "model")
    assert str(ours.get_submodule(name).scheme) == "w4a4 g128 symmetric, input 4-bit dynamic symmetric"
    assert torch.equal(ours.get_submodule(name).weight, theirs.get_submodule(name).weight)


@pytest.mark.filterwarnings("ignore")
def test_zero_points_in_bytes_are_read(tmp_path):
    theirs = written(tmp_path / "model", preset("W4A8", symmetric=False))
    assert_read(tmp_path / "model", theirs, "w4a8 g128 asymmetric, input dynamic symmetric")


@pytest.mark.filterwarnings("ignore")
def test_codes_of_more_bits_than_they_say_are_named(tmp_path):
    written(tmp_path / "model", preset("W4A8"))
    held = load_file(tmp_path / "model" / "model.safetensors")
    held["model.layers.0.mlp.down_proj.weight"][3, 4] = 8
    save_file(held, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj.weight holds codes of more than 4 bits"):
        compress.load(tmp_path / "model")


@pytest.mark.filterwarnings("ignore")
def test_a_run_begins_with_the_values_that_compressed_tensors_decompresses(tmp_path):
    theirs = written(tmp_path / "model", preset("W4A4"))
    done = compress.quantize(tmp_path / "model", compress.RTN(scheme="w8a16", group_size=32), output=tmp_path / "out")
    assert any("was rounded before (7 layers w4a4 g128" in note for note in done.record.notes)
    again = compress.load(tmp_path / "out", dequantize=True)
    for name, module in theirs.named_modules():
        if hasattr(module, "quantization_scheme"):
            torch.testing.assert_close(
                again.get_submodule(name).weight, module.weight, rtol=0.01, atol=float(module.weight.abs().max()) / 250
            )
