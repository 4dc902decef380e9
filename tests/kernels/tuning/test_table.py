"""The table of measured configurations: what is found for which sizes, and what a table that cannot be read does."""

import json
from dataclasses import replace

import pytest

from compress.base.errors import InputError
from compress.kernels.tuning import choose as shapes
from compress.kernels.tuning import table
from compress.kernels.tuning.choose import Device
from compress.kernels.tuning.table import DEQUANTIZE, ProductKind, Shape, TunedEntry

H200 = Device(("NVIDIA H200", "9.0"), 132, 90)
KIND = ProductKind("weight_only", 4, 128, False, "bfloat16")
ENTRY = TunedEntry(KIND, "NVIDIA H200", 16, 4096, 4096, Shape(16, 64, 4, 4, 3), {"median_ms": 0.01})


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A cache directory and a shipped table of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped.json")
    table.forget()
    yield tmp_path
    table.forget()


def run_of(M=16, N=4096, K=4096, device=H200, **other):
    return shapes.choose(replace(KIND, **other), M, N, K, device)


def test_what_was_written_is_found():
    table.write(table.user_table(), [ENTRY], "test")
    assert [run_of(M) for M in (9, 13, 16)] == [ENTRY.run] * 3
    for other in (run_of(8), run_of(17), run_of(device=Device(("NVIDIA L4", "8.9")))):
        assert other != ENTRY.run
    for other in ({"bits": 8}, {"group_size": 64}, {"zero": True}, {"dtype": "float16"}):
        assert run_of(**other) == shapes.derived(replace(KIND, **other), 16, 4096, 4096, H200) != ENTRY.run
    (back,) = table.read(table.user_table())
    assert back == ENTRY
    assert back.measured == ENTRY.measured


def test_without_an_entry_the_shape_is_derived():
    assert run_of() == shapes.fused(16, 4096, 4096, 4, 128, H200)
    assert run_of(shapes.DEQUANTIZE_TOKENS) == DEQUANTIZE
    assert run_of(op="w8a8", bits=8, group_size=-1) == shapes.fused_w8a8(16, 4096, 4096, H200)


def test_a_measured_fused_kernel_beats_the_derived_dequantization():
    table.write(table.user_table(), [replace(ENTRY, M=4096, run=Shape(128, 256, num_warps=8))], "test")
    assert run_of(4096) == Shape(128, 256, num_warps=8)
    table.write(table.user_table(), [replace(ENTRY, M=64, run=DEQUANTIZE)], "test")
    assert run_of(64) == DEQUANTIZE


def test_int8_products_have_entries_too():
    kind = ProductKind("w8a8", 8, -1, True, "float16")
    entry = TunedEntry(kind, "9.0", 64, 4096, 4096, Shape(64, 256, num_warps=8))
    table.write(table.user_table(), [entry], "test")
    assert shapes.choose_shape(kind, 33, 4096, 4096, H200) == entry.run


def test_sizes_of_the_same_class_take_the_nearest_entry():
    near, far = (replace(ENTRY, N=N, run=Shape(16, 128, split)) for N, split in ((4096, 2), (5120, 4)))
    table.write(table.user_table(), [far, near], "test")
    assert run_of(N=4224) == near.run
    assert run_of(N=5000) == far.run
    assert run_of(N=8192) == shapes.fused(16, 8192, 4096, 4, 128, H200)


def test_the_users_table_comes_before_the_shipped_one_and_a_name_before_a_capability():
    table.write(table.SHIPPED, [ENTRY], "test")
    assert run_of() == ENTRY.run
    general = replace(ENTRY, device="9.0", run=Shape(16, 256))
    table.write(table.user_table(), [general], "test")
    assert run_of() == ENTRY.run
    assert run_of(device=Device(("NVIDIA H100", "9.0"))) == general.run
    mine = replace(ENTRY, run=Shape(16, 128, 8))
    table.write(table.user_table(), [mine], "test")
    assert run_of() == mine.run


def test_writing_replaces_the_same_sizes_and_keeps_the_rest():
    table.write(table.user_table(), [ENTRY, replace(ENTRY, M=32)], "test")
    table.write(table.user_table(), [replace(ENTRY, run=DEQUANTIZE)], "test")
    assert [(e.M, e.run) for e in table.read(table.user_table())] == [(16, DEQUANTIZE), (32, ENTRY.run)]
    assert [p.name for p in table.user_table().parent.iterdir()] == ["tuned.json"]


def test_an_entry_that_a_neighbour_has_no_counters_for_is_not_used():
    """Splitting needs a counter per tile: what 40000 outputs can do, 60000 of the same class cannot."""
    entry = replace(ENTRY, N=30000, run=Shape(16, 64, 2))
    table.write(table.user_table(), [entry], "test")
    assert run_of(N=32000) == entry.run
    assert run_of(N=40000) == shapes.fused(16, 40000, 4096, 4, 128, H200)


def changed(**fields):
    entry = {"op": "weight_only", "bits": 4, "group_size": 128, "zero": False, "dtype": "float16"}
    entry |= {"device": "9.0", "M": 16, "N": 64, "K": 64}
    entry = entry | {"run": {"block_m": 16, "block_n": 64}} | fields
    return json.dumps({"format": 2, "entries": [entry]})


MALFORMED = {
    "not JSON": "{",
    "not a table of format 2": "[]",
    "no list of entries": '{"format": 2}',
    "op 'gemm'; allowed: weight_only, int8_activation, w8a8": changed(op="gemm"),
    "M 17 is not a power of two": changed(M=17),
    "N '64' is not a size": changed(N="64"),
    "group_size -2 is not a size": changed(group_size=-2),
    "w8a8 cannot dequantize": changed(op="w8a8", run="dequantize"),
    "run 'fast'": changed(run="fast"),
    "block_m 24; allowed: a power of two": changed(run={"block_m": 24, "block_n": 64}),
    "block_n 8; at least 16": changed(run={"block_m": 16, "block_n": 8}),
    "zero 1; allowed": changed(zero=1),
    "dtype 'int8'; allowed": changed(dtype="int8"),
    "num_warps True": changed(run={"block_m": 16, "block_n": 64, "num_warps": True}),
}


@pytest.mark.parametrize("problem", MALFORMED)
def test_a_malformed_table_is_left_out_with_the_reason(problem):
    path = table.user_table()
    path.parent.mkdir(parents=True)
    path.write_text(MALFORMED[problem])
    with pytest.warns(UserWarning, match="left out") as given:
        assert run_of() == shapes.fused(16, 4096, 4096, 4, 128, H200)
    assert problem in str(given[0].message)
    assert str(path) in str(given[0].message)
    with pytest.raises(InputError, match="delete the file or write it again"):
        table.write(path, [ENTRY], "test")


def test_the_shipped_table_is_read_and_says_where_it_was_measured(monkeypatch):
    monkeypatch.undo()
    entries = table.read(table.SHIPPED)
    assert entries
    assert all(entry.measured["device"] and entry.measured["median_ms"] > 0 for entry in entries)
    assert "commit" in json.loads(table.SHIPPED.read_text())["about"]
