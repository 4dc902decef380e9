"""The CPU time of compiling the CPU kernels, and of those that a model needs at its first run.

    python recipes/studies/cost/first_run.py --json FILE [--rounds N]

`libraries`: CPU seconds of the compiler and linker for each library, the least of N rounds; libraries take turns.

`runs`: the commands below, one after the other, on the built-in model, with an empty cache. For each, the libraries
that it added, and the sum of their seconds: two compilers run side by side at most, so it waits for half of that at
least.

`native`: a product of 4096 x 4096 in a library compiled for this very processor, beside the same for its level of
instructions, as a wheel brings it (`kernels/cpu/prebuilt.py`): microseconds of one thread, in turns.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compress.kernels.cpu import build, gemm, prebuilt
from compress.kernels.cpu.processor import cpu_flags
from compress.kernels.layouts.strips import pack_strips
from compress.kernels.layouts.words import CodeWords
from compress.recipes.studies.cost.calls import Calls, measure
from compress.recipes.studies.figures import tell_times

SIZE, GROUP, TOKENS = 4096, 128, (1, 8, 64)
# w4a16 is one of the kinds that the command line makes without calibration.
QUANTIZE = ("quantize", "demo", "--scheme", "w4a16", "--output", "{out}")
RUNS = {
    "quantize, GPTQ": (*QUANTIZE, "--method", "gptq", "--calibration", "demo"),
    "generate": ("generate", "{out}", "--prompt", "The", "--tokens", "4"),
    "evaluate": ("evaluate", "{out}", "--text", "demo"),
}


def compile_seconds(name: str, folder: Path) -> float:
    """CPU seconds of making a library in an empty folder."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    build.built(folder, build.compilers()[0], build.flags_for("native"), name)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def libraries(rounds: int) -> dict[str, float]:
    """{library: CPU seconds}."""
    found: dict[str, list[float]] = {name: [] for name in build.names_here()}
    for _ in range(rounds):
        for name, seconds in found.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds.append(compile_seconds(name, Path(folder)))
            print(f"{name:32s} {min(seconds):5.2f} s", file=sys.stderr)
    return {name: min(seconds) for name, seconds in found.items()}


def first_runs(seconds: dict[str, float]) -> dict[str, Any]:
    """{command: libraries that it compiled, and their CPU seconds}."""
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "COMPRESS_CACHE_DIR": f"{place}/cache", "COMPRESS_CPU_KERNELS": "compile"}
        before: set[str] = set()
        for title, words in RUNS.items():
            line = [sys.executable, "-m", "compress", *(word.format(out=f"{place}/out") for word in words), "--quiet"]
            subprocess.run(line, check=True, env=environment)
            there = {path.name.split("-")[0].removeprefix("cpu_") for path in Path(place).glob("cache/kernels/*.so")}
            made = sorted(there - before)
            told[title] = {"libraries": made, "seconds": sum(seconds[name] for name in made)}
            before = there
    return told


def products(library: Any, dtype: torch.dtype) -> Calls:
    """Products of a library, each checked against the dequantized weight elsewhere (`tests/kernels/cpu`)."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**15), 2**15, (SIZE, SIZE // 4), generator=draw, dtype=torch.int16)
    scale = (torch.rand(SIZE // GROUP, SIZE, generator=draw) / 100).to(dtype)
    weight = pack_strips(CodeWords(words, scale, None, GROUP, 4), SIZE)

    def call(x: torch.Tensor) -> torch.Tensor:
        with instead(library):
            return gemm.words(x, weight)

    tokens = {M: torch.randn(M, SIZE, generator=draw).to(dtype) for M in TOKENS}
    return {f"{str(dtype).removeprefix('torch.')}, M = {M}": partial(call, x) for M, x in tokens.items()}


@contextmanager
def instead(library: Any) -> Iterator[None]:
    """Multiply by the loops of this library."""
    usual = build.library
    build.library = lambda name="gemm": library if name == "gemm" else usual(name)
    try:
        yield
    finally:
        build.library = usual


def native_beside_level(rounds: int) -> dict[str, Any]:
    """{product: microseconds with each of two libraries}."""
    level = prebuilt.level_of("native", cpu_flags())
    assert level is not None
    made = {
        "native": build.load_from_a_place("gemm", build.flags_for("native")),
        level: build.load_from_a_place("gemm", (*build.FLAGS, *prebuilt.LEVELS[level].flags)),
    }
    calls: Calls = {}
    for name, (library, reasons) in made.items():
        assert library is not None, reasons
        for dtype in (torch.float32, torch.bfloat16):
            calls |= {f"{title}, {name}": call for title, call in products(library, dtype).items()}
    by_title = sorted(calls)
    return measure({title: calls[title] for title in by_title}, rounds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seconds = libraries(asked.rounds)
    runs = first_runs(seconds)
    native = native_beside_level(20 * asked.rounds)
    print(json.dumps({"runs": runs, "native": native}, indent=1))
    tell_times({"rounds": asked.rounds, "libraries": seconds, "runs": runs, "native": native}, asked.json)


if __name__ == "__main__":
    main()
