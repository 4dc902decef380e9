"""An exporter of somebody else's: one file, one line; what it does not write itself is done for it."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
from checkpoints import LAYOUTS
from commands import command, last_line
from safetensors.torch import load_file

import compress
from compress.base.errors import CheckpointError, CompressError
from compress.checkpoint import seal
from compress.checkpoint.export.registry import EXPORTERS
from compress.checkpoint.files import RECORD, checksum
from compress.checkpoint.write.directory import Directory
from compress.checkpoint.write.manifest import read_record

# A layout unlike those of the package: other files, other names of tensors, no config.json, no tokenizer.
TOY = '''
"""All weights of compressed layers, one after the other, in one file."""

import numpy
import torch
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.registry import EXPORTERS
from compress.checkpoint.read.compressed_layers import stored_in, weight_of

EXPORTERS["toy"] = "toy_export:Toy"


class Toy(Exporter):
    about = "raw float32"
    kind = "raw"
    smaller = False
    companions = ("tokenizer_config.json",)
    fail = None

    def why_not(self, checkpoint):
        wide = [name for name, layer in stored_in(checkpoint).layers.items() if layer.shape[1] != 64]
        return [f"{name} does not read 64 channels" for name in wide]

    def write(self, checkpoint, place):
        names = sorted(stored_in(checkpoint).layers)
        place.note("the head is left out")
        with place.file("weights.raw").open("wb") as file:
            for i, name in enumerate(names, 1):
                file.write(weight_of(checkpoint, name).dequantize().float().numpy().tobytes())
                place.step(i, len(names), name)
        place.text("head.txt", "left out")
        if Toy.fail is not None:
            raise Toy.fail
        place.json("layout.json", {name: [*stored_in(checkpoint).layers[name].shape] for name in names})
        return Written(len(names), {"toy": 1})
'''
FILES = {"weights.raw", "head.txt", "layout.json", "tokenizer_config.json", "LICENSE", RECORD}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The module of the exporter, which adds its line when it is imported; the line goes with the test."""
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "toy_export.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path / "plugin")
    monkeypatch.setitem(EXPORTERS, "toy", "")
    monkeypatch.delitem(sys.modules, "toy_export", raising=False)
    return import_module("toy_export")


@pytest.fixture
def licensed(llama_w4, copy_of) -> Path:
    model = copy_of(llama_w4)
    (model / "LICENSE").write_text("as it pleases you")
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_safetensors_files_comes_in_shards_of_a_size(layout, llama, tmp_path):
    """Three or more, here, with the tensors of one file, and an index that says where each is."""
    compress.quantize(llama, LAYOUTS[layout], output=tmp_path / "out", verify=False, ignore=["*.down_proj"])
    whole = compress.export(tmp_path / "out", tmp_path / "whole", layout).output
    outcome = command("export", tmp_path / "out", "--to", layout, "--output", tmp_path / "cut", "--shard-size", "60KB")
    assert outcome.code == 0, outcome.err
    (index,) = (tmp_path / "cut").glob("*.index*.json")
    places = json.loads(index.read_text())["weight_map"]
    held = {path.name: load_file(path) for path in (tmp_path / "cut").glob("*.safetensors")}
    (one,) = (load_file(path) for path in whole.glob("*.safetensors"))
    assert len(held) >= 3
    assert places.keys() == one.keys()
    assert all(checksum(held[file][name]) == checksum(one[name]) for name, file in places.items())
    compress.load(tmp_path / "cut")


def test_a_layout_of_its_own_is_written_sealed_and_replaced(toy, licensed, tmp_path):
    target = tmp_path / "out"
    words = ["export", licensed, "--to", "toy", "--plugin", "toy_export", "--output", target]
    done = command(*words)
    assert done.code == 0, done.err
    assert "note: the head is left out" in done.err
    assert done.out.endswith("12 layers raw\n")
    assert {path.name for path in target.iterdir()} == FILES
    dense = load_file(compress.export(licensed, tmp_path / "dense").output / "model.safetensors")
    layout = json.loads((target / "layout.json").read_text())
    raw = (target / "weights.raw").read_bytes()
    assert raw == b"".join(dense[f"{name}.weight"].float().numpy().tobytes() for name in sorted(layout))
    record = read_record(target)
    assert (record["toy"], record["identity"]["export"], record["notes"]) == (1, "raw", ["the head is left out"])
    assert {RECORD, *record["files"]} == FILES
    seal.check(target, record)
    (target / "weights.raw").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"weights\.raw is not what was written"):
        seal.check(target, record)
    assert command(*words).code == 2
    assert command(*words, "--overwrite", "--json", tmp_path / "made.json").code == 0
    assert (target / "weights.raw").read_bytes() == raw
    assert json.loads((tmp_path / "made.json").read_text())["bytes"] == len(raw)
    (target / "mine.raw").write_bytes(b"x")
    assert "holds mine.raw, which no run wrote" in last_line(command(*words, "--overwrite"))


def test_reasons_against_it_are_listed_and_refuse_it(toy, llama, llama_w4, tmp_path):
    compress.quantize(llama, compress.RTN(scheme="w4a16", group_size=32), output=tmp_path / "all", verify=False)
    listed = {}
    for model in (llama_w4, tmp_path / "all"):
        found = command("export", model, "--list", "--plugin", "toy_export", "--json", "-").json()
        assert (found["model"], [*found["exports"][0]]) == (str(model), ["name", "about", "why_not"])
        listed[model] = {each["name"]: each["why_not"] for each in found["exports"]}
        assert listed[model].keys() == EXPORTERS.keys()
        assert listed[model]["dense"] == []
    assert listed[llama_w4]["toy"] == []
    reasons = listed[tmp_path / "all"]["toy"]
    assert reasons[0] == "model.layers.0.mlp.down_proj does not read 64 channels"
    refused = command("export", tmp_path / "all", "--to", "toy", "--output", tmp_path / "out")
    assert refused.code == 2
    assert f"{tmp_path / 'all'} cannot be exported as raw: {'; '.join(reasons)}" in last_line(refused)
    assert not (tmp_path / "out").exists()
    table = command("export", tmp_path / "all", "--list").out
    assert [line for line in table.splitlines() if " toy " in line and "no: model.layers.0.mlp.down_proj" in line]


def test_nothing_is_left_of_one_that_fails_or_was_killed(toy, licensed, tmp_path, monkeypatch):
    target = tmp_path / "out"
    before = {path.name for path in tmp_path.iterdir()}
    toy.Toy.fail = OSError(28, os.strerror(28))
    with pytest.raises(CompressError, match=r"cannot write .*out: .*No space left"):
        compress.export(licensed, target, "toy")
    assert {path.name for path in tmp_path.iterdir()} == before
    toy.Toy.fail = KeyboardInterrupt()
    with monkeypatch.context() as killed:
        killed.setattr(Directory, "release", lambda self: self._lock.close())  # as the kernel does
        with pytest.raises(KeyboardInterrupt):
            compress.export(licensed, target, toy.Toy())
    left = target.with_name("out.partial")
    assert (left / "model" / "weights.raw").exists()
    (left / "model" / "mine.raw").write_bytes(b"x")
    toy.Toy.fail = None
    with pytest.raises(CompressError, match=r"in the way: it holds model.mine\.raw, which no run left"):
        compress.export(licensed, target, "toy")
    (left / "model" / "mine.raw").unlink()
    compress.export(licensed, target, "toy")
    assert {path.name for path in target.iterdir()} == FILES
    assert not left.exists()
