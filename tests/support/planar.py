"""Weights in planar words with the values they stand for, inputs for them, and what a product of both may be off by."""

import pytest
import torch

from compress.kernels import reference
from compress.kernels.cpu import direct
from compress.kernels.layouts import words as pack
from compress.kernels.operators import strips
from compress.kernels.operators import words as ops


def planar_of(N, K, bits, group, symmetric, dtype, seed=0):
    """A weight with scales of either sign, its codes without zero points, and their scales per column."""
    g = torch.Generator().manual_seed(seed + N + K)
    groups = 1 if group == -1 else K // group
    codes = torch.randint(0, 2**bits, (N, K), generator=g, dtype=torch.uint8)
    zero_NG = torch.randint(0, 2**bits, (N, groups), generator=g, dtype=torch.uint8)
    if symmetric:
        zero_NG.fill_(2 ** (bits - 1))
    scale_NG = torch.randn(N, groups, generator=g) * 0.02
    weight = pack.to_planar(codes, scale_NG, zero_NG, bits, dtype)._replace(group_size=group)
    if symmetric:
        weight = weight._replace(zero=None)
    centred = codes.double() - zero_NG.double().repeat_interleave(K // groups, 1)
    return weight, centred * weight.scale.t().double().repeat_interleave(K // groups, 1)


def inputs(M, K, N, dtype):
    g = torch.Generator().manual_seed(M + K)
    return torch.randn(M, K, generator=g).to(dtype), torch.randn(N, generator=g).to(dtype)


def within(out, given, weight, bias, dtype):
    truth = given @ weight.t() + bias.double()
    return ((out.double() - truth).abs() <= reference.tolerance(given, weight, truth, dtype)).all()


def spoil(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Products with exact inputs are off by a factor, whatever layout the weight is in."""
    planar, laid, operator = ops.weight_only_linear, strips.strips_linear, direct.linear
    monkeypatch.setattr(ops, "weight_only_linear", lambda *a: planar(*a) * factor)
    # The group of inputs that are rounded.
    monkeypatch.setattr(strips, "strips_linear", lambda *a: laid(*a) * (factor if a[7] is None else 1))
    monkeypatch.setattr(direct, "linear", lambda *a: operator(*a) * (factor if a[7] is None else 1))
