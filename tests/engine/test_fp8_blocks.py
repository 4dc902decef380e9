"""float8 with scales of blocks: the grid, the layer, and checkpoints of both layouts against transformers."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from models import GATED, build, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import compress
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.read.source import find_source
from compress.inference.check.by_transformers import load_with_transformers
from compress.inference.check.dense_twin import compare_layers
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.fused import FusedLinear, why_not_fuse
from compress.inference.layers.linear import Fp8BlockLinear, QuantLinear
from compress.jobs.verify import outputs, probe, verify
from compress.kernels.operators.fp8_blocks import quantize_token_blocks
from compress.passes.protocol.round_to_nearest import weight_error
from compress.weights.formats.codes import FineGrained, Float8Blocks
from compress.weights.grid import Grid, Quantized, fake_quantize, quantize
from compress.weights.rounding import ActivationCodes
from compress.weights.scheme import Scheme, block_scheme, check_parts

BLOCKS = Grid(bits=8, type="float", granularity="block", block=(128, 128))
TOKENS = Grid(bits=8, type="float", granularity="block", block=(1, 128))
# 384 inputs, 192 outputs of k and v, 256 of the MLP; and sizes of which 128 divides none.
EVEN = {
    "hidden_size": 384,
    "intermediate_size": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
ODD = {"hidden_size": 144, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ONE = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": {**ONE, "dynamic": False, "strategy": "block", "block_structure": [128, 128]},
    "input_activations": {**ONE, "dynamic": True, "strategy": "group", "group_size": 128},
}
TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": GROUP},
}
SCALES = {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}


# --- the grid ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_has_the_scale_of_its_largest_element(dtype, monkeypatch):
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = quantize(x, BLOCKS)
    assert (found.scale.shape, found.scale.dtype) == ((3, 2), dtype)
    for n, k in ((0, 0), (0, 1), (2, 0), (2, 1)):
        part = (slice(128 * n, 128 * (n + 1)), slice(128 * k, 128 * (k + 1)))
        one = quantize(x[part], Grid(bits=8, type="float", granularity="tensor"))
        assert torch.equal(found.scale[n, k], one.scale[0, 0])
        assert torch.equal(found.codes[part].float(), one.codes.float())
        assert torch.equal(found.dequantize()[part], one.dequantize())
    # A part of the rows at a time, whole rows of blocks.
    monkeypatch.setattr("compress.kernels.layouts.words.CHUNK", 200 * 130)
    assert torch.equal(quantize(x, BLOCKS).scale, found.scale)
    halves = [found.rows(slice(0, 256)), found.rows(slice(256, 300))]
    assert torch.equal(Quantized.stacked(halves).scale, found.scale)
    assert torch.equal(Quantized.stacked(halves).dequantize(), found.dequantize())
    # Where blocks are cut through, rows have a scale each: the same values.
    for cut in (slice(100, 290), slice(None, None, 7), slice(5, None)):
        assert torch.equal(found.rows(cut).dequantize(), found.dequantize()[cut])
    assert torch.equal(Quantized.stacked([halves[1], halves[0]]).dequantize(), found.dequantize().roll(44, 0))
    assert weight_error(x, found) == pytest.approx(float((found.dequantize().double() - x).norm() / x.double().norm()))


def test_a_wider_range_may_fit_a_block_better_and_never_worse():
    x = torch.randn(130, 300, generator=torch.Generator().manual_seed(0))
    plain, searched = ((fake_quantize(x, g) - x).square() for g in (BLOCKS, BLOCKS.with_range("mse")))
    sums = [torch.stack([e.sum() for e in error.split(128, 1)]) for error in (plain[:128], searched[:128])]
    assert (sums[1] <= sums[0]).all()
    assert searched.sum() < plain.sum()


def test_inputs_are_rounded_as_the_kernel_rounds_them():
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
        codes, scale = quantize_token_blocks(x)
        found = quantize(x, TOKENS, torch.float32)
        assert torch.equal(found.scale, scale)
        assert torch.equal(found.codes.float(), codes.float())
        assert torch.equal(ActivationCodes(TOKENS).fake_quantize(x[None]), found.dequantize(dtype)[None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "int"}, r"block \(128, 128\) of int codes; allowed: float codes"),
        ({"block": None}, "granularity 'block' with block None"),
        ({"granularity": "channel"}, "granularity 'channel' with block"),
        ({"block": (0, 128)}, "1 or more rows and columns"),
    ],
)
def test_blocks_are_of_floats(options, message):
    with pytest.raises(InputError, match=message):
        Grid(**{"bits": 8, "type": "float", "granularity": "block", "block": (128, 128), **options})


# --- the layer -----------------------------------------------------------------------------------------------------


def layer_of(rows, kind=Float8Blocks, seed=0, stored=torch.float32):
    torch.manual_seed(seed)
    linear = torch.nn.Linear(200, rows)
    weight = quantize(linear.weight.detach(), BLOCKS, stored)
    return QuantLinear.from_quantized(weight, linear.bias.detach(), block_scheme(kind))


def test_the_state_dict_is_the_checkpoints():
    for kind, name in ((Float8Blocks, "weight_scale"), (FineGrained, "weight_scale_inv")):
        layer, other = layer_of(140, kind, stored=torch.bfloat16), layer_of(140, kind, 1, torch.bfloat16)
        assert isinstance(layer, Fp8BlockLinear)
        state = layer.state_dict()
        assert {key: (value.dtype, tuple(value.shape)) for key, value in state.items()} == {
            "weight": (torch.float8_e4m3fn, (140, 200)),
            name: (torch.bfloat16, (2, 2)),
            "bias": (torch.float32, (140,)),
        }
        x = torch.randn(3, 200)
        assert not torch.equal(other(x), layer(x))
        other.load_state_dict(state)
        assert torch.equal(other(x), layer(x))
        half = layer.to(torch.float16)
        assert half(x.half()).dtype == torch.float16
        again = half.state_dict()
        assert all(torch.equal(again[key].float(), state[key].float()) for key in ("weight", name))
        assert again[name].dtype == torch.bfloat16  # as it was stored


def test_fused_layers_compute_and_store_what_the_single_ones_do():
    """Only where blocks do not reach from one layer into the next."""
    layers = [layer_of(rows, seed=rows) for rows in (256, 128, 40)]
    x = torch.randn(2, 5, 200)
    expected, states = [layer(x) for layer in layers], [layer.state_dict() for layer in layers]
    fused = FusedLinear.fuse(layers)
    for part, out, state in zip(fused, expected, states, strict=True):
        torch.testing.assert_close(part(x), out)
        found = part.state_dict()
        assert all(torch.equal(found[key].float(), value.float()) for key, value in state.items())
    other = layer_of(128, seed=7).state_dict()
    fused[1].load_state_dict({**fused[1].state_dict(), **other})
    torch.testing.assert_close(fused[1](x), layer_of(128, seed=7)(x))
    torch.testing.assert_close(fused[2](x), expected[2])
    assert why_not_fuse([layer_of(40), layer_of(128)]) == ["40 outputs; each 128 share a scale"]


def test_blocks_go_with_blocks_of_the_same_size():
    weight = quantize(torch.randn(130, 200), BLOCKS)
    tokens_alone = Scheme(terms=(Float8Blocks(grid=BLOCKS),), inputs=Grid(bits=8, type="float", granularity="token"))
    with pytest.raises(InputError, match=r"multiplied by inputs in blocks of \(1, 128\)"):
        QuantLinear.from_quantized(weight, None, tokens_alone)
    smaller = Scheme(terms=(Float8Blocks(grid=replace(BLOCKS, block=(64, 64))),), inputs=TOKENS)
    with pytest.raises(CheckpointError, match=r"layer has blocks of \(64, 64\); readable: \(128, 128\)"):
        check_parts("layer", {}, smaller, (130, 200))


# --- checkpoints ---------------------------------------------------------------------------------------------------


def write(folder, words=FP8, sizes=EVEN, dtype=torch.float32, stored=torch.float32, tensors=None):
    """A Llama whose linear layers are float8 in blocks, in the words of a `quantization_config`."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**GATED, **sizes}, initializer_range=0.1, attention_bias=sizes is ODD)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) if name.endswith(".bias") else p)
    held = dict(model.state_dict())
    for name in [name for name in held if name.endswith("_proj.weight")]:
        found = quantize(held[name].float(), BLOCKS, stored)
        held |= {name: found.codes, name.replace("weight", SCALES[words["quant_method"]]): found.scale}
    (tensors or (lambda t: None))(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    told = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps({**told, "quantization_config": words}))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_published_checkpoint_is_what_transformers_makes_of_it(dtype, tmp_path):
    """transformers multiplies float8 on a GPU only; its dense weights, and inputs that are rounded before them, are the
    same model. Sizes of which 128 divides the larger: transformers derives the block from the number of scales."""
    even = {**EVEN, "num_key_value_heads": 2}
    folder = write(tmp_path, sizes=even, dtype=dtype, stored=dtype)
    ours = compress.load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=FineGrainedFP8Config(dequantize=True))
    layers = dict(compressed_layers(ours))
    assert len(layers) == 14
    assert {layer.dtype for layer in layers.values()} == {theirs.dtype} == {dtype}
    exact = theirs(input_ids=tokens()).logits
    for name, layer in layers.items():
        assert isinstance(layer, Fp8BlockLinear)
        twin = theirs.get_submodule(name)
        assert torch.equal(layer.dequantize(), twin.weight)
        twin.register_forward_pre_hook(lambda _, x: ActivationCodes(TOKENS).fake_quantize(x[0]))
    found, expected = (model(input_ids=tokens()).logits for model in (ours, theirs))
    if dtype == torch.float32:
        assert (found - expected).abs().max() <= 0.05 * expected.std()  # of a tie that is taken the other way
        assert (expected - exact).abs().mean() > 5 * (found - expected).abs().mean()
    with compare_layers(ours) as worst, torch.no_grad():
        ours(input_ids=tokens())
    assert len(worst) == 14
    assert max(worst.values()) <= 1


def test_transformers_runs_the_layout_of_compressed_tensors_alike(tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    folder = write(tmp_path, TENSORS)
    ours = compress.load(folder)
    theirs, _ = load_with_transformers(find_source(str(folder)), torch.float32)
    expected = outputs(theirs, probe(96))
    assert (outputs(ours, probe(96)) - expected).abs().max() <= 0.05 * expected.std()
    for name, layer in compressed_layers(ours):
        assert torch.equal(layer.dequantize(), theirs.get_submodule(name).weight)


@pytest.mark.parametrize("words", [FP8, TENSORS], ids=lambda words: words["quant_method"])
def test_edge_blocks_and_stored_scales(words, tmp_path):
    """Sizes that 128 divides nowhere, biases, and scales of another dtype than the model's, kept to the last bit."""
    folder = write(tmp_path, words, ODD, torch.bfloat16)
    held = load_file(folder / "model.safetensors")
    model = compress.load(folder)
    for name, layer in compressed_layers(model):
        codes, scale = held[f"{name}.weight"].float(), held[f"{name}.{SCALES[words['quant_method']]}"]
        expected = torch.empty(codes.shape)
        for n, rows in enumerate(range(0, len(codes), 128)):
            for k, columns in enumerate(range(0, codes.shape[1], 128)):
                part = (slice(rows, rows + 128), slice(columns, columns + 128))
                expected[part] = codes[part] * scale[n, k]
        assert torch.equal(layer.values(), expected)
        assert layer.dtype == torch.bfloat16
    with compare_layers(model) as worst, torch.no_grad():
        model(input_ids=tokens())
    assert 0 < max(worst.values()) <= 1
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    again = load_file(saved / "model.safetensors")
    assert again.keys() == held.keys()
    assert all(again[name].dtype == held[name].dtype for name in held)
    assert all(torch.equal(again[name].float(), held[name].float()) for name in held)
    assert torch.equal(outputs(compress.load(saved), probe(96)), outputs(model, probe(96)))


def test_they_are_shown_and_counted(tmp_path):
    from commands import command

    told = command("inspect", write(tmp_path, sizes=ODD), "--json", "-").json()
    rows = {row["name"]: row for row in told["layers"]}
    up = rows["model.layers.0.mlp.up_proj"]
    assert up["scheme"] == "fp8 block 128x128, input dynamic g128"
    assert up["bits"] == 8 + 32 * 4 / (200 * 144)
    kernels = command("inspect", tmp_path, "--kernels")
    assert (kernels.code, "not cuda" in kernels.out.replace("\n", " ")) == (0, True)


def test_rtn_writes_blocks_that_transformers_loads(tmp_path):
    """Memory, checkpoint and transformers agree; the words are those of compressed-tensors' FP8_BLOCK."""
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    torch.manual_seed(0)
    source, out = tmp_path / "in", tmp_path / "out"
    config = transformers.LlamaConfig(**{**GATED, **EVEN}, initializer_range=0.1)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(source)
    method = compress.RTN(scheme="fp8-block")
    compress.quantize(source, method, output=out, verify=False)
    memory = compress.load(source)
    compress.quantize(memory, method)
    low = compress.load(out)
    layers = dict(compressed_layers(low))
    assert len(layers) == 14
    for name, layer in layers.items():
        assert isinstance(layer, Fp8BlockLinear)
        assert torch.equal(layer.dequantize(), memory.get_submodule(name).weight)
        dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        dense.weight.data = load_file(source / "model.safetensors")[f"{name}.weight"]
        assert torch.equal(QuantLinear.from_linear(dense, "fp8-block").dequantize(), layer.dequantize())
    expected = outputs(memory, probe(96))
    theirs, loader = load_with_transformers(find_source(str(out)), torch.float32)
    assert loader == "default"
    for other in (low, theirs):
        assert (outputs(other, probe(96)) - expected).abs().max() <= 0.05 * expected.std()
    assert (expected - outputs(compress.load(source), probe(96))).abs().max() > 1e-3 * expected.std()
    told = json.loads((out / "config.json").read_text())["quantization_config"]
    (group,) = told["config_groups"].values()
    assert (group["format"], group["weights"]) == ("float-quantized", GROUP["weights"])
    assert group["input_activations"] == GROUP["input_activations"]
    assert verify(out)["logits_max_difference"] < 1e-5


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (compress.GPTQ, {}, "gptq knows no scales that several rows share; give fp8-block to rtn"),
        (compress.RTN, {"group_size": 64}, "fp8-block has one scale per 128 x 128"),
        (compress.RTN, {"per_tensor": True}, "fp8-block has one scale per 128 x 128"),
        (compress.RTN, {"grid": "asymmetric"}, "fp8 is symmetric"),
        (compress.RTN, {"activations": "static"}, "fp8-block fits inputs to every token"),
        (compress.RTN, {"outputs": "static"}, "outputs are for w8a8 and fp8"),
        (compress.RTN, {"outliers": 0.01}, "not with w8a8 or fp8 or fp8-block"),
    ],
)
def test_what_blocks_cannot_be_is_refused(method, options, message):
    with pytest.raises(InputError, match=message):
        method(**{"scheme": "fp8-block", **options})


def test_inputs_that_blocks_do_not_divide_are_refused():
    with pytest.raises(InputError, match=r"self_attn\.q_proj has 32; give fp8, or leave those out: --"):
        compress.quantize(build("llama"), compress.RTN(scheme="fp8-block"))


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("words", "edit", "message"),
    [
        ({"weight_block_size": [64, 128]}, None, r"fp8 weights in blocks of \[64, 128\]; readable: \[128, 128\]"),
        ({"weight_block_size": None}, None, "fp8 weights in blocks of None"),
        ({"activation_scheme": "static"}, None, "activation_scheme 'static'; readable: 'dynamic'"),
        ({"scale_fmt": "ue8m0"}, None, "inputs with scales that are powers of two .*; quantize it"),
        ({"scale_fmt": "e5m2"}, None, "scale_fmt 'e5m2'; readable: 'float', 'ue8m0'"),
        ({"modules_to_convert": ["embed_tokens"]}, None, "modules_to_convert .* which is not known"),
        ({}, lambda t: t.pop(f"{Q}.weight_scale_inv"), f"{Q}.weight_scale_inv is missing"),
        ({}, lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(3, 2)}), r"has shape \(3, 2\); .* needs \(3, 3\)"),
        ({}, lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].half()}), "is float16; it must be float8_e4m3fn"),
        ({}, lambda t: t[f"{Q}.weight_scale_inv"].fill_(float("inf")), f"{Q}.weight_scale_inv holds values"),
        ({}, lambda t: t[f"{Q}.weight"].view(torch.uint8).fill_(0x7F), f"{Q}.weight holds codes that are not numbers"),
        ({}, lambda t: t.update({f"{Q}.weight_scale": torch.ones(1)}), f"{Q}.weight_scale is no part of a layer"),
    ],
)
def test_what_cannot_be_read_is_named(words, edit, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        compress.load(write(tmp_path, {**FP8, **words}, tensors=edit))


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("weights", {"block_structure": [64, 64]}, r"weights .* block of \[128, 128\]"),
        ("input_activations", {"group_size": 64}, "input .* dynamic in groups of 128"),
        ("input_activations", {"dynamic": False}, "input .* dynamic in groups of 128"),
        ("input_activations", {"strategy": "token"}, "input .* dynamic in groups of 128"),
        ("output_activations", {**ONE, "strategy": "tensor"}, "quantizes its output beside weights in blocks"),
    ],
)
def test_other_blocks_of_compressed_tensors_are_named(key, entry, message, tmp_path):
    group = {**GROUP, key: {**GROUP.get(key, {}), **entry}}
    with pytest.raises(CheckpointError, match=message):
        compress.load(write(tmp_path, {**TENSORS, "config_groups": {"group_0": group}}))


def test_dense_weights_would_not_show_rounded_inputs(tmp_path):
    with pytest.raises(InputError, match="quantizes the input of model"):
        compress.load(write(tmp_path), dequantize=True)
