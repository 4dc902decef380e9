"""Tensors of a checkpoint that the model's class ignores: kept as they are, named, and passed by when it is loaded."""

import json

import pytest
import torch
from commands import command, save
from mixtures import made
from models import build
from safetensors.torch import load_file, save_file

import compress
from compress.checkpoint.files import INDEX
from compress.checkpoint.read.source import find_source
from compress.checkpoint.read.unplaced_tensors import AHEAD, DRAFT, beside, recomputed_names

W8 = compress.RTN(scheme="w8a16", group_size=16)
# One layer that predicts ahead, as DeepSeek's files have it: transformers passes by what is called layers.61.
HEAD = {
    "model.layers.61.eh_proj.weight": torch.randn(32, 64),
    "model.layers.61.enorm.weight": torch.ones(32),
    "model.layers.61.mlp.experts.0.gate_proj.weight": torch.randn(16, 32),
    "mtp.layers.0.self_attn.q_proj.weight": torch.randn(32, 32).bfloat16(),
}
STRANGE = {"talker.proj.weight": torch.randn(8, 8), "talker.ids": torch.arange(5)}
LINEARS = ["model.layers.61.eh_proj", "model.layers.61.mlp.experts.0.gate_proj", "mtp.layers.0.self_attn.q_proj"]


def add(folder, tensors):
    """Put tensors into a file of their own, which the index names."""
    save_file(tensors, folder / "model-extra.safetensors", metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "model-extra.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beside") / "in"
    made("deepseek-v3").save_pretrained(folder, max_shard_size="100KB")
    return add(folder, {**HEAD, **STRANGE})


@pytest.fixture(scope="module")
def out(mixture):
    found = compress.quantize(mixture, W8, output=mixture.parent / "out", verify=True)
    return mixture.parent / "out", found


def stored(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def test_tensors_without_a_place_are_in_the_output_unchanged(out):
    folder, _ = out
    tensors = stored(folder)
    for name, tensor in {**HEAD, **STRANGE}.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert any(name.endswith("mlp.experts.0.gate_proj.weight_packed") or "weight_scale" in name for name in tensors)


def test_engines_are_told_that_they_are_dense(out):
    folder, _ = out
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(LINEARS) | {"talker.proj"} <= set(ignored)


def test_the_report_names_them_and_counts_them(out):
    _, found = out
    record = found.record
    size = sum(t.nbytes for t in HEAD.values()) / 1e6
    assert f"kept dense: {AHEAD}, 4 tensors, {size:.1f} MB, like {next(iter(HEAD))}" in record.notes
    assert "kept dense: no part of DeepseekV3ForCausalLM, 2 tensors, 0.0 MB, like talker.ids" in record.notes
    assert {record.left_alone[name] for name in LINEARS} == {AHEAD}
    assert record.coverage.rest[AHEAD] == sum(t.numel() for t in HEAD.values())
    assert found.verification["transformers"] == "compared"


def test_the_plan_names_them_and_its_bytes_are_exact(mixture, out):
    plan = compress.plan(mixture, W8)
    size = sum(t.nbytes for t in HEAD.values()) / 1e6
    assert plan.notes[0] == f"kept dense: {AHEAD}, 4 tensors, {size:.1f} MB, like {next(iter(HEAD))}"
    assert plan.dense["model.layers.61.eh_proj"] == AHEAD
    assert plan.saving == out[1].record.saving
    assert f"kept dense: {AHEAD}, 4 tensors" in command("plan", mixture, "--method=rtn", "--scheme=w8a16").out


def test_the_model_loads_without_them_and_says_so(out):
    folder, _ = out
    notes = []
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = compress.load(folder, notes=notes)(ids).logits
        dense = compress.load(folder, dequantize=True)(ids).logits
    assert torch.allclose(logits, dense, atol=1e-4)
    assert sum(note.startswith(f"not loaded: {AHEAD}, 4 tensors") for note in notes) == 1


def test_exports_keep_them(out, tmp_path):
    compress.export(out[0], tmp_path / "dense")
    tensors = stored(tmp_path / "dense")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in HEAD.items())


def test_an_edit_of_the_whole_model_drops_what_reads_its_hidden_states(tmp_path):
    folder = tmp_path / "in"
    build("llama").save_pretrained(folder, max_shard_size="20KB")
    add(folder, {"medusa_head.0.linear.weight": torch.randn(32, 32)})
    assert [each.kind for each in beside(find_source(str(folder))).values()] == [DRAFT]
    found = compress.quantize(folder, [compress.Rotation(), W8], output=tmp_path / "out", verify=False)
    assert "medusa_head.0.linear.weight" not in stored(tmp_path / "out")
    said = f"not written: {DRAFT}, 1 tensor, 0.0 MB, like medusa_head.0.linear.weight: the recipe edits the model as a"
    assert any(note.startswith(said) for note in found.record.notes)
    assert not any("kept dense" in note for note in compress.plan(folder, [compress.Rotation(), W8]).notes)


@pytest.mark.parametrize(("passes", "in_memory"), [([compress.Rotation(), W8], False), (W8, True), (W8, False)])
def test_the_configuration_counts_the_heads_that_are_written(passes, in_memory, mixture, tmp_path):
    model = made("deepseek-v3") if in_memory else mixture
    found = compress.quantize(model, passes, output=tmp_path / "out", verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    kept = sum("layers.61." in name or name.startswith("mtp.") for name in stored(tmp_path / "out"))
    assert (kept, config["num_nextn_predict_layers"]) == ((4, 1) if passes is W8 and not in_memory else (0, 0))
    said = f"the configuration of the output counts no {AHEAD}: none is written"
    assert (said in found.record.notes) == (kept == 0)
    if in_memory:
        assert model.config.num_nextn_predict_layers == 1


def test_what_a_model_computes_itself_is_not_kept(tmp_path):
    folder = save(build("llama"), tmp_path / "in")
    weights = load_file(folder / "model.safetensors")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**weights, **old}, folder / "model.safetensors", metadata={"format": "pt"})
    source = find_source(str(folder))
    assert beside(source) == {}
    assert recomputed_names(source) == [*old]
    found = compress.quantize(folder, W8, output=tmp_path / "out", verify=False)
    assert f"not written: 1 tensor like {next(iter(old))}, which LlamaForCausalLM computes itself" in found.record.notes


@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
def test_every_tensor_of_a_plain_model_has_its_place(family, tmp_path):
    source = find_source(str(save(build(family), tmp_path / "in")))
    assert (beside(source), recomputed_names(source)) == ({}, [])
