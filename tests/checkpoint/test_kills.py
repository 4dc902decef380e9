"""Runs that are killed at random moments: the output is absent or exactly complete, and a resumed run ends the same."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from commands import fast_gptq, make_llama, save
from places import SUPPORT

import compress

HERE = [str(SUPPORT), str(Path(__file__).parent)]
KILLS = 10  # of each recipe
RECIPES: dict[str, Callable[[], Sequence[compress.Pass]]] = {
    "rtn": lambda: [compress.RTN(group_size=32)],
    "gptq": lambda: [fast_gptq(group_size=32)],
    "gptq for the loss": lambda: [fast_gptq(group_size=32, objective="loss")],
    "awq + gptq": lambda: [compress.AWQ(rounding="none", group_size=32), fast_gptq(group_size=32)],
    "embeddings": lambda: [compress.RTN(group_size=32), compress.Embeddings()],
    "caches": lambda: [fast_gptq(group_size=32), compress.KVCache(granularity="tensor")],
}
# Small weight files: a run can be killed between two of them, too. It ends itself at the given number of things that it
# asks of the file system about its output, or is ended from outside.
RUN = """
import os, signal, sys, torch
sys.path[:0] = {tests!r}
import compress
from test_kills import RECIPES, calibration
torch.set_num_threads(1)
passes = RECIPES[{name!r}]()
compress.quantize  # imported before the clock runs
asked, last = 0, int(sys.argv[1])
def counted(event, arguments):
    global asked
    if event == "open" or event.startswith(("os.", "shutil.")):
        if any(isinstance(a, (str, os.PathLike)) and os.fspath(a).startswith({out!r}) for a in arguments):
            asked += 1
            if asked == last:
                os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
sys.addaudithook(counted)
compress.quantize({model!r}, passes, output={out!r}, resume=True, overwrite=True, verify=False,
                  shard_size=40_000, calibration=calibration(passes))
print(asked)
"""


def calibration(passes: Sequence[compress.Pass]) -> torch.Tensor | None:
    ids = torch.randint(2048, (8, 32), generator=torch.Generator().manual_seed(0))
    return ids if any(p.calibrated for p in passes) else None


def files(path: Path) -> dict[str, bytes]:
    """Every file but the record, which holds times."""
    return {p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.name != "compress.json"}


def started(script: str, last: int = 0) -> subprocess.Popen[str]:
    """A process that has imported everything and waits for a line; then it goes on to its `last` access (0: to the
    end)."""
    words = [sys.executable, "-c", script, str(last)]
    running = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    return running


def go(running: subprocess.Popen[str]) -> None:
    assert running.stdin is not None
    running.stdin.write("\n")
    running.stdin.flush()


def finished(script: str) -> tuple[float, int]:
    """Run to the end: (seconds, accesses)."""
    with started(script) as running:
        began = time.monotonic()
        go(running)
        assert running.stdout is not None
        asked = running.stdout.read()
        assert running.wait() == 0
        return time.monotonic() - began, int(asked)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_killed_at_any_moment_leaves_nothing_half(name: str, tmp_path: Path) -> None:
    """Every second run is killed when it next asks something of the file system, the others at a random time; an output
    that is complete is kept for the next run to replace, or taken away."""
    chance = random.Random(name)
    source = save(make_llama(num_hidden_layers=3).half(), tmp_path / "in")
    out, progress = tmp_path / "out", tmp_path / "out.partial" / "progress.json"
    whole, script = (
        RUN.format(
            tests=[str(SUPPORT), str(Path(__file__).parent)], name=name, model=str(source), out=str(tmp_path / target)
        )
        for target in ("whole", "out")
    )
    length, asked = finished(whole)
    expected = files(tmp_path / "whole")
    landed = {"nothing": 0, "unfinished": 0, "complete": 0}
    for kill in range(KILLS):
        with started(script, chance.randint(1, asked) if kill % 2 else 0) as running:
            go(running)
            if not kill % 2:
                time.sleep(chance.random() * length)
                os.kill(running.pid, signal.SIGKILL)
            running.wait()
        if out.exists():
            assert files(out) == expected
            record = json.loads((out / "compress.json").read_text())
            assert {p.name for p in out.iterdir()} == {"compress.json", *record["files"]}
            landed["complete"] += 1
            if chance.random() < 0.7 and not progress.exists():
                shutil.rmtree(out)
        else:
            blocks = progress.exists() and json.loads(progress.read_text())["blocks"]
            landed["unfinished" if blocks else "nothing"] += 1
    finished(script)
    assert files(out) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out", "whole"]
    print(f"{name}: {KILLS} kills within {length:.2f} s and {asked} accesses: {landed}")
