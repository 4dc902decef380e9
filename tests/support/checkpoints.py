"""Comparing what was written."""

from pathlib import Path

import torch
from safetensors import safe_open

import compress
from compress.checkpoint.read.compressed_layers import read_tensors
from compress.checkpoint.read.source import find_source
from compress.weights.matrix import Term, Weight

# {layout of an export: a pass whose checkpoints it takes}.
LAYOUTS = {
    "dense": compress.RTN(group_size=32),
    "gptq": compress.RTN(group_size=32, grid="symmetric"),
    "awq": compress.RTN(group_size=32, grid="asymmetric"),
    "bitsandbytes": compress.RTN(scheme="nf4a16"),
    "mlx": compress.RTN(group_size=32),
    "modelopt": compress.RTN(scheme="nvfp4a16"),
    "sparse24": compress.Magnitude(pattern="2:4"),
}


def same(first: Path, second: Path, layers: int = 14) -> None:
    """Both checkpoints hold the same tensors, codes and scales included, bit for bit."""
    sources = [find_source(str(path)) for path in (first, second)]
    assert set(sources[0].weights) == set(sources[1].weights)
    for name in sources[0].weights:
        if name.rpartition(".")[2].startswith(("input_", "output_")):
            held = []
            for source in sources:
                with safe_open(source.weights[name], framework="pt") as file:
                    held.append(file.get_tensor(name))
            assert torch.equal(*held), name
    one, other = (read_tensors(source) for source in sources)
    assert set(one) == set(other)
    compressed = 0
    for name, value in one.items():
        found = other[name]
        if isinstance(value, Weight):
            assert isinstance(found, Weight)
            assert value.dequantize().equal(found.dequantize()), name
            for mine, theirs in zip(value.terms, found.terms, strict=True):
                assert isinstance(mine, Term)
                assert isinstance(theirs, Term)
                assert mine.format == theirs.format, name
                its = theirs.parts()
                assert all(part.equal(its[key]) for key, part in mine.parts().items()), name
            compressed += 1
        else:
            assert isinstance(found, torch.Tensor)
            assert torch.equal(value, found), name
    assert compressed == layers
