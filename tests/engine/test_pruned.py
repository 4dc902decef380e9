"""A pass that prunes and nothing else: its weights are numbers still, zero for good where its mask says so."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from commands import StopAfterOne, command, fast_gptq
from models import tokens
from pruning import Largest

import compress
from compress.base.errors import InputError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import find_source
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Decide, Stage
from compress.weights.decision import Decision
from compress.weights.grid import Grid
from compress.weights.rounding import ActivationCodes


def test_pruned_layers_are_written_as_the_numbers_that_they_are(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = compress.quantize(llama, Largest(), output=out, ignore=["*.o_proj"], verify=False)
    assert any("12 layers are stored dense: a zero takes as much space" in note for note in result.record.notes)
    assert compress.verify(out)["transformers"] == "compared"
    source, original = find_source(str(out)), find_source(str(llama))
    assert source.quantization is None
    assert not stored_in(source).layers
    assert source.headers.keys() == original.headers.keys()
    weight, before = (s.weights.tensor("model.layers.0.mlp.up_proj.weight") for s in (source, original))
    zero = weight == 0
    assert 0.45 < zero.float().mean() < 0.55
    assert torch.equal(weight[~zero], before[~zero])
    record = json.loads((out / "compress.json").read_text())
    assert {layer["method"] for layer in record["layers"]} == {"largest"}
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(llama, Largest(), output=tmp_path / "twice", ignore=["*.o_proj"], reporter=StopAfterOne())
    compress.quantize(llama, Largest(), output=tmp_path / "twice", ignore=["*.o_proj"], resume=True, verify=False)
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_what_comes_after_it_keeps_its_zeros(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    passes = [Largest(), fast_gptq(scheme="w4a16", group_size=32)]
    compress.quantize(llama, passes, calibration=tokens(16, 16), output=out, verify=False)
    model = compress.load(out, dequantize=True)
    weight = model.get_submodule("model.layers.1.mlp.down_proj").weight
    assert 0.45 < (weight == 0).float().mean() < 0.75  # and what 4 bits make zero
    dense_model = compress.load(llama)
    pruned = dense_model.get_submodule("model.layers.1.mlp.down_proj").weight
    lost = pruned.abs() <= pruned.abs().median(1, keepdim=True).values
    assert not weight[lost].any()


@dataclass(frozen=True, kw_only=True)
class Rounding(Largest):
    """Prunes, and rounds inputs as well."""

    name: ClassVar[str] = "rounding"
    keeps_zeros: ClassVar[bool] = True

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Decide(self.needs(), self.apply, rounds_inputs=True),)

    def apply(self, site: Site) -> dict[str, Decision]:
        codes = ActivationCodes(Grid(bits=8, granularity="token"))
        return {name: replace(decision, inputs=codes) for name, decision in super().apply(site).items()}


def test_what_rounds_the_input_of_a_pruned_layer_is_in_the_checkpoint_and_last(llama: Path, tmp_path: Path) -> None:
    made = compress.quantize(llama, Rounding())
    compress.quantize(llama, Rounding(), output=tmp_path / "out", verify=False)
    ids = tokens(1, 8)
    torch.testing.assert_close(compress.load(tmp_path / "out")(ids).logits, made.model(ids).logits)
    with pytest.raises(InputError, match=r"'rounding' rounds the input or output of .* leave that to the last pass"):
        compress.quantize(llama, [Rounding(), compress.RTN(group_size=32)])


@pytest.mark.parametrize(
    "words",
    [("magnitude", "--pattern", "2:4"), ("taylor", "--sparsity", 0.75), ("sparsegpt", "--pattern", "2:4")],
    ids=lambda words: words[0],
)
def test_the_command_line_writes_a_plain_checkpoint_with_zeros_and_shows_them(
    words: tuple[object, ...], llama: Path, token_file: Path, tmp_path: Path
) -> None:
    out, (method, _, share) = tmp_path / "out", words
    data = [] if method == "magnitude" else ["--calibration", token_file]
    outcome = command("prune", llama, "--method", *words, *data, "--output", out)
    assert outcome.code == 0, outcome
    zero = "75.0%" if share == 0.75 else "50.0%"
    assert f"zero for good: {zero} of" in outcome.out
    assert ("2:4 in every layer" in outcome.out) == (share == "2:4")
    assert compress.verify(out)["transformers"] == "compared"
    rows = {row["name"]: row["remark"] for row in command("inspect", out, "--json", "-").json()["layers"]}
    said = "(75% zero), stored dense" if share == 0.75 else "(50% zero, 2:4), stored dense"
    assert rows["model.layers.1.mlp.up_proj.weight"].startswith(f"{method} {said}")
    assert find_source(str(out)).quantization is None
    source = find_source(str(out))
    layers = [source.weights.tensor(name) for name in rows if "proj" in name]
    assert len(layers) == 14
    for weight in layers:
        if share == "2:4":
            assert torch.all((weight.view(len(weight), -1, 4) != 0).sum(-1) <= 2)
        else:
            assert torch.all((weight != 0).sum(1) <= weight.shape[1] // 4)


@pytest.mark.full
def test_sparsegpt_then_gptq_are_stopped_resumed_and_loaded_with_their_zeros(llama: Path, tmp_path: Path) -> None:
    passes = [compress.SparseGPT(pattern="2:4"), fast_gptq(scheme="w4a16", group_size=32)]
    how = {"calibration": tokens(16, 16), "verify": False}
    whole = compress.quantize(llama, passes, output=tmp_path / "whole", **how)
    assert {(r.method, r.figures["pattern"]) for r in whole.record.layers} == {("sparsegpt", "2:4"), ("gptq", "2:4")}
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(llama, passes, output=tmp_path / "out", reporter=StopAfterOne(), **how)
    compress.quantize(llama, passes, output=tmp_path / "out", resume=True, **how)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert files[0] == files[1]
    assert compress.verify(tmp_path / "out")["transformers"] == "compared"
    model = compress.load(tmp_path / "out", dequantize=True)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            assert torch.all((parameter.view(len(parameter), -1, 4) != 0).sum(-1) <= 2)
