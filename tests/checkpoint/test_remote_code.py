"""Python code that comes with a model: never run unasked, and with --trust-remote-code a model like any other."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from commands import command, configured

import compress
from compress.base.errors import InputError
from compress.inference.layers.linear import QuantLinear

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).write_text("run")


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
OWN = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
# What of a model is code of its own: {file: what changes in it}.
KINDS = {
    "configuration": {"config.json": {"model_type": "own-llama", "architectures": ["OwnModel"], "auto_map": OWN}},
    "model": {"config.json": {"architectures": ["OwnModel"], "auto_map": {"AutoModelForCausalLM": "own.OwnModel"}}},
    "tokenizer": {
        "tokenizer_config.json": {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
        }
    },
}
FLAG = "--trust-remote-code"


def with_code(llama: Path, here: Path, kind: str) -> tuple[Path, Path]:
    """A copy of the model that needs its own code, and the file that the code writes when it is run."""
    model, marker = Path(shutil.copytree(llama, here / "model")), here / "marker"
    (model / "own.py").write_text(CODE.format(marker=str(marker)))
    for name, changes in KINDS[kind].items():
        configured(**changes)(model / name)
    return model, marker


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody answers yes to every question, and what transformers copies stays in the test's directory."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize("kind", KINDS)
def test_code_of_a_model_is_not_run_and_the_refusal_names_the_flag(llama: Path, tmp_path: Path, kind: str) -> None:
    model, marker = with_code(llama, tmp_path, kind)
    out = tmp_path / "out"
    for words in (
        ["quantize", model, "--group-size", 32, "--calibration", "demo", "--output", out],
        ["evaluate", model, "--text", "demo"],
        ["generate", model, "--prompt", "a"],
    ):
        outcome = command(*words)
        assert outcome.code == 2, outcome
        assert f"the {kind} of {model} is Python code of its own (own.Own" in outcome.err.splitlines()[-1]
        assert FLAG in outcome.err.splitlines()[-1]
    assert not marker.exists()
    assert not out.exists()


def test_a_trusted_model_is_like_any_other(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers reads packed weights with it")
    model, marker = with_code(llama, tmp_path, "configuration")
    configured(**KINDS["tokenizer"]["tokenizer_config.json"])(model / "tokenizer_config.json")
    out = tmp_path / "out"
    words = ["--method", "rtn", "--group-size", 32, "--output", out, FLAG]
    outcome = command("quantize", model, *words)
    assert outcome.code == 0, outcome
    assert outcome.err.startswith("warning: Python code that comes with the model is run")
    assert marker.read_text() == "run"
    assert json.loads((out / "compress.json").read_text())["verification"]["transformers"] == "compared"
    assert json.loads((out / "config.json").read_text())["auto_map"] == OWN

    loaded = compress.load(out, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnModel"
    assert any(isinstance(module, QuantLinear) for module in loaded.modules())
    for words in (
        ["evaluate", out, "--reference", model, "--text", "demo", "--samples", 2],
        ["generate", out, "--prompt", "a", "--tokens", 2],
        ["inspect", out, "--kernels"],
        ["verify", out],
        ["export", out, "--list"],
        ["export", out, "--to", "dense", "--output", tmp_path / "dense", "--overwrite"],
    ):
        trusted = command(*words, FLAG)
        assert trusted.code == 0, trusted
        refused = command(*words)
        assert refused.code == 2, refused
        assert FLAG in refused.err
    assert type(compress.load(tmp_path / "dense", trust_remote_code=True)).__name__ == "OwnModel"
    words = ["--method", "rtn", "--for", "gptqmodel", "--output", tmp_path / "gptq", "--no-verify", FLAG]
    assert command("quantize", model, *words).code == 0
    for call in (lambda: compress.load(out), lambda: compress.verify(out), lambda: compress.evaluate(out)):
        with pytest.raises(InputError, match=FLAG):
            call()


def test_a_shape_has_no_code() -> None:
    outcome = command("bench", "tiny", "--quiet", FLAG)
    assert (outcome.code, outcome.err) == (2, f"compress: {FLAG} is for a checkpoint; tiny is a shape: drop it\n")


def test_fit_runs_code_that_is_trusted_and_no_other(llama: Path, tmp_path: Path) -> None:
    model, marker = with_code(llama, tmp_path, "configuration")
    data = ["--calibration", "demo", "--samples", 12, "--length", 32]
    words = ["fit", model, "--size", "1KB", *data, "--output", tmp_path / "out"]
    refused = command(*words)
    assert (refused.code, marker.exists()) == (2, False)
    assert FLAG in refused.err.splitlines()[-1]
    too_small = command(*words, FLAG)
    assert "the smallest recipe takes" in too_small.err.splitlines()[-1]
    assert marker.exists()
