"""Checkpoints in 4 and 8 bits that others wrote: run, and taken for the original of a run, at exactly their values.

The files are made here, from random bytes; an independent reader says what they hold: transformers' converter for
gpt-oss, bitsandbytes' formula written out, and float8 and E2M1 by their definition.
"""

import json
import re
from pathlib import Path

import mixtures
import pytest
import torch
from commands import command, last_line, make_llama, save
from models import tokens
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import CheckpointError
from compress.checkpoint.read.source import find_source
from compress.jobs.teachers import Teachers
from compress.weights.levels import NF4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EXPERTS = {"num_local_experts": 4, "head_dim": 16, "hidden_size": 64, "intermediate_size": 32}


def of_bytes(*shape: int, seed: int = 0, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def written(folder: Path, model: torch.nn.Module, tensors: dict, quantization: dict | None) -> Path:
    """A checkpoint of a model's configuration with these tensors."""
    save(model, folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def assert_alike(folder: Path, ids: torch.Tensor) -> None:
    """The checkpoint computes on its codes what dense weights do."""
    with torch.no_grad():
        coded, dense = (compress.load(folder, torch.float32, dequantize=d)(ids).logits for d in (False, True))
    torch.testing.assert_close(coded, dense, rtol=1e-3, atol=1e-3)


def gpt_oss(folder: Path) -> Path:
    """A tiny gpt-oss with MXFP4 experts of random codes."""
    patch = pytest.MonkeyPatch()
    patch.setitem(mixtures.FAMILIES, "gpt-oss", ("GptOss", EXPERTS, "down_proj", 32))
    with patch.context():
        model = mixtures.made("gpt-oss").to(torch.bfloat16)
    patch.undo()
    tensors = model.state_dict()
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = of_bytes(experts, outputs, inputs // 32, 16, seed=len(name))
        tensors[f"{name}_scales"] = of_bytes(experts, outputs, inputs // 32, low=118, high=124)
    return written(folder, model, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": []})


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return gpt_oss(tmp_path_factory.mktemp("gpt-oss"))


def test_experts_of_gpt_oss_have_the_values_that_transformers_reads(mixture):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = load_file(mixture / "model.safetensors")
    loaded, dense = compress.load(mixture), compress.load(mixture, dequantize=True)
    for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        expected_EKN = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(dense.get_parameter(name), expected_EKN)
        module, _, projection = name.rpartition(".")
        for i, expected in enumerate(expected_EKN.mT):
            expert = loaded.get_submodule(f"{module}.{i}")
            if projection == "down_proj":
                assert torch.equal(expert.down_proj.weight, expected)
            else:
                assert torch.equal(expert.gate_proj.weight, expected[0::2])
                assert torch.equal(expert.up_proj.weight, expected[1::2])
                assert torch.equal(expert.up_proj.bias, stored[f"{name}_bias"][i, 1::2])
    assert_alike(mixture, mixtures.tokens(2))


def test_experts_of_gpt_oss_multiply_together_from_codes_of_4_bits(mixture):
    model = compress.load(mixture)
    experts = model.model.layers[0].mlp.experts
    if not experts.get_submodule("0.down_proj").in_strips:
        pytest.skip("no compiled kernels")
    assert experts.reasons == []
    assert experts.stacks[-1].held["words"].nbytes == 4 * 64 * 32 // 2


def test_mxfp4_of_mxfp4_loses_nothing(mixture, tmp_path):
    made = compress.quantize(mixture, compress.RTN(scheme="mxfp4a16"), ignore=["*attn*"], output=tmp_path / "out")
    assert any("was rounded before (24 layers mxfp4a16)" in note for note in made.record.notes)
    assert not any("came pruned" in note for note in made.record.notes)  # an eighth of all codes is a zero
    first, again = compress.load(mixture, dequantize=True), compress.load(tmp_path / "out", dequantize=True)
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in again.state_dict().items())


def four_bits(weight_NK: torch.Tensor, block: int, nested: bool) -> dict[str, torch.Tensor]:
    """The tensors of bitsandbytes for random codes of a weight's shape, by the end of their names."""
    count = weight_NK.numel()
    absmax = torch.rand(count // block, generator=torch.Generator().manual_seed(count)) + 0.1
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight_NK.shape)}
    found = {"": of_bytes(count // 2, 1, seed=count), ".quant_map": torch.tensor(NF4.values), ".absmax": absmax}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        found[".absmax"] = of_bytes(count // block, seed=1)
        found[".nested_absmax"] = torch.rand(-(-count // block // 256), generator=torch.Generator().manual_seed(2))
        found[".nested_quant_map"] = torch.linspace(-1, 1, 256)
    said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {**found, ".quant_state.bitsandbytes__nf4": said}


def decoded(parts: dict[str, torch.Tensor], shape: torch.Size, block: int) -> torch.Tensor:
    """The values, as functional.py and backends/default/ops.py of bitsandbytes 0.50 compute them."""
    absmax = parts[".absmax"]
    if absmax.dtype == torch.uint8:
        inner = parts[".nested_quant_map"][absmax.int()]
        outer = parts[".nested_absmax"]
        absmax = torch.stack([inner[i] * outer[i // 256] for i in range(len(inner))]) + 0.25
    packed = parts[""].flatten().int()
    codes = torch.empty(2 * len(packed), dtype=torch.int32)
    codes[::2], codes[1::2] = packed >> 4, packed & 15
    values = parts[".quant_map"][codes].view(-1, block) * absmax[:, None]
    return values.to(torch.bfloat16).view(shape)


def of_bitsandbytes(folder: Path, block: int, nested: bool) -> tuple[Path, dict[str, torch.Tensor]]:
    """(A Llama in bitsandbytes' NF4, {name: value} of its dense layers)."""
    model = make_llama(num_hidden_layers=1, hidden_size=128, intermediate_size=256).to(torch.bfloat16)
    tensors, values = model.state_dict(), {}
    for name in [name for name in tensors if "_proj" in name]:
        parts = four_bits(weight := tensors.pop(name), block, nested)
        tensors |= {f"{name}{ending}": part for ending, part in parts.items()}
        values[name] = decoded(parts, weight.shape, block)
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return written(folder, model, tensors, quantization), values


@pytest.mark.parametrize(("block", "nested"), [(64, False), (64, True), (128, True)])
def test_nf4_of_bitsandbytes_has_the_values_of_its_formula(block, nested, tmp_path):
    folder, values = of_bitsandbytes(tmp_path / "model", block, nested)
    loaded, dense = compress.load(folder), compress.load(folder, dequantize=True)
    assert {str(loaded.get_submodule(name.removesuffix(".weight")).scheme) for name in values} == {"nf4a16"}
    for name, value in values.items():
        assert torch.equal(dense.get_parameter(name), value)
        assert torch.equal(loaded.get_submodule(name.removesuffix(".weight")).weight, value)
    assert_alike(folder, tokens()[:2])


def test_what_was_loaded_from_bitsandbytes_is_saved_in_our_words(tmp_path):
    folder, values = of_bitsandbytes(tmp_path / "model", 64, True)
    compress.load(folder).save_pretrained(tmp_path / "saved", variant="compress")
    again = compress.load(tmp_path / "saved", dequantize=True)
    assert all(torch.equal(again.get_parameter(name), value) for name, value in values.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("L.weight.absmax"), "weight.absmax is missing"),
        (lambda t: t.update({"L.weight.absmax": torch.ones(3)}), r"weight.absmax is F32 \[3\]; .* needs 256 F32"),
        (lambda t: t["L.weight.quant_map"].add_(1), "weight.quant_map holds other levels than those of nf4"),
        (lambda t: t.update({"L.weight.quant_state.bitsandbytes__nf4": of_bytes(9)}), "nf4 holds no JSON"),
        (lambda t: t.update({"L.weight.quant_state.bitsandbytes__fp4": of_bytes(9)}), "bitsandbytes fp4; readable"),
    ],
)
def test_damaged_files_of_bitsandbytes_are_named(change, says, tmp_path):
    folder, _ = of_bitsandbytes(tmp_path / "model", 64, False)
    layer = "model.layers.0.self_attn.q_proj"
    held = {name.replace(layer, "L"): value for name, value in load_file(folder / "model.safetensors").items()}
    change(held)
    save_file({name.replace("L.", f"{layer}."): value for name, value in held.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        compress.load(folder)


def of_modelopt(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """(A Llama of ModelOpt: NVFP4 and float8 layers and a float8 cache, told by hf_quant_config.json alone, {name:
    value} of its dense layers)."""
    model = make_llama(num_hidden_layers=1).to(torch.bfloat16)
    tensors, values = model.state_dict(), {}
    for name in [name for name in tensors if "_proj" in name]:
        layer, (rows, columns) = name.removesuffix(".weight"), tensors[name].shape
        if "mlp" in name:
            packed = of_bytes(rows, columns // 2, seed=rows)
            local = (torch.rand(rows, columns // 16) * 400).to(torch.float8_e4m3fn)
            tensors |= {name: packed, f"{layer}.weight_scale": local, f"{layer}.weight_scale_2": torch.tensor(3e-4)}
            codes = torch.stack([packed & 15, packed >> 4], -1).view(rows, columns).int()
            levels = torch.tensor(E2M1)[codes & 7] * torch.where(codes > 7, -1, 1)
            values[name] = levels * (local.float() * torch.tensor(3e-4)).repeat_interleave(16, 1)
        else:
            codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
            tensors |= {name: codes, f"{layer}.weight_scale": torch.tensor(0.05)}
            values[name] = codes.float() * 0.05
        tensors[f"{layer}.input_scale"] = torch.tensor(0.02)
    attention = "model.layers.0.self_attn"
    tensors |= {f"{attention}.{key}_proj.{key}_scale": torch.tensor(0.03) for key in ("k", "v")}
    written(folder, model, tensors, None)
    told = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": told}))
    return folder, {name: value.to(torch.bfloat16) for name, value in values.items()}


def test_modelopt_mixes_formats_and_tells_them_in_a_file_of_its_own(tmp_path):
    folder, values = of_modelopt(tmp_path / "model")
    loaded = compress.load(folder)
    for name, value in values.items():
        assert torch.equal(loaded.get_submodule(name.removesuffix(".weight")).weight, value)
    attention = loaded.model.layers[0].self_attn
    assert float(attention.k_scale) == pytest.approx(0.03, rel=0.01)
    with torch.no_grad():
        assert loaded(tokens()[:2]).logits.isfinite().all()


def test_a_run_begins_with_the_values_of_a_rounded_checkpoint(tmp_path):
    folder, values = of_modelopt(tmp_path / "model")
    passes = compress.RTN(scheme="w8a16", group_size=32)
    made = compress.quantize(folder, passes, output=tmp_path / "out")
    note = next(note for note in made.record.notes if "was rounded before" in note)
    assert "3 layers nvfp4" in note
    assert "4 layers fp8 tensor" in note
    assert note.endswith("the rounding of inputs and key-value caches is left out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "kv_cache_scheme" not in config["quantization_config"]
    model = make_llama(num_hidden_layers=1).to(torch.bfloat16)
    model.load_state_dict({**model.state_dict(), **values})
    compress.quantize(save(model, tmp_path / "dense"), passes, output=tmp_path / "expected", verify=False)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("made", [gpt_oss, lambda folder: of_modelopt(folder)[0]])
def test_a_plan_of_a_rounded_checkpoint_tells_the_bytes_that_a_run_writes(made, tmp_path):
    folder = made(tmp_path / "model")
    asked = {"passes": compress.RTN(scheme="w8a16", group_size=32)}
    told = compress.plan(folder, **asked)
    done = compress.quantize(folder, **asked, output=tmp_path / "out", verify=False)
    assert (told.saving.before, told.saving.after) == (done.record.saving.before, done.record.saving.after)


def test_a_run_that_saves_no_bytes_of_a_rounded_checkpoint_says_why(tmp_path):
    folder, out = of_modelopt(tmp_path / "model")[0], tmp_path / "out"
    asked = ("quantize", folder, "--method", "rtn", "--scheme", "w8a16", "--group-size", 32, "--output", out, "--quiet")
    outcome = command(*asked)
    assert outcome.code == 1
    assert "the model came in codes already, and these take as many bytes or more" in last_line(outcome)
    allowed = command(*asked[:-1], "--overwrite", "--allow-little")
    assert allowed.code == 0
    # 12,288 weights in 8 bits, and 18,432 in 4 with a float8 scale for each 16.
    before = re.search(r"bits per compressed weight: ([\d.]+) -> 8.5", allowed.out)
    assert 5.9 < float(before[1]) < 6.1


def test_a_model_is_taught_by_the_values_that_it_began_with(tmp_path):
    folder, values = of_modelopt(tmp_path / "model")
    source = find_source(str(folder))
    teacher = Teachers(source, None, torch.device("cpu"), False, False, {}).named("original")
    for name, value in values.items():
        assert torch.equal(teacher.get_parameter(name), value.float())
