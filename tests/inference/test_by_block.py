"""A model whose layers have values only while the block around them runs computes what the whole one does."""

from contextlib import contextmanager

import pytest
import torch
from models import build, tokens
from torch import nn

import compress
from compress.checkpoint.read.source import find_source
from compress.inference.check.by_transformers import decompress_by_block, load_with_transformers
from compress.inference.check.dense_twin import compare_layer, compare_layers
from compress.inference.check.streaming import stream
from compress.inference.load.block_streaming import run_by_block

BLOCKS = ("model.layers.0", "model.layers.1")


def written(tmp_path, kind="llama", **options):
    compress.quantize(build(kind), compress.RTN(**options), output=tmp_path / "out", verify=False)
    return find_source(str(tmp_path / "out"))


def noting(openings, log):
    """Openings that write the name of each layer into a list when it is opened, and take it out when it is closed;
    the list has its greatest length in `log`."""

    @contextmanager
    def noted(name, opening):
        log["open"].append(name)
        log["most"] = max(log["most"], len(log["open"]))
        log["blocks"].add(tuple(sorted({n.rsplit(".", 2)[0] for n in log["open"]})))
        with opening():
            yield
        log["open"].remove(name)

    return {name: lambda n=name, o=opening: noted(n, o) for name, opening in openings.items()}


@torch.no_grad()
@pytest.mark.parametrize("dequantize", [True, False])
def test_ours_is_the_model_that_is_loaded_and_holds_one_block(dequantize, tmp_path):
    source = written(tmp_path, scheme="w4a16", group_size=16)
    whole = compress.load(source.path, dequantize=dequantize)
    worst = {}
    model, openings = stream(source, None, lambda name, layer: compare_layer(worst, name, layer), dequantize=dequantize)
    log = {"open": [], "most": 0, "blocks": set()}
    assert len(openings) == 14
    if not dequantize:
        with compare_layers(whole) as expected_worst:
            expected = whole(tokens(2, 7)).logits
    else:
        expected = whole(tokens(2, 7)).logits
    found = run_by_block(model, noting(openings, log), lambda: model(tokens(2, 7)).logits)
    assert torch.equal(found, expected)
    assert log == {"open": [], "most": 7, "blocks": {(block,) for block in BLOCKS}}
    if not dequantize:
        assert worst == expected_worst
        assert len(worst) == 14
    with pytest.raises((RuntimeError, NotImplementedError)):  # outside, nothing is there
        model(tokens(2, 7))


@torch.no_grad()
def test_theirs_decompresses_one_block_and_gives_it_back(tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    source = written(tmp_path, scheme="w4a16", group_size=16)
    whole, _ = load_with_transformers(source)
    model, loader = load_with_transformers(source)
    assert loader == "default"
    held = {name: value.clone() for name, value in model.state_dict().items()}
    openings = decompress_by_block(model)
    assert len(openings) == 14
    log = {"open": [], "most": 0, "blocks": set()}
    for _ in range(2):
        found = run_by_block(model, noting(openings, log), lambda: model(tokens(2, 7)).logits)
    assert torch.equal(found, whole(tokens(2, 7)).logits)
    assert log == {"open": [], "most": 7, "blocks": {(block,) for block in BLOCKS}}
    after = model.state_dict()
    assert after.keys() == held.keys()
    assert all(torch.equal(after[name], value) for name, value in held.items())


class Around(nn.Module):
    """Reads the weight of a layer in a block that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(2)])
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        x = x @ self.blocks[0][0].weight.t()
        return self.head(self.blocks[1](x))


@torch.no_grad()
def test_a_model_that_reads_a_block_without_calling_it_runs_with_all_of_it():
    torch.manual_seed(0)
    model = Around()
    expected, weights = model(torch.ones(3, 4)), {}
    for name in ("blocks.0.0", "blocks.1.0", "head"):
        module = model.get_submodule(name)
        weights[name] = module.weight
        module._parameters["weight"] = nn.Parameter(torch.empty(0), False)

    @contextmanager
    def filled(name):
        module = model.get_submodule(name)
        module._parameters["weight"] = weights[name]
        yield
        module._parameters["weight"] = nn.Parameter(torch.empty(0), False)

    openings = {name: lambda name=name: filled(name) for name in weights}
    assert torch.equal(run_by_block(model, openings, lambda: model(torch.ones(3, 4))), expected)
    assert model.head.weight.numel() == 0
