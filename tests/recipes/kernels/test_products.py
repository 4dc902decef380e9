"""The measurement of linear layers on the CPU: that a wrong kernel is not timed, and what a time is held against."""

import itertools

import pytest
import torch
from planar import spoil

from compress.recipes.studies.kernels import ceilings, products, roofline, timing

CPU = torch.device("cpu")
# A machine that moves 100 GB/s and computes 1 TFLOP/s, 4 TOP/s in unsigned int8.
FAKE = {
    "copy": {"per_s": 100e9},
    "read": {"per_s": 80e9},
    "bfloat16": {"per_s": 1e12},
    "int8": {"per_s": 2e12},
    "uint8": {"per_s": 4e12},
    "float16": {"skipped": "no such product"},
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(products, "CACHE_BYTES", 1)
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(ceilings, "SIDE", {"cpu": 32})
    monkeypatch.setattr(ceilings, "MAX_ROUNDS", 20)


def measure(tokens=(1, 17), K=256):
    return [e for M in products.measure(64, K, tokens, torch.bfloat16, CPU, 3, FAKE) for e in M]


def test_every_candidate_is_timed_or_has_a_reason():
    entries = measure()
    assert {e["M"] for e in entries} == {1, 17}
    timed = {e["candidate"]: e for e in entries if "time_ms" in e}
    assert {
        "dense",
        "dense fp32",
        "w4a16",
        "w4a8",
        "w8a16",
        "w8a8",
        "2:4",
        "2:4 w8a16",
        "2:4 w4a16",
        "mxfp4a16",
        "nvfp4a16",
        "nf4a16",
        "trellis, 2 bits",
        "trellis, 3 bits",
        "torch._int_mm",
        "torch._weight_int4pack_mm",
    } <= timed.keys()
    for entry in timed.values():
        assert entry["rounds"] == 3
        assert 0 < entry["min_ms"] <= entry["median_ms"]
        assert entry["time_ms"] == entry["min_ms"]  # a CPU's figure is its minimum
        assert entry["error_over_tolerance"] <= 1
    assert all(e.get("skipped") for e in entries if "time_ms" not in e)


def test_a_library_that_is_not_there_is_a_reason():
    reasons = {e["skipped"] for e in measure() if e["candidate"] == "gemlite w4a16"}
    assert all("gemlite" in reason for reason in reasons)
    assert len(reasons) == 1


@pytest.mark.parametrize("kind", roofline.FLOAT8_KINDS)
def test_float8_products_are_held_to_inputs_as_they_round_them(kind):
    """Timed on a GPU alone."""
    weight, x = products.BenchmarkOperands(130, 384, torch.bfloat16, CPU, 0), torch.randn(5, 384).bfloat16()
    out = weight.floats8.product(kind, x)
    assert products.error_of(out, x, weight, kind) <= 1 < products.error_of(1.05 * out, x, weight, kind)


@pytest.mark.first
@pytest.mark.parametrize("K", [256, 4096])
def test_a_wrong_kernel_is_not_timed(monkeypatch, K):
    spoil(monkeypatch, 1.05)
    entries = [e for e in measure(K=K) if e["candidate"] == "w4a16"]
    assert [e.get("skipped") for e in entries] == [products.WRONG] * 2
    assert all(e["error_over_tolerance"] > 1 for e in entries)
    assert not any("time_ms" in e for e in entries)


def test_a_kernel_that_returns_what_is_not_a_number_is_wrong(monkeypatch):
    spoil(monkeypatch, float("nan"))
    assert {e.get("skipped") for e in measure() if e["candidate"] == "w4a16"} == {products.WRONG}


def test_ratios_are_to_dense_and_to_libraries_with_weights_as_wide():
    timed = {e["candidate"]: e for e in measure((1,)) if "time_ms" in e}
    assert set(timed["w4a16"]["speedup_over"]) == {"dense", "torch._weight_int4pack_mm"}
    assert set(timed["w8a8"]["speedup_over"]) == {"dense", "torch._int_mm"}
    assert set(timed["torch._int_mm"]["speedup_over"]) == {"dense"}
    assert timed["dense"]["speedup_over"] == {}
    assert set(timed["2:4"]["speedup_over"]) == {"dense"}
    assert set(timed["2:4 w4a16"]["speedup_over"]) == {"dense", "w4a16"}
    ratio = timed["dense"]["time_ms"] / timed["w4a16"]["time_ms"]
    assert timed["w4a16"]["speedup_over"]["dense"] == ratio


def test_candidates_that_share_a_weight_do_not_meet_at_one_copy():
    used = []
    calls = {name: [lambda name=name, i=i: used.append((name, i)) for i in range(4)] for name in "ab"}
    timing.time_cpu(calls, 4)
    rounds = [used[2 + 2 * turn : 4 + 2 * turn] for turn in range(4)]  # after one call each to warm up
    assert all(first[1] != second[1] for first, second in rounds)
    assert {i for _, i in used[2:]} == {0, 1, 2, 3}


def test_turns_are_taken_after_a_warm_up_and_each_begins_untimed(monkeypatch):
    """A GPU's candidates: as on a CPU, none has a part of the run to itself."""
    used, timed, clock = [], [], itertools.count()
    monkeypatch.setattr(timing, "elapsed_ms", lambda run, device: timed.append(len(used)) or run() or len(timed))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock) * timing.WARM_SECONDS / 4)
    times = timing.take_turns({name: lambda name=name: used.append(name) for name in "abc"}, 2, CPU)
    assert "".join(used) == "abca" + "aabbcc" * 2
    assert timed[4:] == [5, 7, 9, 11, 13, 15]  # the second call of each turn
    assert times == {"a": [5, 8], "b": [6, 9], "c": [7, 10]}


# --- arithmetic, with made-up ceilings -----------------------------------------------------------------------------


def test_what_a_product_costs():
    dense = roofline.cost("dense", 1, 1000, 2048, 2, "bfloat16", 128)
    assert dense == ceilings.CallCost(2 * (1000 * 2048 + 2048 + 1000), 2 * 1000 * 2048, "bfloat16")
    wide = roofline.cost("dense fp32", 1, 1000, 2048, 2, "bfloat16", 128)
    assert wide == ceilings.CallCost(2 * dense.bytes, dense.operations, "float32")
    narrow = roofline.cost("w4", 1, 1000, 2048, 2, "bfloat16", 128)
    assert narrow.bytes == 1000 * 2048 // 2 + 2 * 1000 * 16 + 2 * (2048 + 1000)
    assert roofline.cost("w8", 4, 10, 128, 2, "bfloat16", 128).bytes == 10 * 128 + 2 * 10 + 2 * 4 * (128 + 10)
    assert roofline.cost("w8a8", 4, 10, 128, 2, "bfloat16", 128).bytes == 10 * 128 + 4 * 10 + 2 * 4 * (128 + 10)
    halves = [roofline.cost(kind, 1, 16, 128, 2, "bfloat16", 128).bytes for kind in roofline.HALVED_KINDS]
    assert halves == [n + 2 * (128 + 16) for n in (16 * 128 * 9 // 8, 16 * 128 * 5 // 8 + 32, 16 * 128 * 3 // 8 + 32)]
    groups = [roofline.cost(kind, 1, 16, 128, 2, "bfloat16", 128).bytes for kind in ("mxfp4", "nvfp4", "trellis 3")]
    assert groups == [n + 2 * (128 + 16) for n in (1024 + 2 * 64, 1024 + 2 * 128, 768 + 32)]
    floats = [roofline.cost(kind, 1, 128, 256, 2, "bfloat16", 128) for kind in roofline.FLOAT8_KINDS]
    assert [need.bytes for need in floats] == [128 * 256 + n + 2 * (128 + 256) for n in (4 * 128, 4 * 2)]
    assert {need.arithmetic for need in floats} == {"float8"}
    integers = roofline.cost("int32", 4, 10, 128, 2, "bfloat16", 128)
    assert integers == ceilings.CallCost(10 * 128 + 4 * 128 + 4 * 4 * 10, 2 * 4 * 10 * 128, "int8")


def test_every_candidate_has_a_cost():
    for _, kind in products.candidates(torch.zeros(1, 128, dtype=torch.bfloat16)).values():
        assert roofline.cost(kind, 1, 64, 128, 2, "bfloat16", 128).bytes > 0


def test_the_ceiling_that_binds():
    moving = ceilings.CallCost(10**9, 10**9, "bfloat16")  # 10 ms at 100 GB/s, 1 ms at 1 TFLOP/s
    assert ceilings.limit(moving, FAKE) == (pytest.approx(10.0), "memory")
    computing = ceilings.CallCost(10**6, 10**10, "bfloat16")
    assert ceilings.limit(computing, FAKE) == (pytest.approx(10.0), "compute")
    assert ceilings.limit(ceilings.CallCost(10**6, 10**10, "int8"), FAKE) == (pytest.approx(2.5), "compute")
    found = ceilings.achieved(moving, 20.0, FAKE)
    assert found["share"] == pytest.approx(0.5)
    assert found["bytes_per_s"] == pytest.approx(50e9)
    assert found["operations_per_s"] == pytest.approx(50e9)


def test_there_is_no_share_without_a_ceiling():
    found = ceilings.achieved(ceilings.CallCost(10, 10, "float16"), 1.0, FAKE)
    assert (found["share"], found["bound"], found["limit_ms"]) == (None, None, None)
    assert found["bytes_per_s"] > 0


def test_ceilings_are_measured_or_have_a_reason(monkeypatch):
    monkeypatch.setattr(ceilings, "_float_call", lambda *a: lambda: (_ for _ in ()).throw(RuntimeError("not\nhere")))
    found = ceilings.measure_ceilings(CPU)
    unsigned = found["uint8"].get("skipped", "")
    if "Expected self dtype to be of type int8" in unsigned:  # torch 2.11
        del found["uint8"]
    measured = {name for name, entry in found.items() if "per_s" in entry}
    assert measured == {"copy", "read", "int8", "uint8"} & set(found)
    assert all(entry["per_s"] > 0 and entry["rounds"] >= 20 for entry in found.values() if "per_s" in entry)
    assert {entry["skipped"] for entry in found.values() if "skipped" in entry} == {"RuntimeError: not"}
