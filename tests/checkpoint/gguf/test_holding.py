"""Which block holds a layer, and what is said where none does."""

import pytest

from compress.checkpoint.export.gguf.block_types import why_not
from compress.weights.formats.act_order import ActOrder
from compress.weights.formats.codes import Int8Rows, Packed
from compress.weights.formats.sparse import SparseRows
from compress.weights.formats.ternary import BinaryCodes, TernaryCodes
from compress.weights.grid import Grid
from compress.weights.scheme import Scheme
from compress.weights.terms import Format


def groups(bits: int, size: int, **more: object) -> Grid:
    return Grid(bits=bits, granularity="group", group_size=size, **more)


def ternary(size: int) -> Format:
    return TernaryCodes(grid=groups(2, size, narrow=True))


def binary(size: int) -> Format:
    return BinaryCodes(grid=groups(1, size, type="sign"))


ASYMMETRIC = {"symmetric": False}


@pytest.mark.parametrize(
    ("terms", "columns", "says"),
    [
        ((Packed(grid=groups(4, 32)),), 96, None),
        ((Packed(grid=groups(7, 64, **ASYMMETRIC)),), 128, None),
        ((Packed(grid=Grid(bits=3)),), 96, None),
        ((ternary(512),), 1024, None),
        ((binary(128),), 384, None),
        ((Packed(grid=groups(4, 48)),), 96, "groups of 48; Q4_0 takes multiples of 32: quantize with --group-size 32"),
        ((Packed(grid=Grid(bits=4)),), 100, "has 100 inputs; Q4_0 takes multiples of 32"),
        ((Packed(grid=groups(8, 32, **ASYMMETRIC)),), 64, "asymmetric codes of 8 bits, which no block holds; quantize"),
        ((ternary(128),), 256, "has groups of 128; TQ2_0 takes multiples of 256: quantize with --group-size 256"),
        ((ternary(32),), 96, "has 96 inputs; TQ2_0 takes multiples of 256"),
        ((binary(64),), 128, "has groups of 64; Q1_0 takes multiples of 128"),
        ((Packed(grid=groups(4, 32)), SparseRows(entries=1)), 64, "is a sum (pack-quantized + sparse"),
        ((ActOrder(grid=groups(4, 32)),), 64, "has inputs that belong to groups in any order"),
        ((Int8Rows(grid=Grid(bits=8)),), 64, "for which GGUF has no block; `--to dense` takes it"),
    ],
)
def test_one_line_says_why_no_block_holds_a_layer(terms, columns, says):
    found = why_not(Scheme(terms=terms), columns)
    assert found is None if says is None else says in found


def test_rounded_inputs_are_refused():
    scheme = Scheme(terms=(Packed(grid=groups(4, 32)),), inputs=Grid(bits=8, granularity="token"))
    assert "rounds its input" in why_not(scheme, 64)
