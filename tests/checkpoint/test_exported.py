"""`compress export --to dense`: the same values for readers that know nothing of compression."""

import json
import os
from pathlib import Path

import pytest
import torch
from commands import Largest, command, last_line, make_llama, save
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.base.errors import CheckpointError, CompressError, InputError
from compress.checkpoint.export import place
from compress.checkpoint.files import INDEX, RECORD
from compress.passes.protocol.recipe import make_pass

TOKENS = torch.randint(2048, (6, 16), generator=torch.Generator().manual_seed(1))
GROUPS = {"group_size": 32}
FAST = {**GROUPS, "refit": 0, "sweeps": 0, "drift": 0.0}
# What is run -> the passes, by name and options.
RUNS = {
    "floats of 4 bits, whose values are float32": [("rtn", {"scheme": "mxfp4a16"})],
    "packed, asymmetric": [("rtn", {"scheme": "w3a16", "grid": "asymmetric", **GROUPS})],
    "embeddings of 4 bits": [("rtn", {"scheme": "w4a16", **GROUPS}), ("embeddings", {"scheme": "w4a16"})],
    "embeddings of 8 bits": [("embeddings", {"scheme": "w8a16"})],
    "ternary": [("ternary", FAST)],
    "a sum": [("lqs", {"scheme": "w2a16", "rank": 2, **FAST})],
    "a plugin's sum": [("compress.recipes.low_rank:LowRankAndCodes", {"rank": 4, **GROUPS})],
}


def made(model: object, name: str, out: Path) -> Path:
    passes = [make_pass(method, options) for method, options in RUNS[name]]
    compress.quantize(model, passes, calibration=TOKENS, output=out, verify=False)
    return out


@pytest.mark.first
# A tied head shows in embeddings alone.
@pytest.mark.parametrize(
    ("name", "tied"), [(name, tied) for name in RUNS for tied in ((False, True) if "embeddings" in name else (False,))]
)
def test_values_are_those_of_the_dequantized_model_bit_for_bit(name, tied, tmp_path):
    model = save(make_llama(tie_word_embeddings=tied).bfloat16(), tmp_path / "model")
    out, target = made(model, name, tmp_path / "out"), tmp_path / "dense"
    result = compress.export(out, target)
    assert result.output == target
    assert not result.lost
    assert {path.name for path in target.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", RECORD}
    assert not target.with_name("dense.partial").exists()
    config = json.loads((target / "config.json").read_text())
    assert config == {**json.loads((model / "config.json").read_text())}
    theirs, info = AutoModelForCausalLM.from_pretrained(target, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ours = compress.load(out, dequantize=True)
    state = theirs.state_dict()
    assert state.keys() == ours.state_dict().keys()
    for key, value in ours.state_dict().items():
        assert state[key].dtype == value.dtype == torch.bfloat16, key
        assert torch.equal(state[key], value), key
    assert torch.equal(theirs(TOKENS).logits, ours(TOKENS).logits)
    assert AutoTokenizer.from_pretrained(target).vocab_size == 2048
    written, given = (load_file(folder / "model.safetensors") for folder in (target, model))
    assert {name: each.dtype for name, each in written.items()} == {name: each.dtype for name, each in given.items()}
    assert compress.verify(str(target))["transformers"] == "compared"


@pytest.mark.parametrize(
    ("passes", "says"),
    [
        (compress.RTN(scheme="w8a8"), "14 layers, like model.layers.0.mlp.down_proj, round what they are given"),
        (
            compress.RTN(scheme="w8a8", activations="static", outputs="static"),
            "14 layers, like model.layers.0.mlp.down_proj, round what they are given and return",
        ),
        (compress.RTN(scheme="fp8", activations="static"), "round what they are given"),
        (compress.KVCache(granularity="head"), "keys and values are rounded"),
    ],
)
def test_what_dense_weights_leave_out_is_said(passes, says, llama, tmp_path):
    compress.quantize(llama, passes, calibration=TOKENS, output=tmp_path / "out", verify=False)
    outcome = command("export", tmp_path / "out", "--to", "dense", "--output", tmp_path / "dense")
    assert outcome.code == 0, outcome.err
    (note,) = [line for line in outcome.err.splitlines() if line.startswith("note: ")]
    assert says in note
    assert [note.removeprefix("note: ")] == json.loads((tmp_path / "dense" / RECORD).read_text())["notes"]
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_large_models_are_several_files_and_one_layer_is_dense_at_a_time(llama_w4, tmp_path, monkeypatch):
    whole = compress.export(llama_w4, tmp_path / "whole")
    monkeypatch.setattr(place, "PART_BYTES", 1)
    with Largest() as largest:
        cut = compress.export(llama_w4, tmp_path / "cut", shard_size="100KB")
    assert largest.elements <= 2048 * 64  # the embedding, as it lies
    assert (cut.output / INDEX).exists()
    assert len(list(cut.output.glob("*.safetensors"))) > 2
    one, other = (AutoModelForCausalLM.from_pretrained(each.output).state_dict() for each in (whole, cut))
    assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_what_is_there_is_replaced_only_when_asked_and_only_if_it_is_ours(llama_w4, tmp_path):
    target = tmp_path / "dense"
    words = ["export", llama_w4, "--to", "dense", "--output", target, "--quiet"]
    assert command(*words).code == 0
    before = (target / "model.safetensors").stat().st_ino
    refused = command(*words)
    assert refused.code == 2
    assert "exists; choose another output or pass --overwrite" in last_line(refused)
    assert (target / "model.safetensors").stat().st_ino == before
    assert command(*words, "--overwrite").code == 0
    assert (target / "model.safetensors").stat().st_ino != before
    (target / "mine.txt").write_text("x")
    assert "holds mine.txt, which no run wrote" in last_line(command(*words, "--overwrite"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "mine.txt").write_text("x")
    with pytest.raises(InputError, match="is not a checkpoint of this tool"):
        compress.export(llama_w4, foreign, overwrite=True)
    with pytest.raises(InputError, match="is the model itself"):
        compress.export(llama_w4, llama_w4, overwrite=True)


def test_nothing_is_left_of_an_export_that_fails(llama_w4, copy_of, tmp_path, monkeypatch):
    target = tmp_path / "dense"
    damaged = copy_of(llama_w4)
    path = damaged / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    scale = next(name for name in reversed(tensors) if name.endswith("weight_scale"))
    tensors[scale][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{scale.removesuffix('.weight_scale')}.weight_scale holds values"):
        compress.export(damaged, target)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(place, "save_file", full)
    with pytest.raises(CompressError, match=r"cannot write .*dense: .*No space left"):
        compress.export(llama_w4, target)
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]
