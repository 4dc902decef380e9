"""`compress.load` and transformers' `from_pretrained`: a compressed checkpoint that runs as it is stored."""

import json

import pytest
import torch
from combinations import each
from commands import Largest
from mixtures import made
from models import GATED, SIZES, build, strong, tokens
from places import FIXTURES
from safetensors.torch import load_file, save_file
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    WavLMForSequenceClassification,
)
from transformers.quantizers.base import HfQuantizer

import compress
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.read.source import find_source
from compress.inference.check.by_transformers import load_with_transformers
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.fused import FusedLinear
from compress.inference.layers.linear import PackedLinear, QuantLinear
from compress.inference.load.quantizer import transformers_alone
from compress.jobs.verify import outputs, probe
from compress.kernels import reference
from compress.kernels.cpu import build as cpu
from compress.model.split_experts import joins_experts, loading_steps
from compress.recipes.studies.models.small import small
from compress.weights.compressed_tensors import scheme_for

LLMCOMPRESSOR = FIXTURES / "llmcompressor"
OUTPUT = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "tensor"}
WRITTEN = [
    {"scheme": "w4a16", "group_size": 16},
    {"scheme": "w4a16", "group_size": 32, "grid": "asymmetric"},
    {"scheme": "w2a16", "group_size": -1},
    {"scheme": "w3a16", "group_size": 32, "grid": "asymmetric"},
    {"scheme": "w5a16", "group_size": 32},
    {"scheme": "w6a16", "group_size": -1, "grid": "asymmetric"},
    {"scheme": "w7a16", "group_size": 16, "grid": "narrow"},
    {"scheme": "w8a16", "group_size": 32},
    {"scheme": "w8a16", "group_size": -1, "grid": "symmetric"},
]


def write(tmp_path, kind="llama", dtype=torch.float32, **options):
    model = build(kind, dtype)
    compress.quantize(model, compress.RTN(**{"group_size": 16, **options}), output=tmp_path / "out", verify=False)
    return tmp_path / "out"


def stored_tensors(folder):
    """Every tensor of a checkpoint, by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def held_to_tolerance(model):
    """Hooks that hold every product of a model to the exact one of its dequantized weights; returns the list they
    write their largest error over tolerance into."""
    worst = []

    def hook(layer, inputs, out):
        x, weight = inputs[0].double().flatten(0, -2), layer.dequantize().double()
        truth = x @ weight.t() + (0 if layer.bias is None else layer.bias.double())
        allowed = reference.tolerance(x, weight, truth, out.dtype)
        allowed += torch.finfo(layer.dtype).eps * (x.abs() @ weight.abs().t())
        worst.append(((out.double().flatten(0, -2) - truth).abs() / allowed).max().item())

    for _, layer in compressed_layers(model):
        layer.register_forward_hook(hook)
    return worst


@pytest.mark.parametrize(
    ("options", "dtype"), each(WRITTEN, [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]), ids=str
)
def test_what_we_write_runs_as_its_codes_say(options, dtype, tmp_path):
    out = write(tmp_path, dtype=dtype, **options)
    model, dense = compress.load(out), compress.load(out, dequantize=True)
    layers = dict(compressed_layers(model))
    assert set(layers) == {n for n, m in dense.named_modules() if isinstance(m, torch.nn.Linear)} - {"lm_head"}
    for name, layer in layers.items():
        assert torch.equal(layer.dequantize(), dense.get_submodule(name).weight)
    worst = held_to_tolerance(model)
    found, expected = outputs(model, probe(96)), outputs(dense, probe(96))
    assert len(worst) == len(layers)
    assert max(worst) <= 1
    # 14 layers, each off by at most a few units in the last place.
    assert (found - expected).abs().max() <= 100 * torch.finfo(dtype).eps * expected.abs().max()


def test_a_16_bit_checkpoint_stands_for_the_same_weights_in_float32_on_codes_and_dense(tmp_path):
    """A method for each layer: neither way rounds a value, or a sum, to the stored dtype first."""
    methods = {
        "q_proj": compress.RTN(group_size=16, grid="asymmetric"),
        "k_proj": compress.SpQR(group_size=16),
        "v_proj": compress.RTN(group_size=16, outliers=0.03),
        "o_proj": compress.LowRank(rank=4),
        "gate_proj": compress.LQS(rank=2, group_size=16),
        "up_proj": compress.Ternary(),
        "down_proj": compress.RTN(scheme="w8a16", group_size=-1),
    }
    passes = [compress.only(one, f"*.{name}") for name, one in methods.items()]
    compress.quantize(
        strong("llama", torch.bfloat16), passes, calibration=tokens(), output=tmp_path / "out", verify=False
    )
    model, dense, narrow = (
        compress.load(tmp_path / "out", dtype, dequantize=how)
        for dtype, how in ((torch.float32, False), (torch.float32, True), (None, True))
    )
    for name, layer in compressed_layers(model):
        weight = dense.get_submodule(name).weight
        assert torch.equal(layer.dequantize(), weight), name
        exact = name.endswith("up_proj")  # of three levels each is a number of 16 bits
        assert torch.equal(narrow.get_submodule(name).weight.float(), weight) == exact, name
    found, expected = outputs(model, probe(96)), outputs(dense, probe(96))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.std().item())


@torch.no_grad()
def test_ranges_and_entries_of_a_float32_checkpoint_are_not_rounded_to_the_dtype_of_the_model(tmp_path):
    """In bfloat16 SpQR's layers are no further from the float32 weights than dense ones, for few tokens and many."""
    method = compress.SpQR(group_size=16, outliers=0.03, sweeps=0, search=False)
    compress.quantize(strong(), method, calibration=tokens(), output=tmp_path / "out", verify=False)
    exact, dense = (
        compress.load(tmp_path / "out", dtype, dequantize=True) for dtype in (torch.float32, torch.bfloat16)
    )
    model = compress.load(tmp_path / "out", torch.bfloat16)
    off = {True: 0.0, False: 0.0}
    for name, layer in compressed_layers(model):
        twin, weight = dense.get_submodule(name), exact.get_submodule(name).weight.double()
        assert torch.equal(layer.dequantize(), twin.weight), name
        for M in (2, 40):
            x = torch.randn(M, layer.in_features, generator=torch.Generator().manual_seed(M)).bfloat16()
            for codes, out in ((True, layer(x)), (False, twin(x))):
                off[codes] += (out - x.double() @ weight.t()).square().mean().item()
    assert 0 < off[True] <= 1.1 * off[False]
    state, stored = model.state_dict(), stored_tensors(tmp_path / "out")
    ranges, values = ([key for key in stored if key.endswith(part)] for part in ("ranges", "term1_value"))
    assert len(ranges) == len(list(compressed_layers(model)))
    assert values  # a layer that keeps no weight exact has none
    assert all(torch.equal(state[key], stored[key]) for key in (*ranges, *values))


def test_scales_beside_int8_inputs_are_those_that_are_stored(tmp_path):
    out = write(tmp_path, scheme="w8a8", group_size=-1)
    state, stored = compress.load(out, torch.bfloat16).state_dict(), stored_tensors(out)
    scales = [key for key in stored if key.endswith("weight_scale")]
    assert scales
    assert all(torch.equal(state[key], stored[key]) for key in scales)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma2", "opt", "bert", "t5", "mistral"])
def test_every_family_runs(kind, tmp_path):
    out = write(tmp_path, kind)
    expected = outputs(compress.load(out, dequantize=True), probe(96))
    states = []
    for fuse in (False, True):
        notes = []
        model = compress.load(out, fuse=fuse, notes=notes)
        assert notes == []
        assert any(isinstance(m, FusedLinear) for m in model.modules()) == fuse
        torch.testing.assert_close(outputs(model, probe(96)), expected, rtol=1e-4, atol=1e-5)
        states.append(model.state_dict())
    before, after = states
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_block_that_is_used_several_times_is_fused(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = AlbertModel(AlbertConfig(vocab_size=96, embedding_size=16, num_hidden_layers=2, **sizes)).eval()
    compress.quantize(model, compress.RTN(group_size=16), output=tmp_path / "out", verify=False)
    fused = compress.load(tmp_path / "out", fuse=True)
    assert sum(isinstance(m, FusedLinear) for m in fused.modules()) == 3
    expected = outputs(compress.load(tmp_path / "out"), probe(96))
    torch.testing.assert_close(outputs(fused, probe(96)), expected, rtol=1e-4, atol=1e-5)


# --- checkpoints of llm-compressor ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(p.name for p in LLMCOMPRESSOR.iterdir() if p.is_dir()))
@pytest.mark.parametrize("fuse", [False, True])
def test_checkpoints_of_llm_compressor(name, fuse):
    """fixtures/make_llmcompressor.py wrote them, and what transformers computes from them."""
    expected = load_file(LLMCOMPRESSOR / name / "expected.safetensors")
    model = compress.load(LLMCOMPRESSOR / name, torch.float32, fuse=fuse)
    found = outputs(model, expected["input_ids"])
    if name == "w4a16_asym":
        # transformers rounds dequantized weights to bfloat16 there, which is our dequantized model in that dtype.
        dense = compress.load(LLMCOMPRESSOR / name, dequantize=True).float()
        torch.testing.assert_close(outputs(dense, expected["input_ids"]), expected["logits_float32"])
        half = compress.load(LLMCOMPRESSOR / name, fuse=fuse)
        worst = held_to_tolerance(half)
        outputs(half, expected["input_ids"])
        assert max(worst) <= 1
    else:
        torch.testing.assert_close(found, expected["logits_float32"], rtol=1e-5, atol=1e-5)
    state, stored = model.state_dict(), load_file(LLMCOMPRESSOR / name / "model.safetensors")
    assert set(state) == set(stored)
    for key, value in stored.items():
        assert torch.equal(state[key].to(value.dtype), value), key


@pytest.mark.parametrize("name", ["w8a8_dynamic", "w8a8_static", "w8a8_static_asym", "fp8_dynamic", "fp8_static"])
def test_rounded_inputs_are_no_less_exact_than_emulated_ones(name):
    """In bfloat16 transformers rounds x / scale to 8 significant bits before it rounds it to a code; we do not."""
    expected = load_file(LLMCOMPRESSOR / name / "expected.safetensors")
    truth = expected["logits_float32"]
    found = outputs(compress.load(LLMCOMPRESSOR / name), expected["input_ids"]).float()
    assert (found - truth).square().mean() <= 1.1 * (expected["logits"].float() - truth).square().mean()


def test_dense_weights_cannot_stand_for_int8_inputs():
    with pytest.raises(InputError, match=r"quantizes the input of model\.layers\.0.*without dequantize"):
        compress.load(LLMCOMPRESSOR / "w8a8_dynamic", dequantize=True)
    found = compress.evaluate(LLMCOMPRESSOR / "w8a8_dynamic", text=torch.randint(24, (2, 16)))
    assert found.perplexity > 1


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    ("name", "kind", "zero"),
    [
        ("w8a8_dynamic", "int", None),
        ("w8a8_static", "int", -9),
        ("w8a8_static_asym", "int", 12),
        ("fp8_static", "float", 0),
    ],
)
def test_checkpoints_with_rounded_outputs(name, kind, zero, fuse, changed):
    """As llm-compressor describes them. A symmetric one may hold a zero point, as its loader makes one."""
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    entry = {**OUTPUT, "type": kind, "symmetric": kind == "float" or zero is None}

    def tensors(held):
        for i, key in enumerate([key for key in held if key.endswith("_proj.weight")]):
            held[key.replace("weight", "output_scale")] = torch.tensor([0.02 + 0.001 * i], dtype=torch.bfloat16)
            if kind == "int" and zero is not None:
                held[key.replace("weight", "output_zero_point")] = torch.tensor([zero], dtype=torch.int8)

    config = setting("quantization_config", "config_groups", "group_0", "output_activations", entry)
    path = changed(name, tensors, config, reads=True)
    ids = load_file(LLMCOMPRESSOR / name / "expected.safetensors")["input_ids"]
    model, plain = compress.load(path, torch.float32, fuse=fuse), compress.load(LLMCOMPRESSOR / name, torch.float32)
    expected = outputs(load_with_transformers(find_source(str(path)), torch.float32)[0], ids)
    found = outputs(model, ids)
    assert (found - expected).abs().max() <= 0.05 * expected.std()
    assert (outputs(plain, ids) - expected).abs().max() > 0.05 * expected.std()
    assert any(isinstance(m, FusedLinear) for m in model.modules()) == fuse
    state, stored = model.state_dict(), load_file(path / "model.safetensors")
    assert set(state) == set(stored)
    assert all(torch.equal(state[key].to(value.dtype), value) for key, value in stored.items())
    with pytest.raises(InputError, match=r"quantizes the input and output of model\.layers\.0"):
        compress.load(path, dequantize=True)


# --- through transformers ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registered")
def test_models_without_the_checkpoints_head_and_with_another_one(tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    out = write(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(out)
    base = AutoModel.from_pretrained(out)
    assert len(list(compressed_layers(base))) == len(list(compressed_layers(whole)))
    assert torch.equal(outputs(base, probe(96)), whole.model(input_ids=probe(96))[0])
    base.save_pretrained(tmp_path / "base")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=2)
    assert torch.equal(again.model(input_ids=probe(96))[0], outputs(base, probe(96)))


def test_layers_that_transformers_stores_under_other_names(tmp_path):
    """Llava's text model is `model.language_model` in memory and `language_model.model` in most files."""
    vision = CLIPVisionConfig(
        **{**SIZES, "intermediate_size": 64, "image_size": 16, "patch_size": 8, "projection_dim": 32}
    )
    config = LlavaConfig(text_config=LlamaConfig(**GATED), vision_config=vision, image_token_index=95)
    model = LlavaForConditionalGeneration(config).eval()
    compress.quantize(model, compress.RTN(group_size=16), output=tmp_path / "out", verify=False)
    tensors = stored_tensors(tmp_path / "out")
    old = (("model.language_model.", "language_model.model."), ("model.vision_tower.", "vision_tower."))
    old += (("model.multi_modal", "multi_modal"), ("lm_head.", "language_model.lm_head."))
    renamed = {next(a + n.removeprefix(b) for b, a in old if n.startswith(b)): t for n, t in tensors.items()}
    (tmp_path / "old").mkdir()
    save_file(renamed, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    (tmp_path / "old" / "config.json").write_bytes((tmp_path / "out" / "config.json").read_bytes())
    found, expected = compress.load(tmp_path / "old"), compress.load(tmp_path / "out")
    assert len(list(compressed_layers(found))) == len(list(compressed_layers(expected))) > 0
    ids = torch.arange(32).view(2, 16)
    assert torch.equal(outputs(found, ids), outputs(expected, ids))


@pytest.mark.parametrize("hands_model_over", [False, True])
def test_both_forms_of_the_hook_for_steps_of_loading_are_answered(hands_model_over, tmp_path, monkeypatch):
    """transformers 5.21 began to give the model to the hook, too."""
    made("qwen3-moe").save_pretrained(tmp_path / "in")
    options = compress.RTN(scheme="w4a16", group_size=-1)
    compress.quantize(tmp_path / "in", options, output=tmp_path / "out", verify=False)
    model = compress.load(tmp_path / "out")
    hook, given = "update_weight_conversions", [model] if hands_model_over else []
    theirs = (lambda self, steps, model: [*steps, "last"]) if given else (lambda self, steps: [*steps, "last"])
    monkeypatch.setattr(HfQuantizer, hook, theirs)
    steps = [*loading_steps(model), "of another kind"]
    assert any(map(joins_experts, steps))
    kept = getattr(model.hf_quantizer, hook)(steps, *given)
    assert kept == [*(step for step in steps if not joins_experts(step)), "last"]


def test_transformers_stays_as_it_is_until_it_is_asked_for(tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    out = write(tmp_path)
    compress.load(out)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert not any(isinstance(m, QuantLinear) for m in theirs.modules())


@pytest.mark.usefixtures("registered")
def test_from_pretrained_runs_compressed(tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    from transformers import CompressedTensorsConfig

    out = write(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert any(isinstance(m, PackedLinear) for m in model.modules())
    assert model.hf_quantizer.is_compileable
    torch.testing.assert_close(outputs(model, probe(96)), outputs(compress.load(out), probe(96)))
    with pytest.warns(UserWarning, match="quantization_config"):
        dense = AutoModelForCausalLM.from_pretrained(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert not any(isinstance(m, QuantLinear) for m in dense.modules())
    with transformers_alone():
        theirs = AutoModelForCausalLM.from_pretrained(out)
    assert not any(isinstance(m, QuantLinear) for m in theirs.modules())
    assert any(isinstance(m, PackedLinear) for m in AutoModelForCausalLM.from_pretrained(out).modules())


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", ["w4a16_asym", "fp8_static"])
def test_saving_a_loaded_model_writes_the_same_checkpoint(name, fuse, tmp_path):
    source = LLMCOMPRESSOR / name
    model = compress.load(source, fuse=fuse)
    model.save_pretrained(tmp_path / "again")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert set(before) == set(after)
    assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    config = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert config == json.loads((source / "config.json").read_text())["quantization_config"]
    again = compress.load(tmp_path / "again", fuse=fuse)
    assert torch.equal(outputs(again, probe(24)), outputs(model, probe(24)))


def test_a_fused_model_with_fixed_inputs_is_saved_in_any_dtype(tmp_path):
    """Fused layers have one scale of the input between them."""
    static = compress.RTN(scheme="w8a8", activations="static", activation_grid="asymmetric")
    compress.quantize(build("qwen2"), static, calibration=tokens(), output=tmp_path / "out", verify=False)
    model = compress.load(tmp_path / "out", fuse=True)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(outputs(compress.load(tmp_path / "again"), probe(96)), outputs(model, probe(96)))


@pytest.mark.parametrize("options", [{"scheme": "w4a16"}, {"scheme": "w8a16"}], ids=str)
def test_a_model_that_runs_on_codes_is_not_compressed_again(options, tmp_path):
    """What it holds are no weights: a checkpoint of it would lack them."""
    compress.quantize(build("llama"), compress.Embeddings(**options), output=tmp_path / "out", verify=False)
    model = compress.load(tmp_path / "out")
    with pytest.raises(InputError, match=r"embed_tokens computes on codes already; give the original model"):
        compress.quantize(model, compress.RTN(group_size=16), output=tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("fuse", [False, True])
def test_generates_with_and_without_a_static_cache(fuse, tmp_path):
    out = write(tmp_path)
    model, dense = compress.load(out, fuse=fuse), compress.load(out, dequantize=True)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = dense.generate(tokens(2, 5), **options)
    assert torch.equal(model.generate(tokens(2, 5), **options), expected)
    assert torch.equal(model.generate(tokens(2, 5), **options, cache_implementation="static"), expected)


@pytest.mark.first
@pytest.mark.parametrize(("name", "fuse"), [("w4a16_asym", True), ("w8a8_static_asym", False), ("fp8_static", True)])
def test_a_model_compiles_into_one_graph(name, fuse):
    model = compress.load(LLMCOMPRESSOR / name, fuse=fuse)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = tokens(2, 7) % 24
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_loaded_model_becomes_dense_in_place_and_counts_its_weights(tmp_path):
    """As `load(dequantize=True)` makes it: the same weights, tied alike, training alike, saved without a scheme."""
    heads = compress.KVCache(granularity="head")
    rtn, wide = compress.RTN(group_size=16), compress.Embeddings(scheme="w4a16", group_size=16)
    cases = [
        ("llama", [rtn], {}),
        ("qwen2", [rtn], {"fuse": True}),
        ("gemma", [wide, rtn], {}),
        ("t5", [wide, rtn], {}),
    ]
    cases += [
        ("qwen3", [compress.RTN(scheme="w8a16", group_size=-1), heads], {"int8_activations": True}),
        ("opt", [wide], {}),
    ]
    for i, (kind, passes, options) in enumerate(cases):
        out = tmp_path / str(i)
        calibration = tokens() if heads in passes else None
        compress.quantize(build(kind), passes, calibration=calibration, output=out, verify=False)
        model, dense = compress.load(out, **options), compress.load(out, dequantize=True)
        for exclude in (False, True):
            assert model.num_parameters(exclude_embeddings=exclude) == dense.num_parameters(exclude_embeddings=exclude)
        assert model.num_parameters(only_trainable=True) < dense.num_parameters(only_trainable=True)
        assert model.dequantize() is model
        assert not any(isinstance(m, QuantLinear | FusedLinear) for m in model.modules())
        assert [type(m) for m in model.modules()] == [type(m) for m in dense.modules()]
        found, expected = model.state_dict(), dense.state_dict()
        assert list(found) == list(expected), kind
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert model.all_tied_weights_keys == dense.all_tied_weights_keys
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {n for n, _ in dense.named_parameters()}
        assert torch.equal(outputs(model, probe(96)), outputs(dense, probe(96)))
        assert model.num_parameters() == dense.num_parameters()
        model.save_pretrained(tmp_path / "saved")
        assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    half = compress.load(tmp_path / "0")
    assert half.dequantize(torch.float16).dtype == torch.float16
    rounded = compress.load(LLMCOMPRESSOR / "w8a8_static")
    before = rounded.state_dict()
    with pytest.raises(InputError, match=r"LlamaForCausalLM quantizes the input of model\.layers\.0.* stay compressed"):
        rounded.dequantize()
    assert all(torch.equal(before[name], value) for name, value in rounded.state_dict().items())


# --- options and memory --------------------------------------------------------------------------------------------


def test_loading_makes_no_dense_copy_of_any_layer(llama_w4):
    smallest = min(layer.in_features * layer.out_features for _, layer in compressed_layers(compress.load(llama_w4)))
    stored = max(t.numel() for n, t in compress.load(llama_w4).named_parameters() if "down_proj" in n)
    with Largest() as largest:
        model = compress.load(llama_w4)
    assert largest.elements < smallest
    with Largest() as largest:
        compress.load(llama_w4, dequantize=True)
    assert largest.elements >= smallest  # which is how the mode is known to see them
    held = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    files = sum(p.stat().st_size for p in llama_w4.glob("*.safetensors"))
    assert stored > 0
    assert held <= 1.1 * files


def test_int8_activations_are_for_weight_only_layers(llama_w4, llama):
    exact, fast = compress.load(llama_w4, torch.float32), compress.load(llama_w4, torch.float32, int8_activations=True)
    ids = probe(2048)
    difference = (outputs(exact, ids) - outputs(fast, ids)).abs().max()
    assert 0 < difference < 0.1 * outputs(exact, ids).abs().max()
    for model, options in (
        (LLMCOMPRESSOR / "w8a8_dynamic", {"int8_activations": True}),
        (llama, {"int8_activations": True}),
        (llama, {"fuse": True}),
        (llama_w4, {"dequantize": True, "fuse": True}),
    ):
        with pytest.raises(InputError):
            compress.load(model, **options)


def test_batch_invariant_layers_give_a_token_the_same_in_any_company(llama_w4, llama, tmp_path):
    if cpu.why_not():
        pytest.skip("; ".join(cpu.why_not()))
    notes = []
    model = compress.load(llama_w4, torch.float32, batch_invariant=True, notes=notes)
    assert notes[-1].startswith("batch-invariant: 12 compressed layers; norms, attention and dense layers (of these 3)")
    usual = dict(compressed_layers(compress.load(llama_w4, torch.float32)))
    with torch.no_grad():
        for name, layer in compressed_layers(model):
            x = torch.randn(70, layer.in_features, generator=torch.Generator().manual_seed(0))
            whole = layer(x)
            torch.testing.assert_close(whole, usual[name](x))
            assert all(torch.equal(layer(x[:M]), whole[:M]) for M in (1, 5))
    for refused, options, why in (
        (llama, {}, "is not compressed"),
        (llama_w4, {"dequantize": True}, "a dequantized model is dense"),
        (
            LLMCOMPRESSOR / "fp8_dynamic",
            {},
            r"^batch_invariant: model\..* \(fp8 .*\) cannot be: float-quantized has no kernel",
        ),
    ):
        with pytest.raises(InputError, match=why):
            compress.load(refused, batch_invariant=True, **options)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """A copy of a fixture whose tensors and configuration a function may edit; loading weights is a failure."""

    def change(name="w4a16_asym", tensors=None, config=None, reads=False):
        source = LLMCOMPRESSOR / name
        held, told = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
        (tensors or (lambda t: None))(held)
        (config or (lambda c: None))(told)
        (tmp_path / "config.json").write_text(json.dumps(told))
        save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if not reads:

            def loaded(*_, **__):
                raise AssertionError("weights were read")

            monkeypatch.setattr("compress.inference.load.assembly.finish", loaded)
            monkeypatch.setattr("compress.inference.load.conversions.finish", loaded)
        return tmp_path

    return change


Q = "model.layers.0.self_attn.q_proj"
WEIGHTS = ("quantization_config", "config_groups", "group_0", "weights")


def setting(*path_and_value):
    *path, value = path_and_value

    def edit(config):
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = value

    return edit


def cut(name):
    return lambda t: t.update({name: t[name][1:].clone()})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale"), f"{Q}.weight_scale is missing"),
        (lambda t: t.pop(f"{Q}.weight_packed"), f"{Q}.weight_packed is missing"),
        (cut(f"{Q}.weight_packed"), rf"{Q}.weight_packed has shape \(31, 8\); its layer needs \(32, 8\)"),
        (cut(f"{Q}.weight_zero_point"), f"{Q}.weight_zero_point has shape"),
        (lambda t: t.update({f"{Q}.weight_shape": torch.tensor([32, 0])}), f"{Q}.weight_shape says 32 x 0"),
        (lambda t: t.update({f"{Q}.weight_shape": torch.tensor([32])}), f"{Q}.weight_shape has shape"),
        (lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].int()}), f"{Q}.weight_scale is int32"),
        (lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(64)}), f"{Q}.weight_g_idx is no part"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32)}), r"model.norm.weight has shape \(32,\)"),
        (
            lambda t: t.update({k.replace(Q, "model.layers.9.q_proj"): t.pop(k) for k in list(t) if k.startswith(Q)}),
            "compressed model.layers.9.q_proj; LlamaForCausalLM has no such layer",
        ),
    ],
)
def test_malformed_tensors_are_named_before_weights_are_read(edit, message, changed):
    with pytest.raises(CheckpointError, match=message):
        compress.load(changed(tensors=edit))


def whole_layer(t, rows):
    """A layer that is consistent in itself and too small for the model."""
    for part in ("weight_packed", "weight_scale"):
        t[f"{Q}.{part}"] = t[f"{Q}.{part}"][:rows].clone()
    t[f"{Q}.weight_zero_point"] = t[f"{Q}.weight_zero_point"][: rows // 8].clone()
    t[f"{Q}.weight_shape"] = torch.tensor([rows, 64])


def test_a_layer_of_another_shape_than_the_models_is_named(changed):
    with pytest.raises(CheckpointError, match=rf"{Q} is stored as \(16, 64\); LlamaForCausalLM needs \(32, 64\)"):
        compress.load(changed(tensors=lambda t: whole_layer(t, 16)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (setting("quantization_config", "quant_method", "quark"), "quantized as quark; readable: "),
        (setting("quantization_config", "format", "marlin-24"), "compressed-tensors marlin-24; readable"),
        (setting("quantization_config", "config_groups", "group_0", "format", "nvfp4"), "stored as 'nvfp4'"),
        (setting("quantization_config", "kv_cache_scheme", {"num_bits": 8}), "key-value cache"),
        (setting("quantization_config", "transform_config", {"config_groups": {"R1": {}}}), "transform_config"),
        (setting("quantization_config", "config_groups", {}), "no config group .* targets model.layers.0"),
        (setting(*WEIGHTS, "type", "float"), "cannot be read"),
        (setting(*WEIGHTS, "actorder", "group"), "columns in their own order"),
        (setting(*WEIGHTS, "num_bits", 3), f"{Q}.weight_packed has shape|weight_packed has shape"),
        (setting(*WEIGHTS, "group_size", 48), "groups of 48 do not fit"),
        (setting(*WEIGHTS, "strategy", "block"), "strategy 'block'"),
        (lambda c: c.pop("quantization_config"), "config.json has no quantization_config"),
        (
            setting("quantization_config", "config_groups", "group_0", "output_activations", OUTPUT),
            "quantizes its output",
        ),
    ],
)
def test_unknown_formats_are_named_before_weights_are_read(edit, message, changed):
    with pytest.raises(CheckpointError, match=message):
        compress.load(changed(config=edit))


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("w4a16_asym", lambda t: t.pop("model.norm.weight"), "lacks the tensor model.norm.weight"),
        ("w4a16_asym", lambda t: t[f"{Q}.weight_scale"].fill_(float("inf")), f"{Q}.weight_scale holds values"),
    ],
)
def test_what_only_the_whole_shows_is_named_too(name, edit, message, changed):
    with pytest.raises(CheckpointError, match=message):
        compress.load(changed(name, tensors=edit, reads=True))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale"), f"{Q}.weight_scale is missing"),
        (lambda t: t.pop(f"{Q}.input_scale"), f"{Q}.input_scale is missing"),
        (lambda t: t.pop(f"{Q}.input_zero_point"), f"{Q}.input_zero_point is missing"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}), f"{Q}.weight is float32; it must be int8"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].flatten()}), f"{Q}.weight has shape"),
    ],
)
def test_malformed_int8_layers_are_named(edit, message, changed):
    with pytest.raises(CheckpointError, match=message):
        compress.load(changed("w8a8_static_asym", tensors=edit))


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("w8a8_static", {"dynamic": True, "strategy": "token"}, "readable: int8, static per tensor"),
        ("w8a8_static", {"strategy": "channel"}, "readable: int8, static per tensor"),
        ("w8a8_static", {"num_bits": 4}, "readable: int8, static per tensor"),
        ("w8a8_static", {"type": "float"}, "readable: int8, static per tensor"),
        ("fp8_static", {}, "readable: float8, symmetric, static per tensor"),
        ("fp8_static", {"type": "float", "dynamic": True}, "readable: float8, symmetric, static per tensor"),
        ("w8a8_static", {}, r"down_proj\.output_scale is missing"),
        ("w8a8_static_asym", {"symmetric": False}, r"down_proj\.output_zero_point is missing"),
        ("w8a16_channel", {}, "quantizes its output and is stored as pack-quantized with input None"),
    ],
)
def test_outputs_that_cannot_be_read_are_named(name, entry, message, changed):
    def tensors(held):
        if "symmetric" in entry:
            layers = [key for key in held if key.endswith("_proj.weight")]
            held.update({key.replace("weight", "output_scale"): torch.ones(1) for key in layers})

    config = setting("quantization_config", "config_groups", "group_0", "output_activations", {**OUTPUT, **entry})
    with pytest.raises(CheckpointError, match=message):
        compress.load(changed(name, tensors, config))


def test_a_layers_own_name_goes_before_patterns():
    def group(bits, target):
        return {"targets": [target], "weights": {"num_bits": bits, "strategy": "channel"}}

    targets = ("Linear", "re:.*down", "a.down")
    groups = {target: group(bits, target) for bits, target in zip((2, 4, 8), targets, strict=True)}
    quantization = {"format": "pack-quantized", "config_groups": groups}
    assert [scheme_for(layer, quantization).weights.bits for layer in ("a.down", "b.down", "a.up")] == [8, 4, 2]


def test_a_model_whose_initialization_asks_a_layer_for_its_sizes_loads(tmp_path):
    """WavLM scales the first values of its projection by the root of its inputs."""
    model, batch = small(WavLMForSequenceClassification, "audio")
    model.save_pretrained(tmp_path / "model")
    p = compress.GPTQ(scheme="w4a16", group_size=-1)
    compress.quantize(tmp_path / "model", p, calibration=[batch], output=tmp_path / "out", one_block=True)
    assert any("projection.weight_packed" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    found, expected = (
        compress.load(tmp_path / "out")(**batch),
        compress.load(tmp_path / "out", dequantize=True)(**batch),
    )
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
