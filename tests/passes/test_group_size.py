"""The group size where none is asked for: every model has one, the run says which, and the record holds it."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from combinations import each, every
from commands import PLAIN_GPTQ, StopAfterOne, command, make_llama, save
from models import tokens
from torch import nn
from transformers import AlbertConfig, AlbertModel

import compress
from compress.base.errors import InputError
from compress.engine.plan.format_limits import check_halved
from compress.engine.plan.plan import plan
from compress.inference.layers.linear import QuantLinear
from compress.kernels.cpu.gemm import why_not_sizes
from compress.passes.protocol.base import Pass
from compress.weights.grid import quantize, suggest_groups, usual_group


def chain(*widths: int) -> nn.Module:
    """Linear layers from each width to the next."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


METHODS = [
    compress.GPTQ(**PLAIN_GPTQ),
    compress.AWQ(),
    compress.SmoothQuant(scheme="w4a8"),
    compress.only(compress.GPTQ(**PLAIN_GPTQ), "*"),
]
# Inputs of the layers -> what they share scales in (None: one scale per output channel), and what the run says.
SIZES = {
    (128, 256): ([128, 128], None),
    (576, 1536): ([64, 64], "groups of 64 instead of groups of 128: 0 has 576 inputs; --group-size gives another"),
    (240, 240): ([None, None], "one scale per output channel instead of groups of 128: 0 has 240 inputs"),
    (320, 240): ([64, None], "no group size of 128, 64, 32 divides the inputs of all layers (0 has 320 inputs)"),
    (288, 128): ([32, 32], "0 has 288 inputs"),
    (64, 96): ([32, 32], "groups of 32 instead"),
    (60, 100): ([None, None], "many times slower for few tokens: --group-size 20 is nearer to the original"),
    (128, 27, 15, 134): (
        [128, None, None, None],
        "no group size of 128, 64, 32 divides the inputs of all layers (1 has 27",
    ),
    (15, 15): ([None, None], "one scale per output channel instead of groups of 128: 0 has 15 inputs"),
}


@every(("widths", "other"), each(list(SIZES), METHODS))
def test_every_model_has_a_group_size_and_the_run_says_which(widths: tuple[int, ...], other: Pass) -> None:
    sizes, said = SIZES[widths]
    x = torch.randn(40, widths[0], generator=torch.Generator().manual_seed(1))
    for method in (compress.RTN(), other)[: 1 if max(widths) > 1000 else 2]:
        made = compress.quantize(chain(*widths, 8), method, calibration=[{"input": x}]).record
        assert [layer.group_size for layer in made.layers] == sizes, method
        about_groups = [note for note in made.notes if "--group-size" in note]
        assert len(about_groups) == (said is not None)
        assert said is None or said in about_groups[0]
    model, original = chain(*widths, 8), chain(*widths, 8)
    compress.quantize(model, compress.RTN())
    for layer, before, size in zip(model, original, sizes, strict=True):
        grid = compress.RTN(group_size=size or -1).weight_grid()
        assert torch.equal(layer.weight, quantize(before.weight.detach(), grid).dequantize())


# Inputs of the layers -> what built-in recipes of groups of 64 and of 32 make of them, and what the run says of 64.
SMALLER = {
    (576, 128): ([64, 64], [32, 32], None),
    (96, 160): (
        [32, 32],
        [32, 32],
        "groups of 32 instead of groups of 64: 0 has 96 inputs; --group-size gives another",
    ),
    (64, 100): ([64, None], [32, None], "no group size of 64, 32 divides the inputs of all layers (1 has 100 inputs)"),
    (240, 240): ([None] * 2, [None] * 2, "per output channel instead of groups of 64: 0 has 240 inputs; groups of oth"),
}


@pytest.mark.parametrize("widths", SMALLER)
def test_a_built_in_recipe_of_smaller_groups_falls_back_as_the_usual_ones_do(widths: tuple[int, ...]) -> None:
    of_64, of_32, said = SMALLER[widths]
    x = torch.randn(40, widths[0], generator=torch.Generator().manual_seed(1))
    for name, sizes in (("w3a16-gptq", of_64), ("w2a16-reconstruct", of_32)):
        (recipe, *_) = compress.load_recipe(name)
        method = replace(recipe, **PLAIN_GPTQ)
        made = compress.quantize(chain(*widths, 8), method, calibration=[{"input": x}]).record
        assert [layer.group_size for layer in made.layers] == sizes
        about_groups = [note for note in made.notes if "--group-size" in note]
        if name == "w3a16-gptq":
            assert len(about_groups) == (said is not None)
            assert said is None or said in about_groups[0]
    if widths == (240, 240):
        assert "--group-size 30 is nearer" in about_groups[0]  # of 32 at most


def test_a_size_that_is_asked_for_stays_an_error_where_it_does_not_divide() -> None:
    for size in (128, 100, 7):
        with pytest.raises(InputError, match=f"group size {size} does not divide .* inputs of 0"):
            compress.quantize(chain(96, 96), compress.RTN(group_size=size))


def test_each_pass_of_a_recipe_has_its_own_size_and_the_plan_states_it() -> None:
    def sizes(*passes: Pass) -> list[int]:
        return [p.group_size for p in plan(chain(80, 128, 160, 8), passes).recipe]

    halves = [compress.only(compress.RTN(), "0"), compress.but(compress.RTN(scheme="w3a16"), "0")]
    assert sizes(*halves) == [-1, 32]
    assert sizes(compress.RTN()) == [0]  # of each layer its own
    assert sizes(compress.RTN(scheme="w8a8")) == sizes(compress.RTN(per_tensor=True)) == [-1]
    # Asking again, for the layers of one site, changes nothing that is settled.
    (settled,) = plan(chain(96, 128), [compress.RTN()]).recipe
    assert settled.fitted({7}) is settled


def test_layers_with_sizes_of_their_own_can_be_stored_without_their_zeros() -> None:
    steps = [compress.Magnitude(pattern="2:4", store="2:4"), compress.RTN()]
    made = plan(chain(64, 100, 8), steps)
    assert made.recipe[1].group_size == 0
    check_halved(made, made.halved)


def test_a_layer_alone_has_the_usual_group_too() -> None:
    for inputs, size in ((256, 128), (576, 64), (240, None), (15, None)):
        assert QuantLinear.from_linear(nn.Linear(inputs, 8), "w4a16").scheme.weights.group_size == size


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_the_command_line_needs_no_group_size_and_the_record_states_it(
    llama: Path, token_file: Path, tmp_path: Path, method: str
) -> None:
    words = ["quantize", llama, "--method", method, "--calibration", token_file]
    asked = command(*words, "--group-size", 32, "--output", tmp_path / "asked")
    found = command(*words, "--output", tmp_path / "found")
    assert (asked.code, found.code) == (0, 0), found
    note = "groups of 32 instead of groups of 128: model.layers.0.self_attn.q_proj has 64 inputs"
    assert f"note: {note}" in found.err.split("quantize: 0/2")[0]  # before the work
    assert note not in asked.err
    records = [json.loads((tmp_path / name / "compress.json").read_text()) for name in ("asked", "found")]
    (step,) = records[1]["identity"]["recipe"]["passes"]
    assert step[method]["group_size"] == 32
    assert records[0]["identity"] == records[1]["identity"]
    assert any(note in kept for kept in records[1]["notes"])


def test_a_run_with_the_usual_size_resumes(tmp_path: Path, token_file: Path) -> None:
    model = save(make_llama(intermediate_size=100).half(), tmp_path / "model")  # 64 and 100: no size divides both
    method = replace(compress.GPTQ(**PLAIN_GPTQ), scheme="w3a16")
    ids = torch.load(token_file, weights_only=True)

    def run(name: str, **more: object) -> compress.Result:
        return compress.quantize(model, method, calibration=ids, output=tmp_path / name, verify=False, **more)

    with pytest.raises(KeyboardInterrupt):
        run("stopped", reporter=StopAfterOne())
    resumed = run("stopped", resume=True)
    run("whole")
    assert {layer.shape[1]: layer.group_size for layer in resumed.record.layers} == {64: 64, 100: None}
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert (tmp_path / "stopped" / file.name).read_bytes() == file.read_bytes()
    assert compress.verify(tmp_path / "stopped")["transformers"] == "compared"


def test_a_model_whose_blocks_form_no_chain_is_recorded_with_the_size_it_gets(tmp_path: Path) -> None:
    """As one block it has one more layer, of 16 inputs."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = AlbertModel(AlbertConfig(vocab_size=96, embedding_size=16, num_hidden_layers=2, **sizes)).eval()
    method, output = compress.GPTQ(**PLAIN_GPTQ), tmp_path / "out"
    made = compress.quantize(model, method, calibration=tokens(), output=output, verify=False).record
    assert any("not a simple chain" in note for note in made.notes)
    assert {layer.shape[1]: layer.group_size for layer in made.layers} == {16: None, 32: 32, 64: 64}
    record = json.loads((output / "compress.json").read_text())
    assert record["identity"]["recipe"]["passes"][0]["gptq"]["group_size"] == 0
    assert any(note.startswith("no group size of 128, 64, 32 divides") for note in record["notes"])


# Inputs of the layers -> the sizes of SpQR's groups, and what the run says.
TILE_SIZES = {
    (64, 96): ([16, 16], None),
    (64, 172): ([16, 43], "no group size near 16 divides the inputs of all layers (1 has 172 inputs)"),
    (72, 120): ([12, 12], "groups of 12 instead of groups of 16: 0 has 72 inputs; torch multiplies by them many times"),
    (131, 131): ([131, 131], "groups of 131 instead of groups of 16"),
}


@pytest.mark.parametrize("widths", TILE_SIZES)
def test_spqr_has_a_group_size_for_every_model(widths: tuple[int, ...]) -> None:
    sizes, said = TILE_SIZES[widths]
    x = torch.randn(40, widths[0], generator=torch.Generator().manual_seed(1))
    fast = compress.SpQR(search=False, sweeps=0, refit=0, drift=0.0)
    made = compress.quantize(chain(*widths, 8), fast, calibration=[{"input": x}]).record
    (settled,) = plan(chain(*widths, 8), [fast]).recipe
    assert [settled.fitted({width}).tiles.group_size for width in widths] == sizes
    assert all(layer.figures["loss"] < 1 for layer in made.layers)
    about_groups = [note for note in made.notes if "--group-size" in note]
    assert len(about_groups) == (said is not None)
    assert said is None or said in about_groups[0]


def test_a_size_is_proposed_only_to_a_method_that_takes_it() -> None:
    shapes = {"0": (8, 64), "1": (8, 172)}
    for method in (compress.RTN, compress.SpQR):
        with pytest.raises(InputError) as refused:
            method(group_size=16).check(shapes)
        message = str(refused.value)
        named = message.partition("sizes that work: ")[2].partition(" (")[0]
        assert named == "4"
        assert ("-1" in message) is (method is compress.RTN)
        method(group_size=4).check(shapes)
    assert "4 (scales take 4 bits per weight), -1" in suggest_groups([64, 172])
    assert "4 (scales take 2.5 bits per weight)" in message
    with pytest.raises(InputError, match="leave it out, and each layer has its own"):
        compress.SpQR(group_size=16).check({"0": (8, 27), "1": (8, 64)})


def test_the_usual_group_has_a_kernel() -> None:
    for columns in (*range(16, 400), 576, 1080, 4096):
        size = usual_group([columns])
        assert why_not_sizes("weight_only", columns, size) == [], columns
        if columns % 16 == 0:
            assert why_not_sizes("tiles", columns, compress.SpQR().fitted({columns}).tiles.group_size) == []
