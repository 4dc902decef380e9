"""What the bytes of a checkpoint are: components that add up to its files."""

from pathlib import Path

import pytest
import torch
from commands import PLAIN_GPTQ
from models import build

import compress
from compress.checkpoint.read.source import find_source
from compress.evaluation.cost.size import size_result
from compress.evaluation.cost.size_in_memory import size_in_memory

# What each recipe must be found to hold, beside what all have.
RECIPES = {
    "w4a16": (compress.RTN(scheme="w4a16", group_size=32), {"codes", "scales", "masks and shapes"}),
    "asymmetric": (compress.RTN(scheme="w4a16", group_size=32, grid="asymmetric"), {"zero points"}),
    "outliers": (
        compress.SpQR(scheme="w3a16", group_size=16, outliers=0.01, search=False, sweeps=0),
        {"outliers: values", "outliers: places", "zero points"},
    ),
    "low rank": (
        compress.LQS(scheme="w4a16", group_size=32, iterations=1, **PLAIN_GPTQ),
        {"low-rank factors", "codes"},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_components_are_the_bytes_of_the_files(name: str, llama: Path, tmp_path: Path) -> None:
    recipe, held = RECIPES[name]
    tokens = torch.arange(64).reshape(4, 16) % 50
    compress.quantize(llama, recipe, calibration=tokens, output=tmp_path / "out", verify=False)
    size = size_result(find_source(str(tmp_path / "out")))
    found = {each.name: each.bytes for each in size.components}
    assert held | {"embeddings and head", "norms, biases and other", "file headers"} <= found.keys()
    files = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert sum(found.values()) == size.bytes == files
    assert all(count > 0 for count in found.values())


@pytest.mark.parametrize(("name", "kind"), [("asymmetric", "llama"), ("low rank", "llama"), ("w4a16", "gpt2")])
def test_a_model_in_memory_takes_the_bytes_of_its_checkpoint_without_headers(
    name: str, kind: str, tmp_path: Path
) -> None:
    recipe, _ = RECIPES[name]
    tokens = torch.arange(64).reshape(4, 16) % 50
    build(kind, torch.bfloat16).save_pretrained(tmp_path / "dense")
    compress.quantize(tmp_path / "dense", recipe, calibration=tokens, output=tmp_path / "out", verify=False)
    written = size_result(find_source(str(tmp_path / "out")))
    parts = {each.name: each.bytes for each in written.components if each.name != "file headers"}
    result = compress.quantize(build(kind, torch.bfloat16), recipe, calibration=tokens, keep_codes=True)
    assert result.model is not None
    loaded = compress.load(tmp_path / "out")
    for model in (result.model, compress.on_codes(result), loaded):
        size = size_in_memory(model)
        assert size is not None
        assert {each.name: each.bytes for each in size.components} == parts
        assert size.bytes == sum(parts.values())
        assert size.bits_per_weight == written.bits_per_weight
        assert size.parameters == written.parameters


def test_a_weight_that_was_changed_since_is_an_ordinary_one() -> None:
    model = build("llama", torch.bfloat16)
    dense = size_in_memory(model)
    compress.quantize(model, compress.RTN(scheme="w4a16", group_size=16))
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    packed, weights = size_in_memory(model), layer.weight.numel()
    with torch.no_grad():
        layer.weight[0, 0] += 1
    changed = size_in_memory(model.float())
    assert dense is not None
    assert packed is not None
    assert changed is not None
    assert changed.compressed_parameters == packed.compressed_parameters - weights
    assert dense.compressed_parameters == 0
    assert dense.bytes == 2 * dense.parameters
