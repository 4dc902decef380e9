"""Files beside the weights come along with every output: what transformers reads, and what may be."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from commands import command, last_line
from transformers import utils

import compress
from compress.base.errors import CheckpointError
from compress.base.regular_files import lies_in
from compress.checkpoint import seal
from compress.checkpoint.export.gguf.tokenizer import keys_of
from compress.checkpoint.leftovers import of_checkpoint
from compress.checkpoint.write.directory import stranger_in
from compress.checkpoint.write.manifest import read_record
from compress.evaluation.push import push

RTN = ("--method", "rtn", "--group-size", "32", "--no-verify")
NAMED = {"default": "{{ messages[0].content }}", "tool_use": "TOOLS {{ messages[0].content }}"}
CARRIED = {
    "additional_chat_templates/tool_use.jinja": None,  # of the tokenizer
    "custom_generate/generate.py": "def generate(model, *args, **kwargs): ...",
    "normalizer.json": "{}",
    "source.spm": "pieces",
    "terms.cfg": "read by code of the model",
    "modules.json": json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Normalize"}]),
    "1_Pooling/config.json": "{}",
}
LEFT = {
    "onnx/model.onnx": "another format",
    "pytorch_model.bin": "another format",
    "params.json": "{}",
    ".gitattributes": "",
    "README.md": "# of the original",
    "evaluation.json": json.dumps({"format": 1, "model": "", "texts": [], "provenance": {}}),
}


@pytest.fixture
def model(llama: Path, copy_of) -> Path:
    folder = copy_of(llama)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = NAMED
    tokenizer.save_pretrained(folder)
    for name, text in {**CARRIED, **LEFT}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if text is not None:
            (folder / name).write_text(text)
    return folder


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def names_in_transformers() -> Iterator[str]:
    """Names of files that transformers reads beside the weights."""
    for file in Path(transformers.__file__).parent.rglob("tokenization_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Name) and target.id.lower() == "vocab_files_names":
                yield from (v.value for v in getattr(node.value, "values", ()) if isinstance(v, ast.Constant))
    yield from (
        utils.CHAT_TEMPLATE_FILE,
        f"{utils.CHAT_TEMPLATE_DIR}/x.jinja",
        utils.LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
    )
    for name in ("FEATURE_EXTRACTOR", "IMAGE_PROCESSOR", "VIDEO_PROCESSOR", "AUDIO_TOKENIZER", "PROCESSOR"):
        yield getattr(utils, f"{name}_NAME", "processor_config.json")
    yield utils.GENERATION_CONFIG_NAME


def test_every_name_that_transformers_reads_is_known():
    found = {*names_in_transformers()}
    assert len(found) > 20
    assert [name for name in sorted(found) if not of_checkpoint(name)] == []


def test_all_but_other_weights_come_along_with_every_output(model, tmp_path):
    done = command("quantize", model, *RTN, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    record = read_record(tmp_path / "out")
    for out in (tmp_path / "out", compress.export(tmp_path / "out", tmp_path / "dense").output):
        files = files_of(out)
        assert files >= {*CARRIED, "config.json", "tokenizer.json", "chat_template.jinja"}
        assert not files & {*LEFT}
        assert files == {*read_record(out)["files"], "compress.json"}
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        asked = {"chat_template": "tool_use", "tokenize": False}
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], **asked) == "TOOLS x"
        seal.check(out, read_record(out))
        assert stranger_in(out) is None
        assert not push(out, "me/model", dry_run=True).left
    (known,) = (note for note in record["notes"] if "does not know" in note)
    assert known.endswith(": 1_Pooling/config.json, modules.json, terms.cfg")
    assert "not copied from the model's folder: onnx/, params.json, pytorch_model.bin" in done.err


def test_a_folder_in_an_output_is_sealed_and_replaced_like_its_files(model, tmp_path):
    words, out = ("quantize", model, *RTN, "--output", tmp_path / "out"), tmp_path / "out"
    assert command(*words).code == 0
    mine = out / "additional_chat_templates/mine.jinja"
    mine.write_text("of somebody else")
    with pytest.raises(CheckpointError, match=r"mine\.jinja was not written with the model"):
        seal.check(out, read_record(out))
    assert "holds additional_chat_templates/mine.jinja, which no run wrote" in last_line(command(*words, "--overwrite"))
    mine.unlink()
    assert command(*words, "--overwrite").code == 0
    (out / "custom_generate/generate.py").write_text("import os")
    with pytest.raises(CheckpointError, match=r"custom_generate/generate\.py is not what was written"):
        seal.check(out, read_record(out))


def test_what_a_killed_run_has_copied_is_known_as_ours(model, tmp_path, monkeypatch):
    def killed(*_args: object) -> None:
        raise KeyboardInterrupt

    words = ("quantize", model, *RTN, "--output", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("compress.checkpoint.write.join.seal", killed)
        assert command(*words).code == 130
    for name in ("terms.cfg", "custom_generate/generate.py"):
        assert (tmp_path / "out.partial/model" / name).is_file()
        (model / name).unlink()
    done = command(*words, "--resume")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == {*read_record(tmp_path / "out")["files"], "compress.json"}
    assert not (tmp_path / "out.partial").exists()


def test_a_module_with_weights_leaves_the_list_of_modules_behind(model, tmp_path):
    (model / "1_Pooling/model.safetensors").write_text("weights")
    done = command("quantize", model, *RTN, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    assert not files_of(tmp_path / "out") & {"modules.json", "1_Pooling/config.json"}
    assert "1_Pooling/, onnx/, params.json, pytorch_model.bin, modules.json" in done.err


def test_an_unknown_file_that_cannot_be_read_stays_behind(model, tmp_path, monkeypatch):
    (model / "notes.cfg").write_text("mine")
    monkeypatch.setattr("compress.checkpoint.companions.os.access", lambda path, mode: path.name != "notes.cfg")
    done = command("quantize", model, *RTN, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    assert "notes.cfg" not in files_of(tmp_path / "out")
    assert "notes.cfg" in done.err


def test_links_out_of_the_folder_are_named_and_give_nothing_away(model, tmp_path):
    """Those of the hub's cache lead to its blobs, and are copied."""
    snapshot, blobs = tmp_path / "models--me--x/snapshots/0123", tmp_path / "models--me--x/blobs"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    private = tmp_path / "private"
    private.mkdir()
    (private / "secret.jinja").write_text("secret")
    blobs.mkdir()
    (blobs / "ab").write_text("mine")
    (snapshot / "NOTICE").symlink_to("../../blobs/ab")
    (snapshot / "alias.cfg").symlink_to("terms.cfg")
    (snapshot / "part").mkdir()
    (snapshot / "part/LICENSE").symlink_to("../../../blobs/ab")
    assert lies_in(snapshot / "part/LICENSE", snapshot / "part")  # a model in a folder of a repository
    for name in ("LICENSE", "unknown.txt", "1_Pooling/more.txt", "additional_chat_templates/x.jinja"):
        (snapshot / name).symlink_to(private / "secret.jinja")
    (snapshot / "custom_generate/generate.py").unlink()
    (snapshot / "custom_generate").rmdir()
    (snapshot / "custom_generate").symlink_to(private)
    out = tmp_path / "out"
    done = command("quantize", snapshot, *RTN, "--output", out)
    assert done.code == 0, done.err
    assert (out / "NOTICE").read_text() == "mine"
    assert {"alias.cfg", "terms.cfg"} <= files_of(out)
    assert not [name for name in files_of(out) if (out / name).read_bytes() == b"secret"]
    said = "links lead out of the model's folder: LICENSE, additional_chat_templates/x.jinja, custom_generate"
    assert said in done.err
    assert said in " ".join(read_record(out)["notes"])
    gguf = last_line(command("export", snapshot, "--to", "gguf", "--output", tmp_path / "gguf"))
    assert "its x.jinja is a link out of its folder" in gguf
    (out / "README.md").unlink(missing_ok=True)
    (out / "README.md").symlink_to(private / "secret.jinja")
    with pytest.raises(CheckpointError, match=r"README\.md is, or links to, a file outside of"):
        push(out, "me/model", dry_run=True)


def test_gguf_names_the_templates_as_llama_cpp_does(model):
    keys = keys_of(model, 2048)
    assert (keys["chat_template"], keys["chat_template.tool_use"]) == (NAMED["default"], NAMED["tool_use"])
    assert keys["chat_templates"] == ["tool_use"]
