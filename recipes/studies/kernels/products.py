"""Measures the low-bit linears against dense products and against other libraries.

Every candidate is first checked against the product of its dequantized weights; a wrong one is not timed, and one that
cannot run is listed with the reason. Weights are rotated over enough copies that none is still in the cache when its
turn comes. `timing` times the calls; `ceilings` and `roofline` give the limits that times are held against.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu.layouts import lay_in_strips
from compress.kernels.layouts import words as pack
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.tiles import TileWords, pack_levels, tile_weight
from compress.kernels.operators import fp8_blocks
from compress.kernels.operators.int8_rows import w8a8_linear
from compress.kernels.operators.tiles import lay_tiles_in_strips, tiles_linear
from compress.kernels.operators.words import words_linear
from compress.recipes.studies.kernels.ceilings import achieved
from compress.recipes.studies.kernels.floats8 import floats8
from compress.recipes.studies.kernels.halved import HALVED, halve
from compress.recipes.studies.kernels.narrow import NARROW_KINDS, narrow
from compress.recipes.studies.kernels.roofline import (
    FLOAT8_KINDS,
    HALVED_KINDS,
    OUTLIERS,
    SPARSE_KINDS,
    TILE_GROUP,
    TILE_ROWS,
    WEIGHTS,
    cost,
)
from compress.recipes.studies.kernels.timing import Call, time_cpu, time_gpu

GROUP = 128
# More than the last-level cache of the machines this runs on: 50 MiB of L2 on Hopper, 32 MiB of L3 per CPU complex.
CACHE_BYTES = 128 * 2**20
MAX_COPIES = 64
# Prefixes of other libraries' candidates; all others are ours.
THEIRS = ("torch.", "gemlite")
WRONG = "wrong result"
# {candidate: the same codes without outliers, or without zeros}: their ratio is the cost of outliers, the gain of 2:4.
WITHOUT = {"w4a16 + 1% sparse": "w4a16", "spqr + 1% sparse": "w4a16", **HALVED}
TILE_BITS = 3


class BenchmarkOperands:
    """One quantized weight in the layouts of every candidate, and its dequantized values."""

    def __init__(self, N: int, K: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        g = torch.Generator(device=device).manual_seed(seed)
        self.codes = torch.randint(-8, 8, (N, K), generator=g, device=device, dtype=torch.int8)
        self.scale = (torch.rand(N, K // GROUP, generator=g, device=device) * 0.01 + 0.005).to(dtype)
        self.int4 = pack.to_planar(self.codes, self.scale, None, 4, dtype)
        # In the layouts that `compress.load` chooses here, with exact inputs and with int8.
        self.strips = [lay_in_strips(self.int4, K, int8_input) for int8_input in (False, True)]
        self.codes8 = torch.randint(-128, 128, (N, K), generator=g, device=device, dtype=torch.int8)
        self.scale8 = torch.rand(N, 1, generator=g, device=device) * 1e-3 + 1e-3
        self.int8 = pack.to_planar(self.codes8, self.scale8.to(dtype), None, 8, dtype)
        self.strips8 = lay_in_strips(self.int8, K, False)
        self.row_sum = reference.row_sums(self.codes8)
        self.dense = reference.dequantize(self.codes, self.scale)
        self.entries = _outliers(N, K, dtype, g)
        self.tiles = _tiles(N, K, dtype, g)
        self.tile_strips = lay_tiles_in_strips(self.tiles, K)
        self.narrow = narrow(N, K, dtype, g)
        self.halved = halve(self.dense, self.codes8, self.scale8, self.codes, self.scale, g)
        self.floats8 = floats8(N, K, g)

    def four_bits(self, x: Tensor, input_group: int | None) -> Tensor:
        """x times the 4-bit codes, as a loaded layer multiplies; rounded to int8 where there is an input_group."""
        return _as_laid(x, self.int4, self.strips[input_group is not None], input_group)

    def with_entries(self, x: Tensor) -> Tensor:
        """x times the 4-bit codes and sparse rows, as a loaded layer multiplies."""
        laid = self.strips[0]
        laid = self.int4 if laid is None else laid
        sizes = (laid.bits, laid.group_size, None, False, None, False)
        return words_linear(x, *laid[:3], None, *sizes, *self.entries)

    def tiles_with_entries(self, x: Tensor) -> Tensor:
        """x times the codes in tiles and sparse rows, as a loaded layer multiplies."""
        words, levels, ranges, *sizes = self.tiles if self.tile_strips is None else self.tile_strips
        return tiles_linear(x, words, levels, ranges, None, *sizes, *self.entries)

    def eight_bits(self, x: Tensor) -> Tensor:
        """x times the 8-bit codes, as a loaded layer multiplies."""
        return _as_laid(x, self.int8, self.strips8, None)

    def values(self, kind: str) -> Tensor:
        """[N, K] the dequantized weight of a product, in fp64."""
        if kind in SPARSE_KINDS:
            values = (tile_weight(self.tiles, self.codes.shape[1]) if kind == "spqr" else self.dense).double()
            row = torch.arange(len(values), device=values.device).repeat_interleave(
                self.entries.row_start.long().diff()
            )
            return values.index_put_((row, self.entries.column.long()), self.entries.value.double(), accumulate=True)
        if kind in HALVED_KINDS:
            return self.halved.values(kind, self.dense.shape[1]).double()
        if kind in FLOAT8_KINDS:
            return self.floats8.values(kind)
        if kind in NARROW_KINDS:
            return self.narrow.values(kind, self.dense.shape[1])
        if kind in ("dense", "dense fp32", "w4"):
            return self.dense.double()
        if kind == "w4a8":
            return self.codes * self.scale.double().repeat_interleave(GROUP, 1)
        if kind == "int32":
            return self.codes8.double()
        return self.codes8.double() * (self.scale8.to(self.scale.dtype) if kind == "w8" else self.scale8).double()


def _as_laid(x: Tensor, planar: pack.CodeWords, laid: pack.CodeWords | None, input_group: int | None) -> Tensor:
    weight = planar if laid is None else laid
    return words_linear(x, *weight[:3], None, weight.bits, weight.group_size, input_group)


def _outliers(N: int, K: int, dtype: torch.dtype, g: torch.Generator) -> Entries:
    """Sparse rows of values at random places."""
    chosen = torch.rand(N, K, generator=g, device=g.device) < OUTLIERS
    start = torch.nn.functional.pad(chosen.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    column = chosen.nonzero()[:, 1].to(torch.int16)
    return Entries(start, column, torch.randn(len(column), generator=g, device=g.device).to(dtype))


def _tiles(N: int, K: int, dtype: torch.dtype, g: torch.Generator) -> TileWords:
    """SpQR's: 3-bit codes, 3-bit scales and zero points, tiles of 16 x 16."""

    def codes(columns: int) -> Tensor:
        return torch.randint(0, 2**TILE_BITS, (N, columns), generator=g, device=g.device, dtype=torch.uint8)

    groups = K // TILE_GROUP
    ranges = torch.rand(-(-N // TILE_ROWS), 4, groups, generator=g, device=g.device) * 0.01
    ranges[:, 2:] *= 2**TILE_BITS / 2 / 0.01
    levels = pack_levels(codes(groups), codes(groups), TILE_BITS)
    return TileWords(pack.pack_planar(codes(K), 4), levels, ranges.to(dtype), 4, TILE_GROUP, TILE_ROWS)


def int4pack(weight: BenchmarkOperands, x: Tensor) -> Call:
    """torch's own 4-bit product: value = (code - 8) scale + zero, here with zero 0."""
    unsigned = (weight.codes + 8).to(torch.int32)
    scales = torch.stack([weight.scale.t(), torch.zeros_like(weight.scale.t())], -1).contiguous()
    if x.is_cuda:
        inner = 8
        packed = torch.ops.aten._convert_weight_to_int4pack(
            (unsigned[:, ::2] << 4 | unsigned[:, 1::2]).to(torch.uint8), inner
        )
        return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 2)
    return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)


def dense_fp32(weight: BenchmarkOperands, x: Tensor) -> Call:
    """The product of a model in fp32: twice the memory of half precision, and no instructions for it."""
    given, dense = x.float(), weight.dense.float()
    return lambda: torch.nn.functional.linear(given, dense)


def gemlite(weight: BenchmarkOperands, x: Tensor) -> Call:
    """GemLite's Triton product, where the package is installed."""
    core = import_module("gemlite.core")
    dtype = {torch.float16: core.DType.FP16, torch.bfloat16: core.DType.BF16}[x.dtype]
    N, K = weight.codes.shape
    layer = core.GemLiteLinear(
        4, group_size=GROUP, in_features=K, out_features=N, input_dtype=dtype, output_dtype=dtype
    )
    layer.pack((weight.codes + 8).to(torch.uint8), weight.scale.view(-1, 1), torch.full_like(weight.scale, 8), None)
    return lambda: layer(x)


def candidates(x: Tensor) -> dict[str, tuple[Callable[[BenchmarkOperands], Call], str]]:
    """name -> (builder of a call on one weight, which product it computes: a kind of `roofline.WEIGHTS`)."""
    codes, _, _ = reference.quantize_tokens(x)
    return {
        "dense": (lambda w: lambda: torch.nn.functional.linear(x, w.dense), "dense"),
        **({} if x.is_cuda or x.dtype == torch.float32 else {"dense fp32": (lambda w: dense_fp32(w, x), "dense fp32")}),
        "w4a16": (lambda w: lambda: w.four_bits(x, None), "w4"),
        "w4a16 + 1% sparse": (
            lambda w: lambda: w.with_entries(x),
            "w4 sparse",
        ),
        "spqr + 1% sparse": (lambda w: lambda: w.tiles_with_entries(x), "spqr"),
        # On a GPU only words of 4 bits have a kernel.
        **({} if x.is_cuda else {"2:4": (lambda w: lambda: w.halved.product("2:4", x), "2:4")}),
        **({} if x.is_cuda else {"2:4 w8a16": (lambda w: lambda: w.halved.product("2:4 w8", x), "2:4 w8")}),
        "2:4 w4a16": (lambda w: lambda: w.halved.product("2:4 w4", x), "2:4 w4"),
        "mxfp4a16": (lambda w: lambda: w.narrow.product("mxfp4", x), "mxfp4"),
        "nvfp4a16": (lambda w: lambda: w.narrow.product("nvfp4", x), "nvfp4"),
        "nf4a16": (lambda w: lambda: w.narrow.product("nf4", x), "nf4"),
        "trellis, 2 bits": (lambda w: lambda: w.narrow.product("trellis 2", x), "trellis 2"),
        "trellis, 3 bits": (lambda w: lambda: w.narrow.product("trellis 3", x), "trellis 3"),
        "w8a16": (lambda w: lambda: w.eight_bits(x), "w8"),
        "w4a8": (lambda w: lambda: w.four_bits(x, -1), "w4a8"),
        "w8a8": (
            lambda w: lambda: w8a8_linear(x, w.codes8, w.scale8[:, 0], None, None, None, None, True),
            "w8a8",
        ),
        # A CPU makes float8 weights float32 first.
        **({"fp8": (lambda w: lambda: w.floats8.product("fp8", x), "fp8")} if x.is_cuda else {}),
        **({"fp8 blocks": (lambda w: lambda: w.floats8.product("fp8 blocks", x), "fp8 blocks")} if x.is_cuda else {}),
        "torch._weight_int4pack_mm": (lambda w: int4pack(w, x), "w4"),
        "torch._int_mm": (lambda w: lambda: torch.ops.aten._int_mm(codes, w.codes8.t()), "int32"),
        "gemlite w4a16": (lambda w: gemlite(w, x), "w4"),
    }


def error_of(out: Tensor, x: Tensor, weight: BenchmarkOperands, kind: str) -> float:
    """Largest distance from the true product over the tolerance: above 1 is a wrong kernel."""
    rows = slice(0, min(len(x), 64))
    given, values = x[rows].double(), weight.values(kind)
    if kind in ("w4a8", "w8a8", "int32"):
        codes, scale, _ = reference.quantize_tokens(x[rows])
        given = codes.double() if kind == "int32" else codes.double() * scale.double()[:, None]
    if kind in FLOAT8_KINDS:
        given = weight.floats8.rounded(kind, x[rows])
    truth = given @ values.t()
    allowed = reference.tolerance(given, values, truth, x.dtype)
    if kind in ("dense", "dense fp32", "w4", "w8", *SPARSE_KINDS, *HALVED_KINDS, *NARROW_KINDS):
        allowed += reference.weight_rounding(given, values, x.dtype)
    if kind in FLOAT8_KINDS:
        allowed += fp8_blocks.SHORT_SUMS * (given.abs() @ values.abs().t())
    return ((out[rows].double() - truth).abs() / allowed).max().item()


def measure(
    N: int,
    K: int,
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    ceilings: Mapping[str, Mapping[str, Any]],
) -> Iterator[list[dict[str, Any]]]:
    """For each M of `tokens` one entry per candidate: its times and their evaluation, or the reason why it was not
    timed."""
    count = min(MAX_COPIES, max(2, -(-CACHE_BYTES // (N * K // 2))))
    first = BenchmarkOperands(N, K, dtype, device, 0)
    weights = [first, *(deepcopy(first) for _ in range(count - 1))]
    for M in tokens:
        x = torch.randn(M, K, generator=torch.Generator(device=device).manual_seed(M), device=device).to(dtype)
        calls: dict[str, list[Call]] = {}
        entries: dict[str, dict[str, Any]] = {}
        for name, (build, kind) in candidates(x).items():
            entries[name] = {"candidate": name, "kind": kind, "N": N, "K": K, "M": M}
            entries[name] |= {
                "dtype": str(dtype).removeprefix("torch."),
                "ours": not name.startswith(("dense", *THEIRS)),
            }
            try:
                built = [build(weight) for weight in weights]
                worst = error_of(built[0](), x, first, kind)
                for call in built[1:]:
                    call()  # a candidate that fails on a copy is left out here, not while all are timed
            except Exception as reason:  # noqa: BLE001 - a library may refuse a shape, or be missing, in any way
                entries[name]["skipped"] = f"{type(reason).__name__}: {reason}".splitlines()[0]
                continue
            entries[name]["error_over_tolerance"] = worst
            if not worst <= 1:
                entries[name]["skipped"] = WRONG
            else:
                calls[name] = built
        timed = (time_gpu if device.type == "cuda" else time_cpu)(calls, rounds)
        compare(entries, timed, ceilings, x.element_size())
        yield list(entries.values())


def compare(
    entries: dict[str, dict[str, Any]],
    timed: Mapping[str, Mapping[str, Any]],
    ceilings: Mapping[str, Mapping[str, Any]],
    width: int,
) -> None:
    """Add to the entries of one product their times, their share of what is possible, and their ratios.

    speedup_over: to the dense product and, for ours, to every other library's product of weights as wide; with
    outliers or zeros, to the product without.
    """
    for name, times in timed.items():
        entry = entries[name]
        need = cost(entry["kind"], entry["M"], entry["N"], entry["K"], width, entry["dtype"], GROUP)
        entry |= {**times, **achieved(need, times["time_ms"], ceilings)}
        bits = WEIGHTS[entry["kind"]][0]
        rivals = [o for o in timed if entry["ours"] and o.startswith(THEIRS) and WEIGHTS[entries[o]["kind"]][0] == bits]
        rivals = [WITHOUT[name]] if name in WITHOUT else rivals
        others = [other for other in ("dense", *rivals) if other in timed and other != name]
        entry["speedup_over"] = {other: timed[other]["time_ms"] / times["time_ms"] for other in others}
