"""Written checkpoints: what transformers reads, what a killed run leaves, what is never overwritten."""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from combinations import each
from commands import DRIFT_GPTQ, StopAfterOne
from mixtures import made
from models import build, tokens
from packaging.version import Version
from places import SUPPORT
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import compress
from compress.base.errors import CheckpointError, CompressError, InputError
from compress.base.progress import Silent
from compress.checkpoint.read.compressed_layers import read_tensors
from compress.checkpoint.read.source import find_source
from compress.checkpoint.write import writer
from compress.checkpoint.write.shards import pieces_of, write_tensors
from compress.inference.check.by_transformers import load_with_transformers
from compress.jobs import verify as verification
from compress.jobs.verify import outputs, probe

GPTQ = compress.GPTQ(group_size=16, **DRIFT_GPTQ)
LOADERS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def save(model, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def files(path: Path) -> dict[str, bytes]:
    """Every file but the run's record, which holds times."""
    return {p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.name != "compress.json"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


SCHEMES = [
    {"scheme": "w4a16", "group_size": 16},
    {"scheme": "w4a16", "group_size": 16, "grid": "symmetric"},
    {"scheme": "w4a16", "group_size": 16, "grid": "narrow"},
    {"scheme": "w4a16", "group_size": 16, "grid": "asymmetric"},
    {"scheme": "w4a16", "group_size": -1},
    {"scheme": "w4a16", "group_size": -1, "grid": "asymmetric"},
    {"scheme": "w3a16", "group_size": 16},
    {"scheme": "w2a16", "group_size": 32, "grid": "asymmetric"},
    {"scheme": "w5a16", "group_size": 16},
    {"scheme": "w8a16", "group_size": -1},
    {"scheme": "w8a16", "group_size": 16, "grid": "asymmetric"},
    {"scheme": "w8a16", "group_size": -1, "per_tensor": True},
]


@pytest.mark.parametrize(("options", "dtype"), each(SCHEMES, sorted(LOADERS)), ids=str)
def test_transformers_computes_the_logits_of_the_compressed_model(options, dtype, tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    source = save(build("llama", LOADERS[dtype]), tmp_path / "in")
    compress.quantize(source, compress.RTN(**options), output=tmp_path / "out", verify=False)
    model = compress.load(source)  # the same run, in memory
    compress.quantize(model, compress.RTN(**options))
    expected = outputs(model, probe(96))
    assert expected.dtype == LOADERS[dtype]
    found, loader = load_with_transformers(find_source(str(tmp_path / "out")))
    assert loader == ("dequantize=True" if options.get("grid") == "asymmetric" else "default")
    assert torch.equal(outputs(found, probe(96)), expected)
    assert torch.equal(outputs(compress.load(tmp_path / "out", dequantize=True), probe(96)), expected)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "opt", "bert"])
def test_other_families_reload_in_transformers(kind, tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    source = save(build(kind, torch.bfloat16), tmp_path / "in")
    result = compress.quantize(source, GPTQ, calibration=tokens(), output=tmp_path / "out", verify=False)
    found = compress.verify(tmp_path / "out")
    assert found["transformers"] == "compared"
    assert found["logits_max_difference"] == 0.0
    assert found["layers"] == len(result.record.layers)


@pytest.mark.first
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_weights_stay_in_the_dtype_of_their_file(kind, key, tmp_path):
    """Where config.json says a wider one: what stays dense would become twice as large, and no better."""
    model, out = tmp_path / "model", tmp_path / "out"
    (build(kind) if kind == "llama" else made(kind)).bfloat16().save_pretrained(model)
    said = json.loads((model / "config.json").read_text())
    del said["dtype"]
    (model / "config.json").write_text(json.dumps({**said, key: "float32"}))
    for passes in (compress.RTN(group_size=16), compress.Magnitude(sparsity=0.5)):
        told = compress.plan(model, passes).saving
        record = compress.quantize(model, passes, output=out, overwrite=True).record
        held = load_file(out / "model.safetensors")
        assert {tensor.dtype for tensor in held.values() if tensor.is_floating_point()} == {torch.bfloat16}
        assert json.loads((out / "config.json").read_text())[key] == "bfloat16"
        assert sum(tensor.numel() * tensor.element_size() for tensor in held.values()) == told.after <= told.before
        assert any("all weights are bfloat16, and stay so" in note for note in record.notes)


def test_an_encoder_decoder_is_read_by_transformers(tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    source = save(build("t5"), tmp_path / "in")
    ids = tokens()
    batches = [{"input_ids": part, "decoder_input_ids": part} for part in ids.split(3)]
    result = compress.quantize(source, GPTQ, calibration=batches, output=tmp_path / "out", verify=False)
    ours = compress.load(tmp_path / "out", dequantize=True)
    if Version(transformers.__version__) < Version("5.23"):
        assert "initialization reads weights" in compress.verify(tmp_path / "out")["transformers"]
    else:
        found, loader = load_with_transformers(find_source(str(tmp_path / "out")))
        assert loader == "dequantize=True"
        with torch.no_grad():
            assert torch.equal(found(**batches[0]).logits, ours(**batches[0]).logits)
    before, after = compress.load(source).state_dict(), ours.state_dict()
    changed = {name.removesuffix(".weight") for name in before if not torch.equal(before[name], after[name])}
    assert changed == {r.name for r in result.record.layers}


def test_conv1d_of_gpt2_is_written_as_codes_that_only_transformers_cannot_read(tmp_path):
    source = save(build("gpt2"), tmp_path / "in")
    result = compress.quantize(source, GPTQ, calibration=tokens(), output=tmp_path / "out", verify=False)
    found = compress.verify(tmp_path / "out")
    assert found["layers"] == 8
    assert "cannot load a Conv1D" in found["transformers"]
    assert any("are Conv1D: run the checkpoint with compress.load" in note for note in result.record.notes)
    compress.export(tmp_path / "out", tmp_path / "dense")
    with torch.no_grad():
        packed = compress.load(tmp_path / "out")(tokens()).logits
        values = compress.load(tmp_path / "out", dequantize=True)(tokens()).logits
        dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")(tokens()).logits
    assert torch.equal(values, dense)
    assert torch.allclose(packed, values, atol=1e-4)


def test_a_model_in_memory_is_written_too(tmp_path):
    model = build("llama", torch.bfloat16)
    result = compress.quantize(model, compress.RTN(group_size=16), output=tmp_path / "out", verify=False)
    assert result.model is model
    loaded = compress.load(tmp_path / "out", dequantize=True)
    for (name, a), b in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_tied_embeddings_stay_tied(tmp_path):
    model = build("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    compress.quantize(save(model, tmp_path / "in"), compress.RTN(group_size=16), output=tmp_path / "out", verify=False)
    assert "lm_head.weight" not in find_source(str(tmp_path / "out")).weights
    loaded = compress.load(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_what_was_not_compressed_is_unchanged_and_companions_come_along(llama, tmp_path):
    source = tmp_path / "in"
    shutil.copytree(llama, source)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "LICENSE.txt").write_text("terms")
    (source / "pytorch_model.bin").write_text("another format")
    compress.quantize(source, compress.RTN(group_size=16), output=tmp_path / "out", verify=False)
    before, after = load_file(source / "model.safetensors"), read_tensors(find_source(str(tmp_path / "out")))
    kept = [name for name, value in after.items() if isinstance(value, torch.Tensor)]
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(kept)
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert set(before) == set(after)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"tokenizer_config.json", "LICENSE.txt", "config.json", "generation_config.json", "compress.json"} <= names
    assert "pytorch_model.bin" not in names
    record = json.loads((tmp_path / "out/compress.json").read_text())
    assert names == {"compress.json", *record["files"]}, "nothing else is there"


def test_the_record_says_what_ran(llama, tmp_path):
    p = compress.GPTQ(scheme="w3a16", group_size=16, **DRIFT_GPTQ)
    compress.quantize(llama, p, calibration=tokens(), output=tmp_path / "out", ignore=["*.down_proj"], verify=False)
    record = json.loads((tmp_path / "out/compress.json").read_text())
    (step,) = record["identity"]["recipe"]["passes"]
    assert step["gptq"]["scheme"] == "w3a16"
    assert step["gptq"]["damp"] == 0.01
    assert record["left_alone"]["model.layers.1.mlp.down_proj"] == "ignored by '*.down_proj'"
    assert record["calibration"]["samples"] == 6
    assert {"loss", "rtn_loss", "damp", "tokens", "sha256"} <= set(record["layers"][0]["figures"])
    assert record["versions"]["torch"] == importlib.metadata.version("torch")


def test_the_record_names_no_folder_of_this_machine(llama, tmp_path, monkeypatch):
    shutil.copytree(llama, tmp_path / "in")
    weights = load_file(tmp_path / "in/model.safetensors")
    save_file({**weights, "unused": torch.zeros(1)}, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    torch.save(tokens(), tmp_path / "calibration.pt")
    words = ["quantize", str(tmp_path / "in"), f"--calibration={tmp_path / 'calibration.pt'}"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/compress", *words, "--output", str(tmp_path / "out")])
    compress.quantize(
        tmp_path / "in",
        GPTQ,
        calibration=str(tmp_path / "calibration.pt"),
        output=tmp_path / "out",
        resume=True,
        verify=False,
    )
    text = (tmp_path / "out/compress.json").read_text()
    assert str(tmp_path) not in text
    record = json.loads(text)
    assert record["command"] == "compress quantize in --calibration=calibration.pt --output out"
    assert (record["model"], record["calibration"]["source"]) == ("in", "calibration.pt")
    assert record["notes"][:2] == [
        "kept dense: no part of LlamaForCausalLM, 1 tensor, 0.0 MB, like unused",
        "no finished block of an earlier run for out: started from the beginning",
    ]


def test_an_existing_output_is_kept_unless_told(llama, tmp_path):
    out = tmp_path / "out"
    compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False)
    before = files(out)
    with pytest.raises(InputError, match="exists"):
        compress.quantize(llama, compress.RTN(scheme="w8a16", group_size=16), output=out, verify=False)
    assert files(out) == before
    compress.quantize(llama, compress.RTN(scheme="w8a16", group_size=16), output=out, overwrite=True, verify=False)
    assert files(out) != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_directory_of_something_else_is_never_replaced(llama, tmp_path):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.txt").write_text("years of work")
    with pytest.raises(InputError, match="not overwritten"):
        compress.quantize(llama, compress.RTN(group_size=16), output=out, overwrite=True, verify=False)
    assert (out / "chapter.txt").read_text() == "years of work"


RUN = """
import sys, torch, compress
sys.path.insert(0, {tests!r})
from commands import DRIFT_GPTQ, StopAfterOne
from models import tokens
from compress.base.progress import Silent
from compress.checkpoint.write.shards import pieces_of

class Kill(Silent):
    def step(self, done, total, what):
        print("step", done, flush=True)
        if done == {stop}:
            import time
            time.sleep(600)

torch.set_num_threads(1)
compress.quantize({model!r}, compress.GPTQ(group_size=16, **DRIFT_GPTQ), calibration=tokens(), batch_size=2,
                  output={out!r}, verify=False, reporter=Kill())
"""


def test_a_killed_run_resumes_to_the_same_files(tmp_path, monkeypatch):
    model = build("llama")
    model = type(model)(type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 4})).eval()
    source, out = save(model, tmp_path / "in"), tmp_path / "out"
    arguments = {"calibration": tokens(), "batch_size": 2, "verify": False}
    compress.quantize(source, GPTQ, output=tmp_path / "whole", **arguments)

    script = RUN.format(tests=str(SUPPORT), model=str(source), out=str(out), stop=2)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.strip() == "step 2":
                os.kill(running.pid, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    assert not out.exists()
    progress = json.loads((tmp_path / "out.partial/progress.json").read_text())
    assert sorted(progress["blocks"]) == ["model.layers.0", "model.layers.1"]
    saved = []
    monkeypatch.setattr(writer, "write_tensors", lambda path, *of: saved.append(path.name) or write_tensors(path, *of))

    with pytest.raises(InputError, match="unfinished run; go on with --resume"):
        compress.quantize(source, GPTQ, output=out, **arguments)
    with pytest.raises(InputError, match="another run"):
        compress.quantize(source, replace(GPTQ, group_size=32), output=out, resume=True, **arguments)
    result = compress.quantize(source, GPTQ, output=out, resume=True, **arguments)
    assert files(out) == files(tmp_path / "whole")
    assert saved == ["block-00002.safetensors", "block-00003.safetensors", "rest-00000.safetensors"], (
        "finished ones, too"
    )
    assert len(result.record.layers) == 28


def test_the_record_of_a_resumed_run_is_that_of_the_whole(llama, tmp_path):
    """But for what it measured of itself, and the forwards that it need not do again."""
    passes = [
        compress.AWQ(rounding="none", group_size=32),
        replace(GPTQ, group_size=32),
        compress.Embeddings(),
        compress.KVCache(granularity="tensor"),
    ]
    common = {"calibration": tokens(), "verify": False}
    compress.quantize(llama, passes, output=tmp_path / "whole", **common)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(llama, passes, output=tmp_path / "out", reporter=StopAfterOne(), **common)
    compress.quantize(llama, passes, output=tmp_path / "out", resume=True, **common)
    whole, resumed = (json.loads((tmp_path / name / "compress.json").read_text()) for name in ("whole", "out"))
    for record in (whole, resumed):
        for key in ("seconds", "spent", "peak_memory_bytes", "block_forwards"):
            del record[key]
        del record["checksums"]["record"]
        for layer in record["layers"]:
            layer["figures"].pop("block_seconds", None)
    assert len(whole["not_folded"]) > 1
    assert resumed["notes"].pop(0).startswith("going on with an earlier run of out")
    assert resumed == whole


def test_a_block_half_written_when_killed_is_written_again(llama, tmp_path):
    def tear():
        torn = tmp_path / "out.partial/blocks/block-00001.safetensors"
        torn.write_bytes((torn.parent / "block-00000.safetensors").read_bytes()[:1000])
        (torn.parent / ".tmpAbCdEf").write_bytes(b"what a killed writer leaves")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress.quantize(
            llama, GPTQ, calibration=tokens(), output=tmp_path / "out", verify=False, reporter=Meanwhile(tear)
        )
    compress.quantize(llama, GPTQ, calibration=tokens(), output=tmp_path / "whole", verify=False)
    compress.quantize(llama, GPTQ, calibration=tokens(), output=tmp_path / "out", resume=True, verify=False)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_rounding_gives_up_a_weight_once_it_has_codes(llama, tmp_path, monkeypatch):
    """Of a block that no data goes through, nobody reads the values again."""
    write, left = writer.Writer.write, {}

    def watched(self, block, opened, layers, finished):
        home = {tensor.data_ptr() for tensor in opened.home.values()}
        left.update({name: layer.weight.data_ptr() in home for name, layer in layers.items()})
        write(self, block, opened, layers, finished)

    monkeypatch.setattr(writer.Writer, "write", watched)
    compress.quantize(llama, compress.RTN(group_size=16), output=tmp_path / "out", verify=False)
    assert len(left) == 14
    assert all(left.values()), "where the model is, no working copy"


def test_a_failure_keeps_finished_blocks_and_names_no_output(llama, tmp_path, monkeypatch):
    def full(path, tensors, buffers):
        if "00001" in path.name:
            raise OSError(28, "No space left on device")
        return write_tensors(path, tensors, buffers)

    monkeypatch.setattr(writer, "write_tensors", full)
    with pytest.raises(CompressError, match=r"(?s)No space left.*--resume") as failure:
        compress.quantize(llama, compress.RTN(group_size=16), output=tmp_path / "out", verify=False)
    assert not isinstance(failure.value, InputError)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    compress.quantize(llama, compress.RTN(group_size=16), output=tmp_path / "out", resume=True, verify=False)
    compress.quantize(llama, compress.RTN(group_size=16), output=tmp_path / "whole", verify=False)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


class Meanwhile(Silent):
    """Does something in the middle of a run."""

    def __init__(self, act):
        self.act = act

    def step(self, done, total, what):
        if done == 1:
            self.act()


def test_a_second_run_on_one_output_ends_at_once_and_names_the_first(llama, tmp_path):
    out, refusals = tmp_path / "out", []

    def again():
        before = {p: p.read_bytes() for p in (tmp_path / "out.partial").rglob("*") if p.is_file()}
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(InputError) as refused:
                compress.quantize("no such model", compress.RTN(scheme="w3a16"), output=out, verify=False, **options)
            refusals.append(str(refused.value))
        assert {p: p.read_bytes() for p in (tmp_path / "out.partial").rglob("*") if p.is_file()} == before

    class FromTheStart(Silent):
        def step(self, done, total, what):
            again()  # before a block is finished, and after

    compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, reporter=FromTheStart())
    assert len(refusals) >= 9
    assert all(f"being written by another run (process {os.getpid()} on " in line for line in refusals)
    compress.quantize(llama, compress.RTN(group_size=16), output=tmp_path / "whole", verify=False)
    assert files(out) == files(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_an_output_that_appears_during_the_run_is_not_replaced(llama, tmp_path):
    out = tmp_path / "out"

    def appear():
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")

    with pytest.raises(CompressError, match="exists"):
        compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, reporter=Meanwhile(appear))
    assert (out / "thesis.txt").read_text() == "years of work"
    shutil.rmtree(out)
    compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, resume=True)
    assert compress.load(out) is not None


def test_a_run_stopped_while_it_names_its_output_resumes(llama, tmp_path, monkeypatch):
    out = tmp_path / "out"
    compress.quantize(llama, compress.RTN(scheme="w8a16", group_size=16), output=out, verify=False)
    before, rename = files(out), Path.rename

    def stop(self, target):
        if Path(target) == out and self.name == "model":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, overwrite=True)
    monkeypatch.undo()
    with pytest.raises(InputError, match="exists"):  # the former output is where it was
        compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, resume=True)
    assert files(out) == before
    compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, resume=True, overwrite=True)
    compress.quantize(llama, compress.RTN(group_size=16), output=tmp_path / "whole", verify=False)
    assert files(out) == files(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_a_former_output_is_never_dropped_for_one_that_is_not_there(llama, tmp_path, monkeypatch):
    out, rename = tmp_path / "out", Path.rename
    compress.quantize(llama, compress.RTN(scheme="w8a16", group_size=16), output=out, verify=False)
    former = files(out)

    def appear(self, target):
        if self.name == "model":
            out.mkdir()
            (out / "thesis.txt").write_text("years of work")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", appear)
    with pytest.raises(CompressError, match="came into being while the former one was set aside"):
        compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, overwrite=True)
    monkeypatch.undo()
    assert files(tmp_path / "out.partial/replaced") == former
    assert (out / "thesis.txt").read_text() == "years of work"
    shutil.rmtree(out)
    with pytest.raises(InputError, match="exists"):
        compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, resume=True)
    assert files(out) == former


def test_a_byte_that_changed_in_a_finished_weight_file_is_found_by_resume(llama, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "in_fresh_process", stop)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(llama, compress.RTN(group_size=16), output=tmp_path / "out")
    path = tmp_path / "out.partial/model/model.safetensors"
    (head,) = (p for p in pieces_of(path) if p.name == "lm_head.weight")  # outside the blocks
    with path.open("r+b") as file:
        file.seek(head.begin)
        file.write(b"x")
    with pytest.raises(CompressError, match=r"lm_head\.weight has changed since it was written"):
        compress.quantize(llama, compress.RTN(group_size=16), output=tmp_path / "out", resume=True, verify=False)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_cleared_away_hides_nothing(llama, tmp_path, monkeypatch):
    """Neither the error of the run, nor a success, nor that the run is over."""
    out = tmp_path / "out"

    def stuck(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", stuck)
    with pytest.raises(InputError, match="nosuch"):
        compress.quantize("nosuch/model", compress.RTN(group_size=16), output=out, verify=False)
    monkeypatch.undo()
    compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False)
    monkeypatch.setattr(shutil, "rmtree", stuck)
    compress.quantize(llama, compress.RTN(scheme="w8a16", group_size=16), output=out, verify=False, overwrite=True)
    monkeypatch.undo()
    made = files(out)
    with pytest.raises(InputError, match="exists"):
        compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False)
    assert files(out) == made
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_links_in_the_place_of_a_working_directory_are_refused(llama, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("years of work")
    for name in ("lock", "blocks", "model", "replaced"):
        (tmp_path / "out.partial").mkdir()
        (tmp_path / "out.partial" / name).symlink_to(victim)
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(InputError, match=f"it holds {name}, which no run left"):
                compress.quantize(llama, compress.RTN(group_size=16), output=tmp_path / "out", verify=False, **options)
        shutil.rmtree(tmp_path / "out.partial")
    assert [p.name for p in victim.iterdir()] == ["thesis.txt"]
    model = Path(shutil.copytree(llama, tmp_path / "out.partial/model"))
    with pytest.raises(InputError, match="where the run would work"):
        compress.quantize(model, compress.RTN(group_size=16), output=tmp_path / "out", overwrite=True)
    assert (model / "config.json").exists()


def test_reasons_survive_a_resume(tmp_path):
    model = build("llama")
    model.model.layers[0].mlp.spare = torch.nn.Linear(32, 32)
    arguments = {"calibration": tokens(), "output": tmp_path / "out"}

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress.quantize(model, GPTQ, **arguments, verify=False, reporter=Meanwhile(interrupt))
    again = build("llama")
    again.model.layers[0].mlp.spare = model.model.layers[0].mlp.spare
    result = compress.quantize(again, GPTQ, **arguments, verify=False, resume=True)
    assert result.record.left_alone["model.layers.0.mlp.spare"] == "never called during calibration"


@pytest.fixture
def damaged(llama, tmp_path):
    """A compressed checkpoint and a function that edits its first block's tensors."""
    out = tmp_path / "out"
    compress.quantize(llama, compress.RTN(group_size=16, grid="asymmetric"), output=out, verify=False)
    path = out / "model.safetensors"

    def edit(change):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        return out

    return edit


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_scale is missing"),
        (lambda t: t.pop(f"{LAYER}.weight_zero_point"), "weight_zero_point is missing"),
        (lambda t: t.pop(f"{LAYER}.weight_shape"), "weight_shape is missing"),
        (
            lambda t: t.update({f"{LAYER}.weight_packed": t[f"{LAYER}.weight_packed"][:, 1:].clone()}),
            "weight_packed has",
        ),
        (
            lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"][1:].clone()}),
            "weight_scale has shape",
        ),
        (lambda t: t[f"{LAYER}.weight_scale"].fill_(float("nan")), "not finite"),
        (lambda t: t.update({f"{LAYER}.weight_packed": t[f"{LAYER}.weight_packed"].float()}), "must be int32"),
        (lambda t: t.pop("model.layers.0.input_layernorm.weight"), "input_layernorm.weight"),
    ],
)
@pytest.mark.parametrize("dequantize", [True, False])
def test_a_damaged_checkpoint_is_refused_naming_the_tensor(damaged, change, message, dequantize):
    with pytest.raises(CheckpointError, match=message):
        compress.load(damaged(change), dequantize=dequantize)


def test_verify_names_any_tensor_that_is_not_what_was_written(llama, tmp_path):
    """Codes, scales of inputs and caches, norms and embeddings; one that is missing or was added."""
    out = tmp_path / "out"
    passes = [compress.RTN(scheme="w8a8", activations="static"), compress.KVCache(granularity="tensor")]
    compress.quantize(llama, passes, calibration=tokens(), output=out, verify=False)
    path, layer = out / "model.safetensors", "model.layers.1.mlp.up_proj"
    before = load_file(path)
    assert compress.verify(out)["layers"] == 14
    changes = {
        f"{layer}.weight": lambda t: t.neg(),
        f"{layer}.input_scale": lambda t: t * 50,
        "model.layers.0.self_attn.k_scale": lambda t: t * 1000,
        "model.norm.weight": torch.zeros_like,
        "model.embed_tokens.weight": torch.rand_like,
    }
    for name, change in changes.items():
        save_file({**before, name: change(before[name])}, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"^{name} is not what the run wrote"):
            compress.verify(out)
    save_file({n: t for n, t in before.items() if n != "model.norm.weight"}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"^model\.norm\.weight is in compress\.json but not in the checkpoint"):
        compress.verify(out)
    save_file({**before, "evil": torch.zeros(1)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"^evil is in the checkpoint but not in compress\.json"):
        compress.verify(out)


def test_a_record_without_checksums_of_tensors_still_has_those_of_layers(damaged):
    def flip(tensors):
        tensors[f"{LAYER}.weight_packed"][0, 0] ^= 1

    out = damaged(flip)
    record = json.loads((out / "compress.json").read_text())
    del record["tensors"], record["checksums"]
    (out / "compress.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=f"{LAYER} does not hold the values"):
        compress.verify(out)


def test_resume_does_not_build_on_a_changed_byte(llama, tmp_path):
    """Neither in a norm, of which no layer has a checksum, nor in what is put together at the end."""

    def stop():
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, reporter=Meanwhile(stop))
    path = tmp_path / "out.partial/blocks/block-00000.safetensors"
    whole = path.read_bytes()
    (norm,) = (p for p in pieces_of(path) if p.name == "model.layers.0.input_layernorm.weight")
    path.write_bytes(whole[: norm.begin] + bytes([whole[norm.begin] ^ 1]) + whole[norm.begin + 1 :])
    with pytest.raises(CheckpointError, match=r"input_layernorm\.weight has changed since it was written"):
        compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, resume=True)
    path.write_bytes(whole)

    def flip():
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))

    class AtTheEnd(Silent):
        def step(self, done, total, what):
            if done == total:
                flip()

    with pytest.raises(CompressError, match="has changed since it was written"):
        compress.quantize(
            llama, compress.RTN(group_size=16), output=out, verify=False, resume=True, reporter=AtTheEnd()
        )
    assert not out.exists()


def test_weight_files_are_one_or_several_of_a_size(llama, tmp_path):
    compress.quantize(llama, compress.RTN(group_size=16), output=tmp_path / "one", verify=False)
    assert [p.name for p in (tmp_path / "one").glob("model*")] == ["model.safetensors"]
    out = tmp_path / "several"
    compress.quantize(llama, compress.RTN(group_size=16), output=out, verify=False, shard_size="10KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    held = {}
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        held |= dict.fromkeys(tensors, path.name)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 10_000
    assert held == index
    count = len(set(index.values()))
    assert count > 2
    assert set(index.values()) == {f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    one = load_file(tmp_path / "one/model.safetensors")
    assert all(torch.equal(one[name], load_file(out / file)[name]) for name, file in index.items())
    theirs, _ = load_with_transformers(find_source(str(out)))
    assert torch.equal(outputs(theirs, probe(96)), outputs(compress.load(out, dequantize=True), probe(96)))

    file = out / f"model-00002-of-{count:05d}.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=rf"{file.name} is damaged"):
        compress.load(out)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"names {file.name}, which is missing"):
        compress.load(out)
