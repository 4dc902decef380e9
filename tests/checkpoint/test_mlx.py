"""Exports in MLX's layout, against a transcription of its formula, and against MLX itself where it is installed."""

import json

import mixtures
import pytest
import torch
import transformers
from commands import make_llama, refusal_of_export, save
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import CheckpointError
from compress.checkpoint.export.mlx_families import config_for, notes_of, why_not_family
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.source import find_source

MIXED = [
    compress.only(compress.RTN(scheme="w3a16", group_size=32), "*down_proj"),
    compress.only(compress.RTN(scheme="w6a16", group_size=-1), "*o_proj"),
    compress.but(compress.RTN(scheme="w4a16", group_size=64), "*down_proj", "*o_proj"),
    compress.Embeddings(scheme="w8a16", group_size=32),
]


ROPE = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 32}


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def exported(request, tmp_path_factory):
    """(Our checkpoint, the same in MLX's layout)."""
    folder = tmp_path_factory.mktemp("mlx")
    shape = {"hidden_size": 128, "intermediate_size": 192, "tie_word_embeddings": True, "rope_parameters": ROPE}
    model = make_llama(num_hidden_layers=1, **shape).to(request.param)
    compress.quantize(save(model, folder / "model"), MIXED, output=folder / "out", verify=False)
    compress.export(folder / "out", folder / "there", "mlx")
    return folder / "out", folder / "there"


def values(held, name, bits, group):
    """codes * scales + biases, code k of a row in bits [k n, k n + n) of its stream."""
    stream = held[f"{name}.weight"].view(torch.uint8).int()
    ones = torch.stack([stream >> bit & 1 for bit in range(8)], -1).flatten(1)
    codes = (ones.view(len(ones), -1, bits) << torch.arange(bits)).sum(-1)
    scales, biases = (held[f"{name}.{part}"].double().repeat_interleave(group, 1) for part in ("scales", "biases"))
    return codes * scales + biases


def test_mlx_lm_is_told_of_rotary_positions_where_it_looks(exported):
    config = json.loads((exported[1] / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (5e4, {"type": "llama3", **config["rope_parameters"]})


LOCAL, FULL = "sliding_attention", "full_attention"
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "pad_token_id": 0}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 8, "num_hidden_layers": 4}
LINEAR = {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0}
NESTED = {FULL: LINEAR, LOCAL: {"rope_type": "default", "rope_theta": 500.0}}


def family(kind, folder, **changes):
    """A random model of a family whose attention has a window of 8 tokens, and its configuration's entries."""
    config = getattr(transformers, f"{kind.replace('Gemma3', 'Gemma3Text')}Config")(**SIZES | changes)
    return find_source(str(save(getattr(transformers, f"{kind}ForCausalLM")(config), folder / "model")))


@pytest.mark.parametrize(
    ("kind", "changes", "found"),
    [
        (
            "Gemma3",
            {"layer_types": [LOCAL, FULL] * 2, "rope_parameters": NESTED},
            {
                "rope_theta": 5e4,
                "rope_scaling": {"type": "linear", **LINEAR},
                "rope_local_base_freq": 500.0,
                "sliding_window_pattern": 2,
            },
        ),
        ("Cohere2", {"layer_types": [LOCAL, FULL] * 2}, {"rope_theta": 1e4, "sliding_window_pattern": 2}),
        ("Olmo3", {}, {"rope_theta": 5e5, "rope_scaling": None}),
        ("Exaone4", {"layer_types": [LOCAL, LOCAL, FULL, LOCAL]}, {"sliding_window_pattern": "LLGL", "head_dim": 8}),
    ],
)
def test_mlx_lm_is_told_of_windows_and_of_the_positions_of_each_kind_of_layer(kind, changes, found, tmp_path):
    model = family(kind, tmp_path, **changes)
    config = config_for(model)
    assert {key: config[key] for key in found} == found
    assert not list(notes_of(model))


@pytest.mark.parametrize("kind", ["Mistral", "Gemma2", "Qwen2", "Starcoder2", "Mixtral"])
def test_windows_that_mlx_lm_has_not_are_noted_where_texts_can_be_longer(kind, tmp_path):
    changes = {"use_sliding_window": True, "max_window_layers": 1} if kind == "Qwen2" else {}
    says = f"attention sees the last 8 tokens; mlx-lm's {kind.lower()} has no such window and sees all"
    assert [line.startswith(says) for line in notes_of(family(kind, tmp_path / "long", **changes))] == [True]
    assert not list(notes_of(family(kind, tmp_path / "short", **changes, max_position_embeddings=8)))


def test_a_family_of_mlx_lm_that_nobody_has_run_is_noted(tmp_path):
    model = family("RecurrentGemma", tmp_path, attention_window_size=8)
    assert not why_not_family(model)
    assert [line.startswith("mlx-lm 0.32.2 was not tried with this family") for line in notes_of(model)] == [True]


@pytest.mark.parametrize(("short", "noted"), [(1.0, 1), (2.0, 0)])
def test_positions_that_mlx_lm_turns_otherwise_are_noted(short, noted, tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [short] * 16, "long_factor": [2.0] * 16}
    rope |= {"original_max_position_embeddings": 32}
    model = save(make_llama(num_hidden_layers=1, hidden_size=128, rope_parameters=rope).half(), tmp_path / "model")
    compress.quantize(model, compress.RTN(group_size=32), output=tmp_path / "out", verify=False)
    lines = compress.export(tmp_path / "out", tmp_path / "there", "mlx", verify=False).lost
    wanted = "logits of texts of up to 32 tokens will differ: mlx-lm takes rope's long_factor"
    assert [line.startswith(wanted) for line in lines] == [True] * noted


@pytest.mark.first
def test_the_formula_of_mlx_finds_the_quantized_weights(exported):
    out, there = exported
    held, dense = load_file(there / "model.safetensors"), compress.load(out, dequantize=True)
    quantization = json.loads((there / "config.json").read_text())["quantization"]
    usual = {"group_size": 64, "bits": 4}
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert quantization == {
        **usual,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
        f"{attention}.o_proj": {"group_size": 128, "bits": 6},
        f"{mlp}.down_proj": {"group_size": 32, "bits": 3},
    }
    layers = [name.removesuffix(".scales") for name in held if name.endswith(".scales")]
    assert len(layers) == 8
    for name in layers:
        kind = quantization.get(name, usual)
        found = values(held, name, kind["bits"], kind["group_size"])
        weight = dense.get_parameter(f"{name}.weight")
        assert torch.equal(found.to(weight.dtype), weight)


def test_our_reader_loads_the_same_weights(exported):
    first, second = (compress.load(folder, dequantize=True).state_dict() for folder in exported)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert compress.verify(str(exported[1]))["layers"] == 8


def test_mlx_lm_computes_the_same_logits(exported):
    mlx_lm = pytest.importorskip("mlx_lm", reason="needs mlx-lm")
    mx = pytest.importorskip("mlx.core")
    out, there = exported
    model, _ = mlx_lm.utils.load_model(there)
    theirs = torch.tensor(model(mx.array([[1, 2, 3]])).astype(mx.float32).tolist())
    ours = compress.load(out)(torch.tensor([[1, 2, 3]])).logits.float()
    assert (theirs - ours).norm() < 0.05 * ours.norm()  # products in 16 bits, each rounded its own way


@pytest.fixture(scope="module", params=[("mixtral", "block_sparse_moe", "w1"), ("qwen3-moe", "mlp", "gate_proj")])
def mixture(request, tmp_path_factory):
    """(The checkpoint of a mixture, the same in MLX's layout, its block of experts, an expert's gate)."""
    family, *names = request.param
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"intermediate_size": 64, **({"moe_intermediate_size": 32} if family == "qwen3-moe" else {})}
    model = save(mixtures.made(family, **sizes).bfloat16(), folder / "model")
    compress.quantize(model, compress.RTN(group_size=32), output=folder / "out", verify=False)
    compress.export(folder / "out", folder / "there", "mlx")
    return folder / "out", folder / "there", *names


def test_experts_lie_in_stacks_of_which_our_reader_makes_layers(mixture):
    out, there, block, gate = mixture
    held, config = load_file(there / "model.safetensors"), json.loads((there / "config.json").read_text())
    stack, first, again = f"model.layers.0.{block}.switch_mlp.gate_proj", find_source(str(out)), find_source(str(there))
    assert config["num_experts"] == len(held[f"{stack}.scales"]) == 4  # mlx-lm's name, not transformers 5's
    for i in range(4):
        expert = {f"{gate}.{part}": held[f"{stack}.{part}"][i] for part in ("weight", "scales", "biases")}
        weight = weight_of(first, f"model.layers.0.{block}.experts.{i}.{gate}").dequantize()
        assert torch.equal(values(expert, gate, 4, 32).to(weight.dtype), weight)
    layers = stored_in(first).layers
    assert layers.keys() == stored_in(again).layers.keys()
    assert all(torch.equal(weight_of(first, name).dequantize(), weight_of(again, name).dequantize()) for name in layers)


@pytest.mark.parametrize(
    ("passes", "says"),
    [
        ([compress.but(compress.RTN(group_size=32), "*experts.1.w2")], "experts.1.w2.weight is not compressed"),
        (
            [
                compress.only(compress.RTN(scheme="w8a16", group_size=32), "*experts.1.w2"),
                compress.but(compress.RTN(group_size=32), "*experts.1.w2"),
            ],
            "switch_mlp.down_proj holds all experts, and these have several kinds of codes",
        ),
    ],
)
def test_a_stack_has_one_kind_of_codes(passes, says, tmp_path):
    model = save(mixtures.made("mixtral", intermediate_size=64).half(), tmp_path / "model")
    assert says in refusal_of_export(model, passes, "mlx", tmp_path)


def test_biases_that_mlx_rounds_itself_are_refused(exported, copy_of):
    folder = copy_of(exported[1])
    held = load_file(folder / "model.safetensors")
    held["model.layers.0.mlp.up_proj.biases"] *= 0.75
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.biases are no multiples of the scales"):
        compress.load(folder)


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        ({"scheme": "w7a16", "group_size": 32}, "has codes of 7 bits; allowed: 2, 3, 4, 5, 6, 8"),
        (
            {"scheme": "w4a16", "group_size": 16},
            "has groups of 16; allowed: multiples of 32; quantize with --group-size",
        ),
        ({"scheme": "w4a16", "group_size": 32, "grid": "asymmetric"}, "quantize with --grid signed-scale"),
    ],
)
def test_codes_that_mlx_does_not_run_are_refused_in_a_line(scheme, says, llama, tmp_path):
    assert says in refusal_of_export(llama, compress.RTN(**scheme), "mlx", tmp_path)
