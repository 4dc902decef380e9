"""`compress verify` holds everything in an output to what was written: files, configuration, tensors, the record."""

import json
import os
from pathlib import Path

import pytest
from commands import command, make_llama, save
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import CheckpointError
from compress.checkpoint.files import RECORD, write_whole
from compress.checkpoint.read.source import find_source
from compress.checkpoint.seal import check
from compress.checkpoint.write import late_files
from compress.checkpoint.write.late_files import put_beside
from compress.checkpoint.write.manifest import read_record
from compress.jobs.verify import check_record


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A checkpoint with a tokenizer, generation options, a licence and a chat template. Not to be changed."""
    folder = tmp_path_factory.mktemp("written")
    model = save(make_llama(), folder / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "LICENSE").write_text("do what you like")
    compress.quantize(model, compress.RTN(group_size=32), output=folder / "out", verify=False)
    return folder / "out"


@pytest.fixture
def out(written, copy_of) -> Path:
    return copy_of(written)


def checked(out: Path) -> list[str]:
    """`compress verify` without the model run; returns its remarks."""
    check_record(find_source(str(out)))
    return check(out, read_record(out))


def edited(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def refused(out: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as why:
        checked(out)
    assert all(word in str(why.value) for word in words), why.value


def test_an_output_as_it_was_written_verifies(out):
    assert "remarks" not in compress.verify(out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert checked(out) == []  # it says the same


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 0.5),
        ("rope_parameters", {"rope_theta": 100.0, "rope_type": "default"}),
        ("hidden_act", "relu"),
        ("eos_token_id", 7),
        ("auto_map", {"AutoModelForCausalLM": "own.Own"}),
    ],
)
def test_a_key_of_the_configuration_is_named(out, key, value):
    edited(out / "config.json", **{key: value})
    named = "rope_parameters.rope_theta" if key == "rope_parameters" else key
    refused(out, named, "config.json", "was added" if key == "auto_map" else "was changed")
    outcome = command("verify", out)
    assert outcome.code == 2
    assert outcome.err.startswith(f"compress: {named}")


def test_every_bit_of_a_file_that_is_read_counts(out):
    """Every byte of short files, and some of long ones; one that is gone, and one that was added."""
    names = ["generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"]
    for name in names:
        path = out / name
        whole = path.read_bytes()
        for i in {*range(0, len(whole), max(1, len(whole) // 10)), len(whole) - 1}:
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
            with pytest.raises(CheckpointError, match=f"{name} is not what was written"):
                check(out, read_record(out))
        path.unlink()
        refused(out, name, "is missing")
        path.write_bytes(whole)
    for name in ("own.py", "adapter_config.json", "chat_template.json", "model-extra.safetensors"):
        (out / name).write_text("{}")
        refused(out, name, "was not written with the model")
        (out / name).unlink()
    (out / "additional_chat_templates").mkdir()
    refused(out, "additional_chat_templates")


def test_what_a_weight_file_says_beside_its_tensors_counts(out):
    path = out / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "tf"})
    refused(out, "header of", "model.safetensors")


def test_documents_may_be_edited_and_added_and_that_is_said(out):
    (out / "LICENSE").write_text("ask me")
    (out / "README.md").write_text("my model")
    (out / ".gitattributes").write_text("*.safetensors lfs")
    assert checked(out) == ["LICENSE is not what was written, which nothing reads"]
    outcome = command("verify", out)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == "LICENSE is not what was written, which nothing reads"


def test_an_entry_that_is_gone_from_the_record_does_not_pass(out):
    """A norm is halved and what the record knows of it deleted; a layer's entry, a file's name."""
    path, record = out / "model.safetensors", json.loads((out / RECORD).read_text())
    tensors = load_file(path)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] / 2}, path, metadata={"format": "pt"})
    rest = {name: digest for name, digest in record["tensors"].items() if name != "model.norm.weight"}
    edited(out / RECORD, tensors=rest)
    refused(out, "compress.json is not what compress wrote")
    for key in ("layers", "files", "left_alone"):
        edited(out / RECORD, **{**record, key: type(record[key])()})
        refused(out, "compress.json is not what compress wrote")
    # What our own commands enter into a record does not make it right again.
    put_beside(out, {"evaluation.json": "{}"})
    refused(out, "compress.json is not what compress wrote")


def test_what_our_commands_put_into_an_output_verifies_after_it(out, token_file):
    for words in (["evaluate", out, "--text", token_file], ["report", out, "--card"]):
        outcome = command(*words)
        assert outcome.code == 0, outcome.err
        assert checked(out) == []
    edited(out / "evaluation.json", model="another")
    refused(out, "evaluation.json", "is not what was written")


@pytest.mark.parametrize("point", range(4))
def test_a_command_that_is_killed_leaves_an_output_that_verifies(out, monkeypatch, point):
    """Before any of the writes: of the record, of each of two files, of the record again."""
    put_beside(out, {"evaluation.json": "old"})
    calls = 0

    def write(path: Path, content: str | bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > point:
            raise KeyboardInterrupt
        write_whole(path, content)

    monkeypatch.setattr(late_files, "write_whole", write)
    monkeypatch.setattr("compress.checkpoint.files.write_whole", write)
    with pytest.raises(KeyboardInterrupt):
        put_beside(out, {"evaluation.json": "new", "evaluation.html": "new"})
    monkeypatch.undo()
    assert all("evaluation.html is missing" in remark for remark in checked(out))
    put_beside(out, {"evaluation.json": "new", "evaluation.html": "new"})
    assert checked(out) == []
    assert all(len(sums) == 1 for sums in read_record(out)["checksums"]["files"].values())


def test_an_output_of_an_earlier_version_verifies_and_says_what_was_not_checked(out):
    record = json.loads((out / RECORD).read_text())
    del record["checksums"]
    (out / RECORD).write_text(json.dumps(record))
    (said,) = compress.verify(out)["remarks"]
    assert said.startswith("not checked: the compress.json of an earlier version")
    assert said in command("verify", out).out
    put_beside(out, {"evaluation.json": "{}"})
    assert "checksums" not in read_record(out)
    assert compress.load(out) is not None
    assert os.listdir(out)
