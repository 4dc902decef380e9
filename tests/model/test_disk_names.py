"""Mixtures are written under the names of the hub, by which engines look experts up."""

import json

import torch
import transformers
from commands import command
from mixtures import made, tokens
from packaging.version import Version
from safetensors.torch import load_file, save_file

import compress
from compress.model.disk_names import DiskNames, disk_names
from compress.model.split_experts import split_experts
from compress.passes.protocol.base import but, only
from compress.recipes.studies.models.small import small

PAIRS = [
    ("a.mlp.gate.weight", "a.moe.gate.weight"),
    ("a.mlp.gate.shift", "a.moe.shift"),
    ("a.mlp.experts.0.w1.weight", "a.moe.experts.0.w1.weight"),
    ("a.norm.weight", "a.norm.weight"),
    ("b.router.weight", "b.router.layer.weight"),
]


def test_what_comes_in_the_place_of_a_tensor_is_called_after_it():
    names = DiskNames(PAIRS)
    expected = {
        "a.mlp.experts.0.w1": "a.moe.experts.0.w1",
        "a.mlp.experts.0.w1.weight_packed": "a.moe.experts.0.w1.weight_packed",
        "a.mlp.experts.7.w2.weight_scale": "a.moe.experts.7.w2.weight_scale",
        "a.mlp.gate.weight_scale": "a.moe.gate.weight_scale",
        "a.mlp.gate.shift": "a.moe.shift",
        "a.norm.bias": "a.norm.bias",
        "b.router.weight_packed": "b.router.layer.weight_packed",
        "c.weight": "c.weight",
    }
    assert {name: names.on_disk(name) for name in expected} == expected
    assert {names.in_model(file): file for file in expected.values()} == expected
    assert DiskNames().on_disk("a.mlp.gate.weight") == "a.mlp.gate.weight"


def test_a_mixture_in_memory_is_called_as_transformers_writes_it(tmp_path):
    for family in ("mixtral", "granite", "qwen3-moe"):
        model = made(family)
        model.save_pretrained(tmp_path / family)
        written = load_file(tmp_path / family / "model.safetensors").keys()
        split_experts(model)
        known = model.state_dict().keys()
        for names in (disk_names(model), disk_names(model, written)):
            assert all(names.in_model(names.on_disk(name)) == name for name in known)
            experts = {names.on_disk(name) for name in known if ".experts." in name}
            assert {names.on_disk(name) for name in known} - experts <= written
            assert family == "granite" or experts <= written


def test_records_configurations_and_older_files_go_with_the_names_of_the_hub(tmp_path):
    model = made("mixtral")
    split_experts(model)
    passes = [
        only(compress.RTN(scheme="w4a16", group_size=16), "*.w2"),
        but(compress.RTN(scheme="w8a16", group_size=16), "*.w2"),
    ]
    made_of = compress.quantize(model, passes, output=tmp_path / "out", verify=True)
    block = "model.layers.0.block_sparse_moe"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["ignore"] == ["lm_head", f"{block}.gate", f"{block.replace('.0.', '.1.')}.gate"]
    fours, eights = (
        next(g["targets"] for g in quantization["config_groups"].values() if g["weights"]["num_bits"] == bits)
        for bits in (4, 8)
    )
    # The names by which vLLM asks for the scheme of all experts of a block.
    assert {f"{block}.experts.0.w2", f"{block}.experts.0.down_proj"} <= {*fours}
    assert {f"{block}.experts.0.w1", f"{block}.experts.0.gate_proj", f"{block}.experts.0.up_proj"} <= {*eights}
    assert f"{block}.experts.1.down_proj" not in fours
    assert any("have several schemes" in note for note in made_of.record.notes)
    assert "by one scheme" in made_of.verification["transformers"]
    shown = command("inspect", tmp_path / "out", "--all")
    (line,) = (line for line in shown.out.splitlines() if f"{block}.experts.3.w1" in line)
    assert "rtn" in line
    # Files of earlier versions have the names of the model.
    with torch.no_grad():
        expected = compress.load(tmp_path / "out")(tokens(1)).logits
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    save_file({name.replace(".block_sparse_moe.", ".mlp."): value for name, value in tensors.items()}, file)
    text = json.dumps(config).replace(".block_sparse_moe.", ".mlp.")
    (tmp_path / "out" / "config.json").write_text(text)
    with torch.no_grad():
        assert torch.equal(compress.load(tmp_path / "out")(tokens(1)).logits, expected)


def test_renamings_that_end_in_a_dot_place_modules(tmp_path):
    """A file's `self_attn.q_b_proj.` is the model's `self_attn.q_gate_proj.`."""
    model, batch = small(transformers.AXK2ForCausalLM, "causal")
    model.save_pretrained(tmp_path / "model")
    compress.quantize(tmp_path / "model", compress.RTN(scheme="w8a16"), output=tmp_path / "out")
    assert any("q_b_proj.weight_packed" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    found, expected = (
        compress.load(tmp_path / "out")(**batch),
        compress.load(tmp_path / "out", dequantize=True)(**batch),
    )
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)


def test_a_model_whose_weights_transformers_fails_to_join_is_not_compared(tmp_path):
    """Its steps for DINOv2 name layers that this model has not, and those of compressed-tensors fail on them."""
    model, batch = small(transformers.Dinov2ForImageClassification, "vision")
    model.save_pretrained(tmp_path / "model")
    made = compress.quantize(tmp_path / "model", compress.RTN(scheme="w8a16"), output=tmp_path / "out", verify=True)
    recent = Version(transformers.__version__) >= Version("5.23")
    why = "joins or splits" if recent else "initialization reads weights of compressed layers"
    assert why in made.verification["transformers"]
    found, expected = (
        compress.load(tmp_path / "out")(**batch),
        compress.load(tmp_path / "out", dequantize=True)(**batch),
    )
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
