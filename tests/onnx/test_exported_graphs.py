"""Whole checkpoints as ONNX graphs: files, the record, and ONNX Runtime's outputs beside ours."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import command, last_line, make_llama, save
from models import build
from safetensors.torch import save_file

import compress
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.leftovers import strangers_in
from compress.checkpoint.read.source import find_source
from compress.checkpoint.write.manifest import read_record
from compress.onnx.exporters import REFERENCE, MatMulNBitsGraph
from compress.onnx.readback import read_back, reference
from compress.onnx.repacked import why_not
from compress.passes.protocol.recipe import make_pass
from compress.weights.grid import Grid
from compress.weights.scheme import Scheme, scheme_named

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
TOKENS = torch.randint(96, (6, 16), generator=torch.Generator().manual_seed(1))
FILES = {
    "model.onnx",
    "model.onnx.data",
    "config.json",
    "generation_config.json",
    "compress.json",
    "genai_config.json",
}


def compressed(model: torch.nn.Module, folder: Path, **options: object) -> Path:
    """A checkpoint of a model by RTN."""
    model.save_pretrained(folder / "model")
    calibration = {"calibration": TOKENS} if options.get("activations") == "static" else {}
    made = make_pass("rtn", options)
    compress.quantize(folder / "model", made, output=folder / "out", verify=False, **calibration)
    return folder / "out"


def test_a_killed_export_does_not_stand_in_the_way(tmp_path):
    """It may leave the outputs that a graph is compared with."""
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / REFERENCE).touch()
    assert not list(strangers_in(tmp_path))


def test_a_decoder_is_exported_and_read_back(tmp_path, monkeypatch):
    model = save(make_llama(num_hidden_layers=1).half(), tmp_path / "model")
    out, there = tmp_path / "out", tmp_path / "there"
    compress.quantize(model, compress.RTN(scheme="w4a16", group_size=32), output=out, verify=False)
    done = command("export", out, "--to", "onnx", "--output", there)
    assert done.code == 0, done.err
    record = read_record(there)
    found = record["verification"]
    assert (found["layers"], found["reader"]) == (7, f"onnxruntime {onnxruntime.__version__}")
    assert found["remarks"][0] in done.err
    assert found["exact_max_difference"] < 1e-4 * found["deviation"] < found["max_difference"]
    assert found["same_top"] > 0.9
    graph = onnx.load(there / "model.onnx").graph
    kinds = [each.data_type for each in graph.initializer if "embed" in each.name or "lm_head" in each.name]
    assert set(kinds) == {onnx.TensorProto.FLOAT16}
    nodes = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(nodes) == 7
    assert {attribute.i for node in nodes for attribute in node.attribute if attribute.name == "accuracy_level"} == {4}
    assert {path.name for path in there.iterdir()} >= FILES
    assert "quantization_config" not in json.loads((there / "config.json").read_text())

    changed = json.loads(json.dumps(record["graph"]))
    name = next(iter(changed["layers"]))
    changed["layers"][name] = "0" * 64
    with pytest.raises(CheckpointError, match=f"{name} of .*, as onnxruntime .* reads it, is not what was decided"):
        read_back(there, changed)
    assert not list(there.glob("*.safetensors"))
    assert "outputs of the graph were not compared: that is done as it" in compress.verify(there)["remarks"][0]
    held, _ = reference(find_source(str(out)))
    shutil.copytree(there, tmp_path / "run" / "model")
    (tmp_path / "run" / "blocks").mkdir()
    save_file({**held, "outputs": held["outputs"] + 0.1}, tmp_path / "run" / "blocks" / "reference.safetensors")
    with pytest.raises(CheckpointError, match=r"differ from ours by up to 0\.1"):
        read_back(tmp_path / "run" / "model", record["graph"])
    for flags, names_it in (({"avx2"}, True), ({"avx2", "avx512_vnni"}, False), ({"asimd"}, False)):
        monkeypatch.setattr("compress.onnx.readback.cpu_flags", lambda flags=flags: frozenset(flags))
        with pytest.raises(CheckpointError) as refused:
            read_back(tmp_path / "run" / "model", {**record["graph"], "rounds": True})
        assert ("no VNNI" in str(refused.value)) == names_it
    (there / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(CheckpointError, match="cannot be run by onnxruntime"):
        read_back(there, record["graph"])
    monkeypatch.setattr("compress.onnx.readback.find_spec", lambda _: None)
    assert not MatMulNBitsGraph().reads_back
    with pytest.raises(InputError, match=r"needs the package onnxruntime; .*\[onnx\]"):
        read_back(there, record["graph"])


@pytest.mark.full
def test_factors_of_integer_products_are_read_back_from_16_bits(tmp_path):
    """The scales of rows of 96 outputs are kept in 16 bits, before a Cast."""
    out = compressed(make_llama(num_hidden_layers=1).half(), tmp_path, scheme="w8a8")
    there = compress.export(out, tmp_path / "there", "onnx-exact").output
    assert read_record(there)["verification"]["layers"] == 7
    kinds = {each.data_type for each in onnx.load(there / "model.onnx").graph.initializer if "scale" in each.name}
    assert onnx.TensorProto.FLOAT16 in kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "kind", "options", "exact"),
    [
        ("onnx-exact", "qwen3", {"scheme": "w4a16", "group_size": 32, "grid": "asymmetric"}, True),
        ("onnx-qdq", "gemma2", {"scheme": "w4a16", "group_size": 16}, False),
        ("onnx", "bert", {"scheme": "w8a8", "activations": "static", "activation_grid": "asymmetric"}, True),
        ("onnx", "opt", {"scheme": "w8a8"}, True),
        ("onnx", "mistral", {"scheme": "w8a16", "group_size": -1}, False),
    ],
)
def test_families_and_forms(to, kind, options, exact, tmp_path):
    out = compressed(build(kind, torch.bfloat16), tmp_path, **options)
    made = compress.export(out, tmp_path / "there", to)
    found = read_record(made.output)["verification"]
    off = found["max_difference"] / found["deviation"]
    assert off < (1e-3 if exact and "w8a8" not in options.values() else 0.3)


@pytest.mark.slow
def test_an_image_model(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8))
    out = compressed(model, tmp_path, scheme="w8a16", group_size=32)
    found = read_record(compress.export(out, tmp_path / "there", "onnx-exact").output)["verification"]
    assert found["layers"] == 12
    assert found["same_top"] == 1


@pytest.mark.slow
def test_padding_and_a_cache_give_what_transformers_gives(tmp_path):
    out = compressed(build("llama"), tmp_path, scheme="w4a16", group_size=16)
    there = compress.export(out, tmp_path / "there", "onnx-exact").output
    ours = compress.load(out, dequantize=True, dtype=torch.float32)
    opened = onnxruntime.InferenceSession(there / "model.onnx", providers=["CPUExecutionProvider"])
    ids, mask = TOKENS[:3], torch.ones_like(TOKENS[:3])
    mask[0, :5] = 0
    empty = {i.name: np.zeros((3, 2, 0, 8), np.float32) for i in opened.get_inputs() if "past" in i.name}
    logits, *_ = opened.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), **empty})
    expected = ours(input_ids=ids, attention_mask=mask).logits.detach()
    torch.testing.assert_close(torch.from_numpy(logits)[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-3)


def scheme(name: str, size: int | None = None, **more: object) -> Scheme:
    return replace(scheme_named(name, size), **more)


OUTPUTS = Grid(bits=8, granularity="tensor")
REFUSED = {
    "3 bits": (scheme("w3a16", 32), False, r"codes of 3 bits; ONNX Runtime .* --scheme w4a16"),
    "2 bits in standard operators": (scheme("w2a16", 32), True, "`--to onnx` takes it"),
    "groups of 8": (scheme("w4a16", 8), False, r"groups of 8, .* --group-size 32"),
    "a sum": (Scheme(terms=scheme("w4a16", 32).terms * 2), False, r"is a sum .*`--to dense` takes it"),
    "float8": (scheme("fp8"), False, "not as integers; `--to dense` takes it"),
    "w4a8": (scheme("w4a8", 32), False, "--scheme w8a8, or w4a16"),
    "rounded outputs": (scheme("w8a8", outputs=OUTPUTS, dynamic=False), False, "rounds its output, too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_say_names_the_alternative(name):
    given, portable, says = REFUSED[name]
    assert re.search(says, why_not(given, portable) or "")


def test_a_refusal_comes_before_work(llama, tmp_path):
    compress.quantize(llama, compress.RTN(scheme="w3a16", group_size=32), output=tmp_path / "out", verify=False)
    for to in ("onnx", "onnx-exact", "onnx-qdq"):
        refused = command("export", tmp_path / "out", "--to", to, "--output", tmp_path / "there")
        assert refused.code == 2
        assert "has codes of 3 bits; ONNX Runtime multiplies codes of 2, 4 and 8" in last_line(refused)
        assert not (tmp_path / "there").exists()
