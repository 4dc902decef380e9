"""Runs that are killed at random moments: the output is absent or exactly complete, and a resumed run ends the same."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from commands import make_llama, save

import compress

KILLS = 10  # of each recipe
RECIPES: dict[str, Callable[[], Sequence[compress.Pass]]] = {
    "rtn": lambda: [compress.RTN(group_size=32)],
    "gptq": lambda: [compress.GPTQ(group_size=32)],
    "awq + gptq": lambda: [compress.AWQ(rounding="none", group_size=32), compress.GPTQ(group_size=32)],
    "embeddings": lambda: [compress.RTN(group_size=32), compress.Embeddings()],
    "caches": lambda: [compress.GPTQ(group_size=32), compress.KVCache(granularity="tensor")],
}
# Small weight files: a run can be killed between two of them, too.
RUN = """
import sys, torch
sys.path.insert(0, {tests!r})
import compress
from compress import shards
from test_kills import RECIPES, calibration
shards.SHARD_BYTES = 40_000
torch.set_num_threads(1)
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
passes = RECIPES[{name!r}]()
compress.quantize({model!r}, passes, output={out!r}, resume=True, overwrite=True, verify=False,
                  calibration=calibration(passes))
"""


def calibration(passes: Sequence[compress.Pass]) -> torch.Tensor | None:
    ids = torch.randint(2048, (8, 32), generator=torch.Generator().manual_seed(0))
    return ids if any(p.calibrated for p in passes) else None


def files(path: Path) -> dict[str, bytes]:
    """Every file but the record, which holds times."""
    return {p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.name != "compress.json"}


def started(script: str) -> subprocess.Popen[str]:
    """A process that has imported everything and waits for a line."""
    running = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    return running


def go(running: subprocess.Popen[str]) -> None:
    assert running.stdin is not None
    running.stdin.write("\n")
    running.stdin.flush()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_killed_at_any_moment_leaves_nothing_half(name: str, tmp_path: Path) -> None:
    """The first run is whole; each of the others is killed at a random share of its time, until one ends by itself."""
    chance = random.Random(name)
    source = save(make_llama(num_hidden_layers=3).half(), tmp_path / "in")
    script = {
        out: RUN.format(tests=str(Path(__file__).parent), name=name, model=str(source), out=str(tmp_path / out))
        for out in ("whole", "out")
    }
    with started(script["whole"]) as running:
        began = time.monotonic()
        go(running)
        assert running.wait() == 0
        length = time.monotonic() - began
    expected = files(tmp_path / "whole")
    landed = {"before": 0, "with blocks": 0, "after": 0}
    for _ in range(KILLS):
        with started(script["out"]) as running:
            go(running)
            time.sleep(chance.random() * length)
            os.kill(running.pid, signal.SIGKILL)
            running.wait()
        out, progress = tmp_path / "out", tmp_path / "out.partial" / "progress.json"
        if out.exists():
            assert files(out) == expected
            record = json.loads((out / "compress.json").read_text())
            assert {p.name for p in out.iterdir()} == {"compress.json", *record["files"]}
            landed["after"] += 1
        else:
            blocks = progress.exists() and json.loads(progress.read_text())["blocks"]
            landed["with blocks" if blocks else "before"] += 1
    with started(script["out"]) as running:
        go(running)
        assert running.wait() == 0
    assert files(tmp_path / "out") == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out", "whole"]
    print(f"{name}: {KILLS} kills within {length:.2f} s: {landed}")
