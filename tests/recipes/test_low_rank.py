"""A format and a method that are nobody's here, in one file: written, verified, resumed, loaded, shown, evaluated."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import StopAfterOne, command, last_line
from places import ROOT
from transformers import AutoModelForCausalLM

import compress
from compress.base.errors import CheckpointError
from compress.checkpoint.files import OWN_INDEX, OWN_WHOLE, VARIANT
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.source import find_source
from compress.inference.layers.linear import SumLinear
from compress.passes.protocol.recipe import make_pass
from compress.weights.formats.registry import FORMATS

MODULE, KIND = "somebodys_low_rank", "svd"
LINES = 60


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example, as a module of its own somewhere else; its format is forgotten afterwards."""
    folder = tmp_path / "modules"
    folder.mkdir()
    shutil.copy(ROOT / "recipes" / "low_rank.py", folder / f"{MODULE}.py")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    before = dict(FORMATS)
    FORMATS.pop(KIND, None)
    sys.modules.pop(MODULE, None)
    yield MODULE
    FORMATS.clear()
    FORMATS.update(before)
    sys.modules.pop(MODULE, None)


def test_it_is_a_file_of_sixty_lines() -> None:
    assert len((ROOT / "recipes" / "low_rank.py").read_text(encoding="utf-8").splitlines()) <= LINES


@pytest.mark.usefixtures("registered")
def test_somebody_elses_format_goes_all_the_way(module: str, llama: Path, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["quantize", llama, "--method", f"{module}:LowRankAndCodes", "--set", "rank=4", "--group-size", "32"]
    method = make_pass(f"{module}:LowRankAndCodes", {"rank": 4, "group_size": 32})
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(llama, method, output=out, reporter=StopAfterOne())
    outcome = command(*words, "--output", out, "--resume")
    assert outcome.code == 0, outcome.err
    whole = tmp_path / "whole"
    compress.quantize(llama, method, output=whole, verify=False)
    assert (whole / OWN_WHOLE).read_bytes() == (out / OWN_WHOLE).read_bytes()
    record = json.loads((out / "compress.json").read_text())
    assert record["verification"]["layers"] == len(record["layers"]) == 14
    assert "sums of terms" in record["verification"]["transformers"]
    assert "compressed-tensors cannot express 14 layers" in outcome.err

    stored = stored_in(find_source(str(out)))
    assert {str(layer.scheme) for layer in stored.layers.values()} == {f"w4a16 g32 symmetric + {KIND} rank 4"}
    model = compress.load(out)
    layers = [m for m in model.modules() if isinstance(m, SumLinear)]
    assert len(layers) == 14
    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, SumLinear))
    assert torch.equal(layer.dequantize(), weight_of(find_source(str(out)), name).dequantize())

    shown = command("inspect", out, "--all")
    assert shown.out.count(f"w4a16 g32 symmetric + {KIND} rank 4") == 14
    assert f"{KIND} has no kernel" in command("inspect", out, "--kernels").out
    measured = command("evaluate", out, "--reference", llama, "--text", text_file, "--length", "16", "--json", "-")
    assert measured.code == 0, measured.err
    assert json.loads(measured.out)["texts"][0]["figures"]["kl_mean"]["value"] >= 0

    # transformers alone would go on with random weights, if it found any; with us it computes the same.
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(16)[None]
    theirs = AutoModelForCausalLM.from_pretrained(out, variant=VARIANT, dtype="auto")
    assert torch.equal(theirs(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(compress.load(tmp_path / "saved")(ids).logits, model(ids).logits)
    # Saved over what it was loaded from: the new weights count, not the files of the run beside them.
    again = shutil.copytree(out, tmp_path / "again")
    theirs.lm_head.weight.data.mul_(2)
    theirs.save_pretrained(again)
    assert torch.equal(compress.load(again).lm_head.weight, theirs.lm_head.weight)
    theirs.dequantize()
    theirs.save_pretrained(again)
    assert not any(isinstance(m, SumLinear) for m in compress.load(again).modules())

    # In a process that has not imported the module, what to do is said, and done.
    FORMATS.pop(KIND)
    sys.modules.pop(module)
    find_source(str(out))
    refused = command("verify", out)
    assert refused.code == 2
    assert f"--plugin {module}" in last_line(refused)
    with pytest.raises(CheckpointError, match=f"the format '{KIND}' of the module {MODULE}"):
        compress.load(out)
    assert command("verify", out, "--plugin", module).code == 0
    assert command("verify", out, "--plugin", "no_such_module").code == 2


def test_several_files_have_names_of_their_own_too(module: str, llama: Path, tmp_path: Path) -> None:
    method = make_pass(f"{module}:LowRankAndCodes", {"rank": 4, "group_size": 32})
    compress.quantize(llama, method, output=tmp_path / "out", verify=False, shard_size="60KB")
    names = {path.name for path in (tmp_path / "out").glob("*.safetensors*")}
    assert OWN_INDEX in names
    assert len(names) > 2
    assert all(name.startswith("model.compress-") for name in names - {OWN_INDEX})
    assert any(isinstance(m, SumLinear) for m in compress.load(tmp_path / "out").modules())
