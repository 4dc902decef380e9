"""Rotations that a model computes as it runs: where they fit, that the function stays, and who carries them."""

import json

import pytest
import torch
import transformers
from blocks import answer, inputs, livelier
from checkpoints import same
from commands import StopAfterOne, command, make_llama, save
from models import build, tokens

import compress
from compress.base.errors import CheckpointError, InputError
from compress.inference.layers.fused import why_not_fuse
from compress.model.layers import is_linear, output_head
from compress.model.online_rotation import RotateInput, input_rotation
from compress.weights.rotations.hadamard import hadamard_sizes, rotated

BATCH = {"input_ids": tokens(3, 12, seed=9)}
ALONE = {"hidden": False, "heads": False, "online": True}
TIGHT = 1e-9  # of the largest logit, in float64
# A layer of a block of each kind that no rotation of a producer can reach.
LAYERS = {
    "llama": "mlp.down_proj",
    "gpt2": "mlp.c_proj",
    "opt": "fc2",
}


def turned(model):
    return {name: size for name, module in model.named_modules() if (size := input_rotation(module)) is not None}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("block", [None, 8])
def test_the_function_stays(kind, block):
    model, batch = livelier(build(kind)).double(), inputs(kind)
    before, weights = answer(model, batch), {n: p.clone() for n, p in model.named_parameters()}
    compress.quantize(model, compress.Rotation(**ALONE, block=block))
    assert (answer(model, batch) - before).abs().max() <= TIGHT * before.abs().max()
    found = turned(model)
    assert any(name.endswith(LAYERS[kind]) for name in found)
    assert found.keys() == {n for n, m in model.named_modules() if is_linear(m) and m is not output_head(model)}
    assert {size == 8 for size in found.values()} == {block == 8}
    moved = {name.removesuffix(".weight") for name, p in model.named_parameters() if not torch.equal(p, weights[name])}
    assert moved == found.keys()


def test_what_other_rotations_reach_is_not_rotated_again():
    for more, rest in (({}, {"mlp.down_proj"}), ({"heads": False}, {"mlp.down_proj", "self_attn.o_proj"})):
        model = livelier(build("llama"))
        compress.quantize(model, compress.Rotation(online=True, **more))
        assert {name.split(".", 3)[3] for name in turned(model)} == rest


def test_a_matrix_of_each_size_is_hadamards():
    assert hadamard_sizes(352) == [2, 4, 8, 16, 32, 44, 88, 176, 352]
    assert hadamard_sizes(15) == []
    for size in hadamard_sizes(96):
        matrix = rotated(torch.eye(96, dtype=torch.float64), size)[:size, :size]
        assert torch.allclose(matrix.abs(), torch.full_like(matrix, size**-0.5))
        assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))


def test_inputs_with_an_outlying_channel_are_rounded_better():
    off = {}
    for name, first in (("plain", ()), ("rotated", (compress.Rotation(**ALONE),))):
        model = livelier(build("llama"))
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.up_proj.weight[5] *= 100
                layer.mlp.down_proj.weight[:, 5] /= 100
        wanted = answer(model, BATCH)
        compress.quantize(model, (*first, compress.RTN(scheme="w8a8")))
        off[name] = float((answer(model, BATCH) - wanted).norm())
    assert off["rotated"] < 0.7 * off["plain"]


def test_end_to_end(tmp_path):
    given = save(livelier(build("llama")), tmp_path / "model")
    before, out = answer(compress.load(given), BATCH), tmp_path / "out"
    (tmp_path / "recipe.yaml").write_text("passes: [rotate: {online: true}, rtn: {scheme: w8a16, group_size: 16}]")
    run = command("quantize", given, "--recipe", tmp_path / "recipe.yaml", "--output", out, "--verify")
    assert run.code == 0, run.err
    assert "rotate: inputs of 2 layers, 64 channels at a time, as the model runs" in run.err
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "compress"
    groups = {target: group.get("rotation") for group in quantization["groups"] for target in group["targets"]}
    assert {name: size for name, size in groups.items() if size is not None} == {
        f"model.layers.{i}.mlp.down_proj": 64 for i in range(2)
    }
    found = compress.load(out)
    assert turned(found) == {name: 64 for name, size in groups.items() if size is not None}
    assert (answer(found, BATCH) - before).abs().max() < 0.05 * before.abs().max()
    dense = compress.load(out, dequantize=True)
    torch.testing.assert_close(answer(dense, BATCH), answer(found, BATCH), atol=1e-5, rtol=1e-4)
    assert "input rotated by 64" in str(found.model.layers[0].mlp.down_proj)
    (reason,) = why_not_fuse([found.model.layers[i].mlp.down_proj for i in range(2)])[:1]
    assert "each rotates its own input" in reason
    expected = answer(found, BATCH)
    found.dequantize()
    assert turned(found) == {}
    torch.testing.assert_close(answer(found, BATCH), expected, atol=1e-5, rtol=1e-4)


def test_dense_weights_are_rotated_back_and_other_exports_refuse(tmp_path):
    model = livelier(make_llama())  # of 96 inputs in down_proj: its matrix is not symmetric
    compress.quantize(
        model, (compress.Rotation(**ALONE), compress.RTN(scheme="w8a16")), output=tmp_path / "out", verify=False
    )
    made = compress.export(tmp_path / "out", tmp_path / "dense", "dense")
    assert any("14 layers" in line and "rotate what they are given" in line for line in made.lost), made.lost
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert turned(dense) == {}
    torch.testing.assert_close(
        answer(dense, BATCH), answer(compress.load(tmp_path / "out"), BATCH), atol=1e-5, rtol=1e-4
    )
    for to in ("gguf", "sparse24"):
        with pytest.raises(InputError, match="rotates its input as the model runs, which only an export to dense"):
            compress.export(tmp_path / "out", tmp_path / "other", to)


def test_a_model_in_memory_is_that_of_its_codes():
    model = livelier(build("llama"))
    result = compress.quantize(model, (compress.Rotation(**ALONE), compress.RTN()), keep_codes=True)
    rounded = answer(model, BATCH)
    on_codes = compress.on_codes(result)
    assert turned(on_codes) == turned(model) != {}
    torch.testing.assert_close(answer(on_codes, BATCH), rounded, atol=1e-5, rtol=1e-4)


def test_a_layer_that_stays_dense_is_refused_before_any_work(tmp_path):
    for rest in ((), (compress.Magnitude(sparsity=0.5),)):
        model = livelier(build("llama"))
        with pytest.raises(InputError, match=r"q_proj rotates its input as it runs, which a checkpoint says of"):
            compress.quantize(model, (compress.Rotation(**ALONE), *rest), output=tmp_path / "out")
        assert turned(model) == {}


def test_a_second_rotation_finds_nothing():
    model = livelier(build("llama"))
    compress.quantize(model, compress.Rotation(**ALONE))
    with pytest.raises(InputError, match="rotate finds nothing to edit"):
        compress.quantize(model, compress.Rotation(**ALONE))


def test_a_run_that_begins_with_such_a_checkpoint_keeps_it(tmp_path):
    first = compress.Rotation(**ALONE), compress.RTN(scheme="w8a16", group_size=16)
    compress.quantize(livelier(build("llama")), first, output=tmp_path / "first", verify=False)
    compress.quantize(
        tmp_path / "first", compress.RTN(scheme="w4a16", group_size=16), output=tmp_path / "second", verify=True
    )
    assert turned(compress.load(tmp_path / "second")) == turned(compress.load(tmp_path / "first"))


def test_a_stopped_run_resumes_to_the_same_files(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    passes = (compress.Rotation(online=True), compress.RTN(scheme="w4a4", group_size=16))
    compress.quantize(tmp_path / "model", passes, output=tmp_path / "whole", verify=False)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(tmp_path / "model", passes, output=tmp_path / "out", reporter=StopAfterOne(), verify=False)
    compress.quantize(tmp_path / "model", passes, output=tmp_path / "out", resume=True, verify=False)
    same(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("size", [24, "64"])
def test_a_size_that_cannot_be_is_named(tmp_path, size):
    passes = (compress.Rotation(**ALONE), compress.RTN())
    compress.quantize(build("llama"), passes, output=tmp_path / "out", verify=False)
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    for group in config["quantization_config"]["groups"]:
        group |= {"rotation": size} if "rotation" in group else {}
    path.write_text(json.dumps(config))
    wanted = "must be a whole number" if size == "64" else f"inputs, which do not rotate in blocks of {size}"
    with pytest.raises(CheckpointError, match=wanted):
        compress.load(tmp_path / "out")


def test_a_failure_later_takes_the_rotation_away():
    model = livelier(build("llama"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match="group size 48"):
        compress.quantize(model, (compress.Rotation(**ALONE), compress.RTN(group_size=48)))
    assert turned(model) == {}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_a_hook_returns_is_in_the_dtype_of_the_model():
    x = torch.randn(2, 3, 64).bfloat16()
    (out,) = RotateInput(16)(torch.nn.Identity(), (x,))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), rotated(x.float(), 16), atol=0.02, rtol=0.02)
