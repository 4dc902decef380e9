"""Weights in trellis codes of random symbols, and their values."""

import torch

from compress.kernels.layouts.trellis import MULTIPLIERS, Code, TrellisWords, run_blocks
from compress.kernels.layouts.trellis_strips import TrellisStrips


def trellis_of(bits, states, rows, columns, run, dtype, device="cpu"):
    """(A weight, its values in float64)."""
    code, draw = Code(bits, states, MULTIPLIERS[states], run), torch.Generator().manual_seed(bits + rows)
    size = (code.stored_rows(rows), columns * bits // 32)
    words = torch.randint(-(2**31), 2**31, size, generator=draw).to(torch.int32)
    scale = (torch.rand(rows, generator=draw) + 0.5).to(dtype)
    weight = TrellisWords(words.to(device), scale.to(device), code)
    levels = torch.cat([levels for _, levels in run_blocks(weight)])
    return weight, levels.double() * weight.scale.double()[:, None]


def arguments(x, weight, bias=None):
    """What `trellis_linear` takes."""
    code, before = weight.code, weight.before if isinstance(weight, TrellisStrips) else None
    return (x, weight.words, before, weight.scale, bias, code.bits, code.state_bits, code.multiplier, code.run)
