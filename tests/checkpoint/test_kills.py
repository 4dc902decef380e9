"""Runs and exports that are killed at random moments: the output is absent, as it was, or exactly complete, and another
run ends the same."""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import LAYOUTS
from commands import fast_gptq, make_llama, save
from places import SUPPORT

import compress
from compress.checkpoint.export.registry import EXPORTERS

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


def exported(source: Path, out: Path, to: str, last: int | None = None, after: float | None = None) -> int:
    """The accesses of an export to its output, made by a child of this process; 0 of one that was killed, at its `last`
    access or after so many seconds."""
    reads, writes = os.pipe()
    if not (child := os.fork()):
        asked = 0

        def counted(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal asked
            if event == "open" or event.startswith(("os.", "shutil.")):
                paths = [os.fspath(each) for each in arguments if isinstance(each, str | os.PathLike)]
                asked += any(str(path).startswith(str(out)) for path in paths)
                if asked == last:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(counted)
            compress.export(source, out, to, overwrite=True, verify=False)
            os.write(writes, str(asked).encode())
        finally:
            os._exit(0)
    os.close(writes)
    if after is not None:
        select.select([reads], [], [], after)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reads, "rb") as file:
        told = file.read()
    os.waitpid(child, 0)
    return int(told or 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # of torch, about forks of this process
@pytest.mark.parametrize("to", EXPORTERS)
def test_an_export_killed_at_any_moment_leaves_the_former_or_the_new_output(to: str, tmp_path: Path) -> None:
    """Every second export is killed when it next asks something of the file system, the others at a random time."""
    torch.set_num_threads(1)  # a child of this process has no others
    chance, sources = random.Random(to), []
    for layers in (1, 2):
        model = save(make_llama(num_hidden_layers=layers).half(), tmp_path / f"in{layers}")
        passes = LAYOUTS.get(to, compress.RTN(group_size=32))
        sources.append(tmp_path / f"small{layers}")
        compress.quantize(model, passes, output=sources[-1], verify=False, ignore=["*.down_proj"])
    out, aside = tmp_path / "out", tmp_path / "out.partial" / "replaced"
    compress.export(sources[0], out, to, verify=False)  # here, so that children find everything imported
    former = files(out)
    shutil.copytree(out, tmp_path / "former")
    began = time.monotonic()
    asked = exported(sources[1], tmp_path / "whole", to)
    length, expected = time.monotonic() - began, files(tmp_path / "whole")
    assert asked > KILLS
    ends = {"former": 0, "aside": 0, "new": 0}
    for kill in range(KILLS):
        if kill % 2:
            exported(sources[1], out, to, last=chance.randint(1, asked))
        else:
            exported(sources[1], out, to, after=chance.random() * length)
        if not out.exists():
            assert files(aside) == former
            ends["aside"] += 1
            continue
        found = files(out)
        assert found in (former, expected)
        ends["new" if found == expected else "former"] += 1
        if found == expected:
            shutil.rmtree(out)
            shutil.copytree(tmp_path / "former", out)
    assert exported(sources[1], out, to)
    assert files(out) == expected
    assert {path.name for path in out.iterdir()} == {
        "compress.json",
        *json.loads((out / "compress.json").read_text())["files"],
    }
    assert not (tmp_path / "out.partial").exists()
    print(f"{to}: {KILLS} kills within {length:.2f} s and {asked} accesses: {ends}")
