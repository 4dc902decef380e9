"""What the bytes of a checkpoint are: components that add up to its files."""

from pathlib import Path

import pytest
import torch
from commands import PLAIN_GPTQ

import compress
from compress.checkpoint.read.source import find_source
from compress.evaluation.cost.size import size_result

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
