"""Our candidates among those of recipes/studies/cost/cpu_peers.py: held to the weights that they stand for, then
timed."""

import pytest
import torch

from compress.kernels.cpu import build as cpu
from compress.recipes.studies.cost import cpu_peers


def test_ours_and_torchs():
    if cpu.why_not():
        pytest.skip("; ".join(cpu.why_not()))
    found = {
        title: each for title, each in cpu_peers.candidates(32, 256, None, False).items() if "int4pack" not in title
    }
    times = cpu_peers.measure(32, 256, [1, 7], 1, found)
    assert all(set(of) == {1, 7} and min(of.values()) > 0 for of in times.values())


def test_what_is_wrong_is_not_timed():
    broken = torch.float32, lambda: (torch.ones(4, 8), lambda: lambda x: x @ torch.zeros(8, 4))
    with pytest.raises(AssertionError, match="broken, 1 tokens: relative error"):
        cpu_peers.measure(4, 8, [1], 1, {"broken": broken})
