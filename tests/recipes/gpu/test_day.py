"""recipes/studies/gpu/day.py: every section in tiny sizes on a CPU, and what a section that is stopped leaves."""

import json
import os
import subprocess
import sys

import pytest
from places import ROOT

from compress.recipes.studies.gpu import day, decoding, ledger

WAYS = (("w4a16", False), ("w4a16", True), ("dense", False))  # scheme, and whether a block is launches of its own


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_section_runs_dry_and_leaves_its_file(tmp_path):
    words = [sys.executable, str(ROOT / "recipes/studies/gpu/day.py"), "--dry", "--seconds", "800", "--out"]
    done = subprocess.run([*words, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    ended = json.loads((tmp_path / "day.json").read_text(encoding="utf-8"))
    assert {about["ended"] for about in ended.values()} == {"done"}
    lines = [json.loads(line) for line in (tmp_path / "correct.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {kernel for line in lines[1:] for kernel in line["kernels"]} == ledger.KernelSources().hashes().keys()
    assert {line["outcome"] for line in lines[1:]} == {"passed"}
    decode, quantize, products = (
        json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("decode", "quantize", "products")
    )
    assert [(r["variant"], r["compiled"], r["steps"] is not None, r["batch"]) for r in decode["results"]] == [
        *((scheme, False, steps, batch) for scheme, steps in WAYS for batch in (1, 2)),
        *((scheme, compiled, False, 1) for scheme in ("w4a16", "dense") for compiled in (False, True)),
    ]
    assert all(r["step_ms"] > 0 and r["profile"]["step"]["launches"] > 0 for r in decode["results"])
    assert [(r["method"], r["blocks"]) for r in quantize["results"]] == [
        *(("gptq", 1), ("gptq", 2), ("rtn", 1), ("rtn", 2)),
    ]
    assert {"forward", "statistics", "solve", "write"} <= quantize["results"][1]["parts"].keys()
    assert products["complete"]
    assert (tmp_path / "steps.json").exists()
    assert len(done.stdout) < 12_000


@pytest.mark.full
def test_a_section_is_stopped_at_its_limit_with_all_that_it_started(tmp_path):
    started = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    words = (sys.executable, "-c", started + "print('begun', flush=True); time.sleep(60)")
    section = day.TimedSection("x", "x.json", 1.0, words, words)
    with (tmp_path / "log").open("w+", encoding="utf-8") as log:
        assert day.run(section, words, dict(os.environ), 2.0, log) == "stopped after 2 s"
    assert (tmp_path / "log").read_text(encoding="utf-8") == "begun\n"


def test_shares_are_those_of_the_whole_time(tmp_path):
    assert sum(section.share for section in day.sections(tmp_path)) == pytest.approx(1)


def test_gaps_are_the_time_between_kernels():
    """Two that overlap, then one after a gap: microseconds to milliseconds."""
    found = decoding.spent([("a", 0.0, 100.0), ("b", 50.0, 200.0), ("a", 500.0, 600.0)])
    assert (found["span_ms"], found["busy_ms"], found["gap_ms"], found["launches"]) == pytest.approx((0.6, 0.3, 0.3, 3))
    assert [(k["name"], k["count"]) for k in found["kernels"]] == [("a", 2), ("b", 1)]
    assert decoding.spent(())["launches"] == 0
