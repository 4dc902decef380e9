"""What holds for every format of a term. A new one joins `TERMS` and gets all of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compress.base.errors import CheckpointError, CompressError
from compress.checkpoint.read.compressed_layers import read_weight
from compress.inference.layers.linear import QuantLinear
from compress.recipes.low_rank import Factors as SomebodysLowRank
from compress.weights.formats.act_order import ActOrder, InOrderOfGroups
from compress.weights.formats.codes import (
    Codes,
    CodesFormat,
    FineGrained,
    Float8Blocks,
    Float8Rows,
    Int8Rows,
    Int8Table,
    Packed,
)
from compress.weights.formats.dense import dense
from compress.weights.formats.k_quants import KBlocks, KQuant
from compress.weights.formats.levels import IQ4NL, MXFP4, MXFP6, MXFP6E3M2, MXFP8, NF4, NVFP4, ModelOptNVFP4, NF4Float32
from compress.weights.formats.lowrank import LowRankFactors
from compress.weights.formats.lowrank import low_rank as low_rank_of
from compress.weights.formats.registry import FORMATS, OURS
from compress.weights.formats.sparse import sparse
from compress.weights.formats.sparse24 import sparse24 as sparse24_of
from compress.weights.formats.ternary import BinaryCodes, TernaryCodes
from compress.weights.formats.tiles import Tiled, Tiles
from compress.weights.formats.trellis import TrellisCodes, Trellised
from compress.weights.grid import Grid, quantize
from compress.weights.matrix import Term, Weight
from compress.weights.scheme import Scheme, check_parts, parts_of, read_entry, scheme_of
from compress.weights.terms import Format

ROWS, COLUMNS = 24, 256
GROUPS = {"granularity": "group", "group_size": 16}
BLOCKS = Grid(bits=8, type="float", granularity="block", block=(128, 128))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def codes(format_: CodesFormat, dtype: torch.dtype) -> Codes:
    torch.manual_seed(0)
    return format_.term(quantize(torch.randn(ROWS, COLUMNS), format_.grid, dtype))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def low_rank(dtype: torch.dtype) -> Term:
    torch.manual_seed(1)
    parts = {"left": torch.randn(ROWS, 3).to(dtype), "right": torch.randn(3, COLUMNS).to(dtype)}
    return LowRankFactors(rank=3).read(parts, ROWS, COLUMNS)


def low_rank_codes(dtype: torch.dtype) -> Term:
    draw = torch.Generator().manual_seed(5)
    basis, _ = torch.linalg.qr(torch.randn(ROWS, 6, generator=draw, dtype=torch.float64))
    return low_rank_of(basis, torch.randn(ROWS, COLUMNS, generator=draw, dtype=torch.float64), dtype, bits=8)


def somebodys(dtype: torch.dtype) -> Term:
    return SomebodysLowRank(rank=3).read(low_rank(dtype).parts(), ROWS, COLUMNS)


def sparse_rows(dtype: torch.dtype) -> Term:
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)).to(dtype)
    chosen = values.abs() > 1.5
    chosen[5], chosen[6] = True, False  # a row full of entries, and one without
    return sparse(values, chosen)


def two_of_four(grid: Grid | None, dtype: torch.dtype) -> Term:
    """Random weights, one in eight quads without any, another with one."""
    draw = torch.Generator().manual_seed(6)
    order = torch.rand(ROWS, COLUMNS // 4, 4, generator=draw).argsort(-1)
    least = torch.randint(8, (ROWS, COLUMNS // 4, 1), generator=draw).clamp(max=2)
    values = torch.randn(ROWS, COLUMNS, generator=draw) * (order < least).flatten(1)
    if grid is None:
        return sparse24_of(dense(values.to(dtype)))
    return sparse24_of(quantize(values, grid, dtype))


def tiles(dtype: torch.dtype) -> Term:
    draw = torch.Generator().manual_seed(4)
    format_ = Tiles(bits=3, scale_bits=3, zero_bits=4, group_size=16, tile_rows=8)
    groups = COLUMNS // format_.group_size
    codes, scale, zero = (
        torch.randint(2**bits, (ROWS, n), dtype=torch.uint8, generator=draw)
        for bits, n in ((3, COLUMNS), (3, groups), (4, groups))
    )
    ranges = torch.rand(ROWS // 8, groups, 4, generator=draw).to(dtype).repeat_interleave(8, 0)
    return Tiled(codes, scale, zero, ranges, format_)


def super_blocks(dtype: torch.dtype) -> Term:
    """Random bytes with steps of 1, which are float16 whatever the dtype of the model."""
    format_ = KQuant(type="q4_k")
    held = torch.randint(
        256, (ROWS, format_.layout.size), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)
    )
    held[:, :4] = torch.ones(ROWS, 2, dtype=torch.float16).view(torch.uint8)
    return KBlocks(held, format_)


def trellis(dtype: torch.dtype) -> Term:
    """Runs of 10 rows, and a short one."""
    format_, draw = TrellisCodes(bits=3, run=10), torch.Generator().manual_seed(8)
    size = (format_.code.stored_rows(ROWS), COLUMNS)
    states = format_.code.states(torch.randint(8, size, dtype=torch.uint8, generator=draw), ROWS)
    return Trellised(states, torch.rand(ROWS, generator=draw).to(dtype), format_)


def act_order(dtype: torch.dtype) -> Term:
    format_ = ActOrder(grid=Grid(bits=4, **GROUPS))
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(7))
    return InOrderOfGroups(codes(format_, dtype), (order // 16).to(torch.int32), format_)


LEVELS = {
    "E2M1, powers of two": MXFP4,
    "E2M3": MXFP6,
    "E3M2": MXFP6E3M2,
    "e4m3 in groups": MXFP8,
    "E2M1, float8 scales": NVFP4,
    "E2M1, as ModelOpt has it": ModelOptNVFP4,
    "NF4": NF4,
    "NF4, float32 scales": NF4Float32,
    "IQ4_NL": IQ4NL,
}
# Formats that compute in float32, whatever dtype the model has.
IN_FLOAT32 = {"super-blocks", *LEVELS} - {"NF4", "IQ4_NL"}
TERMS: dict[str, Callable[[torch.dtype], Term]] = {
    **{name: lambda dtype, kind=kind: codes(kind(grid=kind.on), dtype) for name, kind in LEVELS.items()},
    "packed": lambda dtype: codes(Packed(grid=Grid(bits=3, **GROUPS)), dtype),
    "packed, asymmetric": lambda dtype: codes(Packed(grid=Grid(bits=4, symmetric=False, **GROUPS)), dtype),
    "int8 rows": lambda dtype: codes(Int8Rows(grid=Grid(bits=8)), dtype),
    "int8 table": lambda dtype: codes(Int8Table(grid=Grid(bits=8, symmetric=False, **GROUPS)), dtype),
    "float8 rows": lambda dtype: codes(Float8Rows(grid=Grid(bits=8, type="float")), dtype),
    "float8, blocks": lambda dtype: codes(Float8Blocks(grid=BLOCKS), dtype),
    "float8, blocks as they are published": lambda dtype: codes(FineGrained(grid=BLOCKS), dtype),
    "float8, one scale": lambda dtype: codes(Float8Rows(grid=Grid(bits=8, type="float", granularity="tensor")), dtype),
    "packed, 4 bits": lambda dtype: codes(Packed(grid=Grid(bits=4, **GROUPS)), dtype),
    "packed, 3 bits, asymmetric": lambda dtype: codes(Packed(grid=Grid(bits=3, symmetric=False, **GROUPS)), dtype),
    "packed, a scale per channel": lambda dtype: codes(Packed(grid=Grid(bits=8)), dtype),
    "packed, act-order": act_order,
    "ternary": lambda dtype: codes(TernaryCodes(grid=Grid(bits=2, narrow=True, **GROUPS)), dtype),
    "ternary, a scale per channel": lambda dtype: codes(TernaryCodes(grid=Grid(bits=2, narrow=True)), dtype),
    "binary": lambda dtype: codes(BinaryCodes(grid=Grid(bits=1, type="sign", **GROUPS)), dtype),
    "low rank": low_rank,
    "low rank, 8 bits": low_rank_codes,
    "low rank, nothing": lambda dtype: low_rank_of(
        torch.zeros(ROWS, 0).double(), torch.zeros(ROWS, COLUMNS).double(), dtype
    ),
    "somebody's": somebodys,
    "sparse rows": sparse_rows,
    "2:4": lambda dtype: two_of_four(None, dtype),
    "2:4, packed": lambda dtype: two_of_four(Grid(bits=4, **GROUPS), dtype),
    "2:4, packed, asymmetric": lambda dtype: two_of_four(Grid(bits=3, symmetric=False, **GROUPS), dtype),
    "2:4, packed, 8 bits": lambda dtype: two_of_four(Grid(bits=8), dtype),
    "2:4, packed, 6 bits, asymmetric": lambda dtype: two_of_four(Grid(bits=6, symmetric=False, **GROUPS), dtype),
    "tiles": tiles,
    "super-blocks": super_blocks,
    "trellis": trellis,
    "dense": lambda dtype: dense(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2)).to(dtype)),
}
SUMS: dict[str, Callable[[torch.dtype], Weight]] = {
    **{name: lambda dtype, make=make: Weight((make(dtype),)) for name, make in TERMS.items()},
    "packed + low rank": lambda dtype: Weight((TERMS["packed"](dtype), low_rank(dtype))),
    "packed + low rank of 8 bits + sparse rows": lambda dtype: Weight(
        (TERMS["packed"](dtype), low_rank_codes(dtype), sparse_rows(dtype))
    ),
    "binary + ternary": lambda dtype: Weight((TERMS["binary"](dtype), TERMS["ternary"](dtype))),
    "2:4, packed + sparse rows": lambda dtype: Weight((TERMS["2:4, packed"](dtype), sparse_rows(dtype))),
    "tiles + sparse rows": lambda dtype: Weight((tiles(dtype), sparse_rows(dtype))),
    "low rank + packed + packed": lambda dtype: Weight(
        (low_rank(dtype), TERMS["packed"](dtype), TERMS["packed, asymmetric"](dtype))
    ),
}


def test_every_format_is_here():
    assert {type(make(torch.float32).format) for make in TERMS.values()} == set(FORMATS.values())
    assert set(FORMATS) - OURS == {"svd"}


def test_every_tensor_of_ours_is_counted_as_something():
    """Of somebody else's format under its own name."""
    formats = {name: make(torch.float32).format for name, make in TERMS.items()}
    known = {name: {part.role is not None for part in f.parts(ROWS, COLUMNS).values()} for name, f in formats.items()}
    assert known == {name: {f.kind in OURS} for name, f in formats.items()}


@pytest.mark.parametrize("name", TERMS)
def test_a_format_announces_exactly_the_tensors_of_its_term(name):
    for dtype in DTYPES:
        term = TERMS[name](dtype)
        wanted = term.format.parts(*term.shape)
        for key, part in term.parts().items():
            assert tuple(part.shape) == wanted[key].shape, (key, dtype)
            assert part.dtype in wanted[key].dtypes, (key, dtype)
        assert set(term.parts()) <= set(wanted)
        assert all(wanted[key].optional for key in set(wanted) - set(term.parts()))
        assert term.format.whole is None or wanted[term.format.whole].shape == term.shape


@pytest.mark.parametrize("name", SUMS)
def test_disk_and_json_give_the_same_bits_back(name, tmp_path):
    for dtype in DTYPES:
        weight = SUMS[name](dtype)
        scheme, parts = scheme_of(weight), parts_of(weight)
        save_file(parts, tmp_path / "layer.safetensors")
        held = load_file(tmp_path / "layer.safetensors")
        again = read_entry(json.loads(json.dumps(scheme.entry())), "here")
        assert again == scheme
        check_parts("layer", {k: (tuple(t.shape), t.dtype) for k, t in held.items()}, again, (ROWS, COLUMNS))
        found = read_weight("layer", again, held, (ROWS, COLUMNS))
        assert found.dequantize().dtype == (torch.float32 if name in IN_FLOAT32 else dtype)
        assert torch.equal(found.dequantize(), weight.dequantize()), dtype


@pytest.mark.parametrize("name", [name for name in SUMS if name != "float8, one scale"])
def test_rows_apart_and_below_each_other_are_the_whole(name):
    weight = SUMS[name](torch.bfloat16)
    cut = [weight.rows(slice(first, last)) for first, last in ((0, 8), (8, 9), (9, ROWS))]
    assert torch.equal(torch.cat([part.dequantize() for part in cut]), weight.dequantize())
    assert torch.equal(Weight.stacked(cut).dequantize(), weight.dequantize())


@pytest.mark.parametrize("name", SUMS)
def test_a_layer_on_it_computes_its_values_and_saves_its_bits(name):
    weight = SUMS[name](torch.float32)
    scheme, parts = scheme_of(weight), parts_of(weight)
    layer = QuantLinear.from_parts(parts, scheme, (ROWS, COLUMNS), torch.randn(ROWS))
    x = torch.randn(5, COLUMNS)
    expected = nn.functional.linear(x, weight.dequantize(), layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.dequantize(), weight.dequantize())
    state = layer.state_dict()
    assert state.keys() == {*parts, "bias"}
    assert all(torch.equal(bits(state[key]), bits(part)) for key, part in parts.items())
    twin = QuantLinear.from_parts(parts, scheme, (ROWS, COLUMNS), torch.zeros(ROWS))
    twin.load_state_dict(state)
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("name", SUMS)
def test_what_is_missing_too_much_or_no_number_is_named(name):
    weight = SUMS[name](torch.float32)
    scheme, parts = scheme_of(weight), parts_of(weight)
    found = {key: (tuple(part.shape), part.dtype) for key, part in parts.items()}
    for key, part in scheme.parts(ROWS, COLUMNS).items():
        if not part.optional:
            with pytest.raises(CheckpointError, match=rf"layer\.{key} is missing"):
                check_parts("layer", {k: v for k, v in found.items() if k != key}, scheme, (ROWS, COLUMNS))
        with pytest.raises(CheckpointError, match=rf"layer\.{key} has shape"):
            check_parts("layer", {**found, key: ((7, 7), part.dtypes[0])}, scheme, (ROWS, COLUMNS))
    with pytest.raises(CheckpointError, match=r"layer\.other is no part of a layer stored as"):
        check_parts("layer", {**found, "other": ((1,), torch.float32)}, scheme, (ROWS, COLUMNS))
    for key in (key for key, part in parts.items() if part.is_floating_point() and part.numel()):
        damaged = {**parts, key: torch.full_like(parts[key], torch.nan)}
        with pytest.raises(CheckpointError, match=r"not finite numbers|not numbers"):
            read_weight("layer", scheme, damaged, (ROWS, COLUMNS))


def test_what_rounds_the_input_of_a_sum_rounds_it_for_every_term():
    weight = SUMS["packed + low rank"](torch.float32)
    tokens = Grid(bits=8, granularity="token")
    scheme = scheme_of(weight)
    layer = QuantLinear.from_parts(parts_of(weight), scheme, (ROWS, COLUMNS))
    rounding = QuantLinear.from_parts(parts_of(weight), replace(scheme, inputs=tokens), (ROWS, COLUMNS))
    x = torch.randn(5, COLUMNS)
    rounded = quantize(x, tokens, torch.float32).dequantize()
    assert torch.equal(rounding(x), layer(rounded))
    assert not torch.equal(rounding(x), layer(x))


@pytest.mark.parametrize("inputs", [Grid(bits=8, granularity="token"), Grid(bits=8, granularity="token", type="float")])
def test_gradients_of_a_sum_pass_as_if_nothing_were_rounded(inputs):
    weight = SUMS["packed + low rank"](torch.float32)
    layer = QuantLinear.from_quantized(weight, None, replace(scheme_of(weight), inputs=inputs))
    x = torch.randn(3, COLUMNS, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand(3, -1), rtol=1e-4, atol=1e-4)


def test_a_state_dict_is_copied_in_the_dtype_of_the_layer():
    weight = SUMS["low rank + packed + packed"](torch.float32)
    layer = QuantLinear.from_quantized(weight).to(torch.bfloat16)
    state = QuantLinear.from_quantized(weight).state_dict()
    layer.load_state_dict(state)
    assert {t.dtype for t in layer.state_dict().values() if t.is_floating_point()} == {torch.bfloat16}
    before = layer.dequantize()
    for tensor in state.values():
        tensor.zero_()
    assert torch.equal(layer.dequantize(), before)


def test_rows_that_share_a_part_cannot_be_decided_one_by_one():
    one, other = low_rank(torch.float32), low_rank(torch.float32)
    other.held["right"].add_(1)
    with pytest.raises(CompressError, match="differ in right of low-rank, which all rows share"):
        Weight.stacked([Weight((one,)), Weight((other,))])


@dataclass(frozen=True, kw_only=True)
class Nested(Format):
    """With fields that JSON turns into something else."""

    kind: ClassVar[str] = "nested"
    grid: Grid
    sizes: tuple[int, ...] = ()


def test_fields_of_a_format_come_back_as_they_were(monkeypatch):
    monkeypatch.setitem(FORMATS, "nested", Nested)
    scheme = Scheme(terms=(Nested(grid=Grid(bits=3, **GROUPS), sizes=(1, 2)),))
    assert read_entry(json.loads(json.dumps(scheme.entry())), "here") == scheme
