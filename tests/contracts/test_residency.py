"""`Local`: working copies on open, edits kept or dropped, everything back home even after a failure."""

import pytest
import torch
from models import build

from compress.engine.residency import Local

CPU = torch.device("cpu")


def double(block):
    block.mlp.up_proj.weight.data = block.mlp.up_proj.weight.data * 2


@pytest.mark.parametrize("keep", [True, False])
def test_edits_are_kept_or_dropped(keep):
    model = build("llama", torch.bfloat16)
    block = model.model.layers[0]
    before = {name: p.data for name, p in block.named_parameters()}
    with Local(CPU, torch.float32, keep).open(block) as opened:
        assert all(p.dtype == torch.float32 for p in block.parameters())
        double(block)
        stored = dict(opened.stored())
    assert {v.dtype for v in stored.values()} == {torch.bfloat16}
    up = "mlp.up_proj.weight"
    assert torch.equal(stored[up], before[up] * 2)
    for name, parameter in block.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.data, before[name] * 2 if keep and name == up else before[name])
        if not keep:
            assert parameter.data is before[name] or parameter.data.data_ptr() == before[name].data_ptr()


def test_a_failure_brings_everything_home():
    model = build("llama", torch.bfloat16)
    before = {name: p.data.data_ptr() for name, p in model.named_parameters()}

    def fail():
        with Local(CPU, torch.float32).open(model.model.layers[0]):
            double(model.model.layers[0])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert {name: p.data.data_ptr() for name, p in model.named_parameters()} == before


def test_what_lies_in_excluded_modules_is_not_touched():
    model = build("llama", torch.bfloat16)
    blocks = set(model.model.layers)
    with Local(CPU, torch.float32).open(model, blocks):
        assert model.model.embed_tokens.weight.dtype == torch.float32
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
