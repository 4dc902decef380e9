"""Layouts by C++ are those by torch, bit for bit."""

from itertools import product

import pytest
import torch
from combinations import every

from compress.kernels.cpu import build, layouts
from compress.kernels.layouts import strips, words
from compress.kernels.layouts.words import CodeWords, pack_rows


@pytest.fixture(autouse=True)
def _needs_the_library():
    if build.why_not("laying"):
        pytest.skip("; ".join(build.why_not("laying")))


@every(("bits", "columns", "rows"), product((4, 8), (1, 31, 32, 64, 129, 160, 576), (16, 48)))
def test_both_layouts_are_those_of_torch(bits, columns, rows):
    codes = torch.randint(2**bits, (rows, columns), dtype=torch.uint8)
    stored = pack_rows(codes, bits, signed=False)
    filled = columns * bits // 8 + 1  # what is behind the codes of a row may be anything
    stored.view(torch.uint8)[:, filled:] = 0xEE
    planar = layouts.planar_from_rows(stored, bits, columns, bits)
    assert torch.equal(planar, words.planar_from_rows(stored, bits, columns, bits))
    weight = CodeWords(planar, torch.randn(2, rows), torch.randint(16, (2, rows), dtype=torch.uint8), -1, bits)
    for one, other in zip(layouts.pack_strips(weight, columns), strips.pack_strips(weight, columns), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
