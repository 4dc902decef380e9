"""What recipes/studies/cost/calls.py times: layers that hold to their weights, and attention, all of them with an
operator here."""

import pytest
import torch

from compress.inference.layers.linear import PackedLinear
from compress.kernels.cpu import direct
from compress.recipes.studies.cost import calls


@pytest.fixture(autouse=True)
def operator():
    if direct.why_not():
        pytest.skip("; ".join(direct.why_not()))


def test_every_candidate_is_timed():
    found = calls.layers(torch.bfloat16) | calls.attention(torch.bfloat16)
    times = calls.measure(found, 2, 3)
    assert set(times) == set(found)
    assert all(0 < time["least"] <= time["median"] for time in times.values())


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(PackedLinear, "dequantize", lambda self: torch.zeros(calls.SIZE, calls.SIZE))
    with pytest.raises(AssertionError, match="w4a16: relative error"):
        calls.layers(torch.float32)
