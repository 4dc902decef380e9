"""The benchmark on the CPU: what it writes, and that a wrong kernel is not timed."""

import json

import pytest
import torch

from compress.kernels import benchmark, ops


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(benchmark, "CACHE_BYTES", 1)


def run(tmp_path):
    out = tmp_path / "speed.json"
    benchmark.main(["--device", "cpu", "--shapes", "64x256", "--tokens", "1", "17", "--rounds", "3", "--out", str(out)])
    return json.loads(out.read_text())


def test_a_figure_comes_with_what_is_needed_to_quote_it(tmp_path):
    written = run(tmp_path)
    assert {"command", "commit", "modified", "device", "threads", "versions"} <= written.keys()
    assert written["versions"]["torch"] == torch.__version__
    assert {r["M"] for r in written["results"]} == {1, 17}
    timed = {r["candidate"]: r for r in written["results"] if "min_ms" in r}
    assert {"dense", "dense fp32", "w4a16", "w4a8", "w8a16", "w8a8"} <= timed.keys()
    for entry in timed.values():
        assert entry["rounds"] == 3
        assert 0 < entry["min_ms"] <= entry["median_ms"]
        assert entry["error_over_tolerance"] <= 1
    assert timed["dense"]["speedup_over_dense"] == 1


def test_a_wrong_kernel_is_not_timed(tmp_path, monkeypatch):
    right = ops.weight_only_linear
    monkeypatch.setattr(ops, "weight_only_linear", lambda *a: right(*a) * 1.05)
    entries = [r for r in run(tmp_path)["results"] if r["candidate"] == "w4a16"]
    assert [r.get("skipped") for r in entries] == ["wrong result"] * 2
    assert all(r["error_over_tolerance"] > 1 for r in entries)
    assert not any("min_ms" in r for r in entries)
