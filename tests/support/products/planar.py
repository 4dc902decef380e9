"""Weights in planar words with the values they stand for, inputs for them, and what a product of both may be off by."""

import pytest
import torch

from compress.kernels import reference
from compress.kernels.cpu.arguments import strips_operation
from compress.kernels.layouts import words as pack
from compress.kernels.layouts.strips import pack_strips
from compress.kernels.layouts.words import CodeWords, LevelTable, pack_planar
from compress.kernels.operators import words as ops

E2M1 = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0]  # in halves
FRACTIONS = [-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0]
TABLES = {"whole numbers": (E2M1, 0.5), "fractions": (FRACTIONS, 1.0), "a factor": (E2M1, 1 / 3)}


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
    operator = ops.words_linear

    def spoilt(*given):
        rounded, with_entries = len(given) > 7 and given[7] is not None, len(given) > 11
        return operator(*given) * (1 if rounded or with_entries else factor)

    modules = ("kernels.operators.words", "inference.layers.packed", "inference.layers.levels")
    for module in (*modules, "recipes.studies.kernels.products"):
        monkeypatch.setattr(f"compress.{module}.words_linear", spoilt)


def table_of(N, K, group, table, dtype):
    """(table [17], the values that are multiplied: of bfloat16 pairs, by levels rounded to it)."""
    g = torch.Generator().manual_seed(N + K)
    codes = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
    groups = 1 if group == -1 else K // group
    scale_GN = (torch.randn(groups, N, generator=g) * 0.02).to(dtype)
    levels, factor = TABLES[table]
    given = torch.tensor([*levels, factor])
    weight = CodeWords(pack_planar(codes, 4), scale_GN, None, group, 4, LevelTable(given, levels is E2M1))
    laid = pack_strips(weight, K)
    pairs = strips_operation(False, dtype) == "pair_strips"
    scale_NK = (scale_GN.float() * given[16]).double().t().repeat_interleave(K // groups, 1)
    looked_up = given[:16].bfloat16().double() if pairs else given[:16].double()
    return laid, looked_up[codes.int()] * scale_NK


def planar_table(N, K, group, table, dtype, device="cpu"):
    """(A weight of codes of a table in planar words, its values in float64)."""
    g = torch.Generator(device).manual_seed(N + K)
    codes = torch.randint(0, 16, (N, K), generator=g, device=device, dtype=torch.uint8)
    scale_GN = (torch.randn(K // group, N, generator=g, device=device) * 0.02).to(dtype)
    levels, factor = TABLES[table]
    values = torch.tensor([*levels, factor], device=device)
    weight = CodeWords(pack_planar(codes, 4), scale_GN, None, group, 4, LevelTable(values, levels is E2M1))
    scale_NK = (scale_GN.float() * values[16]).double().t().repeat_interleave(group, 1)
    return weight, values[:16].double()[codes.int()] * scale_NK
