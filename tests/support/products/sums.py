"""Weights for tests of sums: sparse rows and codes in tiles, as the kernels read them, and what they stand for."""

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.layouts import pairs24 as pack_pairs24
from compress.kernels.layouts import words as pack
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.strips24 import zeros_of
from compress.kernels.layouts.tiles import TileWords, pack_levels

SHORT = 2**15


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def entries_of(N: int, K: int, share: float, dtype: torch.dtype, seed: int = 0) -> tuple[Entries, Tensor]:
    """(Entries, fp64 [N, K]): rows with a share of entries; every third row is without any, every fifth is full."""
    chosen = torch.rand(N, K, generator=drawn(seed)) < share
    chosen[::3] = False
    chosen[4::5] = share > 0
    values = (torch.randn(N, K, generator=drawn(seed + 1)) * chosen).to(dtype)
    start = torch.cat([torch.zeros(1, dtype=torch.int64), chosen.sum(1).cumsum(0)]).to(torch.int32)
    column = chosen.nonzero()[:, 1].to(torch.int16 if K <= SHORT else torch.int32)
    return Entries(start, column, values[chosen]), values.double()


def planar_of(N: int, K: int, bits: int, group: int, zero: bool, dtype: torch.dtype, seed: int = 0) -> pack.CodeWords:
    """Codes in planar words, with zero points or without, scales of either sign."""
    g, groups = drawn(seed), 1 if group == -1 else K // group
    codes, zeros = (torch.randint(0, 2**bits, (N, n), generator=g).to(torch.uint8) for n in (K, groups))
    scale = torch.randn(N, groups, generator=g) * 0.05
    planar = pack.to_planar(codes, scale, zeros, bits, dtype)._replace(group_size=group)
    return planar if zero else planar._replace(zero=None)


def tiles_of(
    N: int, K: int, bits: int, group: int, rows: int, level_bits: int, dtype: torch.dtype, seed: int = 0
) -> TileWords:
    """Codes of so many bits, of scales and zero points of level_bits, in tiles of so many rows."""
    g, groups = drawn(seed), K // group
    codes = torch.randint(0, 2**bits, (N, K), generator=g).to(torch.uint8)
    scale, zero = (torch.randint(0, 2**level_bits, (N, groups), generator=g).to(torch.uint8) for _ in range(2))
    ranges = torch.rand(-(-N // rows), 4, groups, generator=g)
    ranges[:, [0, 2]] /= 2**level_bits
    ranges[:, :2] *= 0.02
    ranges[:, 2:] *= 2**bits / 2
    container = 4 if bits <= 4 else 8
    words = pack.pack_planar(codes, container)
    return TileWords(words, pack_levels(scale, zero, level_bits), ranges.to(dtype), container, group, rows)


def error(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, terms: tuple[Tensor, ...] = ()) -> float:
    """Distance of a product of x and a weight (fp64) over what is allowed, its rounding included; not finite is inf.
    terms: those of the weight whose products, the first with the bias, may be rounded before they are added."""
    given = x.double()
    truth = given @ weight.t()
    allowed = reference.tolerance(given, weight, truth, x.dtype) + reference.weight_rounding(given, weight, x.dtype)
    for i, term in enumerate(terms):
        part = given @ term.t() + (bias.double() if bias is not None and i == 0 else 0)
        allowed += torch.finfo(x.dtype).eps * part.abs()
    if bias is not None:
        truth = truth + bias.double()
        allowed += torch.finfo(x.dtype).eps * truth.abs()
    return excess(out, truth, allowed)


def excess(out: Tensor, truth: Tensor, allowed: Tensor) -> float:
    """Largest distance from the truth over what is allowed; infinite where an output is not finite."""
    off = (out.detach().double() - truth.detach()).abs()
    worst = torch.where(off == 0, 0.0, off / allowed.detach()).max().item() if off.numel() else 0.0
    return worst if worst == worst else float("inf")


def rows_of(kind, N, K, group, zero, dtype, seed=0, least=0):
    """(pairs or words, [N, K] their values, which are not rounded to the type of scales): `least` to two of every four
    kept."""
    g, groups = drawn(seed), 1 if group == -1 else K // group
    order = torch.rand(N, K // 4, 4, generator=g).argsort(-1)
    kept = (order < torch.randint(least, 3, (N, K // 4, 1), generator=g)).flatten(1)
    position = pack_pairs24.positions_of(kept)
    words = pack_pairs24.pack_positions(position)
    scale = (torch.randn(groups, N, generator=g) * 0.05).to(dtype)
    if kind == "numbers":
        values = (torch.randn(N, K, generator=g) * kept).to(dtype)
        pairs = pack_pairs24.Pairs(pack_pairs24.take(values, position), words, None, None, -1)
        return pairs, pack_pairs24.pairs_weight(pairs)
    codes, zeros = (torch.randint(0, 256, (N, n), generator=g).to(torch.uint8) for n in (K, groups))
    if kind == "eight":
        pairs = pack_pairs24.Pairs(pack_pairs24.take(codes, position), words, scale, zeros.t().contiguous(), group)
        return pairs, pack_pairs24.pairs_weight(pairs._replace(scale=scale.double()))
    found = pack.CodeWords(codes, scale, (zeros % 16).t().contiguous() if zero else None, group, 4)
    codes = torch.where(kept, codes % 16, zeros_of(found.zero, codes, K))
    return found._replace(words=pack.pack_planar(codes, 4)), values_of(codes, found)


def values_of(codes, weight):
    """[N, K] in float64."""
    zero, scale = (
        t.double().t().repeat_interleave(codes.shape[1] // len(t), 1)
        for t in (torch.full_like(weight.scale, 8) if weight.zero is None else weight.zero, weight.scale)
    )
    return (codes.double() - zero) * scale
