"""Everything that is worth measuring on a GPU that is there for minutes, in one command.

    python recipes/studies/gpu/wheels.py                                       # before, with a network
    python recipes/studies/gpu/day.py --out DIR [--seconds 480] [--only SECTION ...]

Runs from a checkout, without a network and without installing the package. Sections run in the order of their worth. A
section that is not done when its share of the time is over is stopped; what it had by then stays in its file, and what
it did not need of its share goes to the next:

    section     file                 share of 480 s    expected on an H100
    correct     correct.jsonl        130               450   2.2 GPU tests a second, kernels that changed first
    decode      decode.json          110               110   w4a16 took 55 before; then dense, compiled
    quantize    quantize.json         80                80   GPTQ of one block took 29 before; then of four
    steps       steps.json            50                45   compiling took 28 before
    products    products.json         75                85   45 for one large shape before; 20 for a small one; gemlite
    peers       peers.json            35                30   llm-compressor's GPTQ of one block

"Before" is kernels/results/gpu-h100-products.json and gpu-h100-decode.json. A part that was never run is estimated
from its operations. Each file names the card, the versions and the peak memory. DIR/log.txt has all that was printed,
DIR/day.json says how each section ended. `--dry` runs every section in tiny sizes on a CPU; Triton interprets its
kernels there.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
WHEELS = ROOT / "build" / "gpu-wheels"
GRACE = 5.0  # seconds between a request to stop and the end
SHOWN = 1800  # characters of each section in the last table
PROCESSES = 12
INTERPRETED = ("correct", "steps")  # sections that launch kernels of ours by themselves, on a CPU
TESTS = ("tests/kernels/triton", "tests/passes/test_on_a_gpu.py", "tests/inference/test_loading_gpu.py")
# Triton 3.6 hands numpy arrays of one element to range().
OF_TRITON = "ignore:Conversion of an array with ndim > 0 to a scalar is deprecated:DeprecationWarning"
# Inductor of torch 2.11 warns of its own imports.
OF_TORCH = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
READABLE = {"encoding": "utf-8", "errors": "replace"}
PLUGIN = "compress.recipes.studies.gpu.launches"


@dataclass(frozen=True)
class TimedSection:
    """A command that writes `file`. share: of the whole time."""

    name: str
    file: str
    share: float
    words: tuple[str, ...]
    dry: tuple[str, ...]


def study(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / f"{name}.py"), *words)


def tests(file: Path, *words: str) -> tuple[str, ...]:
    plain = ("-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:benchmark", "-W", OF_TORCH)
    return (sys.executable, "-m", "pytest", *plain, "-p", PLUGIN, "--launches", str(file), *words)


def sections(out: Path) -> tuple[TimedSection, ...]:
    """All sections, in the order of their worth."""
    bench = (sys.executable, "-m", "compress.recipes.studies.kernels.bench", "--dtype", "bfloat16")
    interpreted = sorted(str(path) for path in (ROOT / "tests/support/interpreter").glob("interpreter_*.py"))
    tiny = ("--shape", "tiny")
    file = {name: str(out / f"{name}.json") for name in ("decode", "quantize", "steps", "products", "peers")}
    few = ("--blocks", "1", "--batches", "2", "--prompts", "8", "--new", "2", "--rounds", "1")
    large = ("--shapes", "28672x4096,4096x4096", "--tokens", "1,16,64,256,2048", "--rounds", "10")
    small = ("--shapes", "128x256", "--tokens", "1", "--rounds", "1", "--quick")
    short = ("--samples", "2", "--length", "32", "--blocks", "2")
    return (
        TimedSection(
            "correct",
            "correct.jsonl",
            130 / 480,
            tests(out / "correct.jsonl", "-m", "gpu", "-n", str(PROCESSES), *TESTS),
            tests(out / "correct.jsonl", "--noconftest", "-W", OF_TRITON, "--each", "1", *interpreted),
        ),
        TimedSection(
            "decode",
            "decode.json",
            110 / 480,
            study("decoding", "--json", file["decode"]),
            study("decoding", "--json", file["decode"], *tiny, *few),
        ),
        TimedSection(
            "quantize",
            "quantize.json",
            80 / 480,
            study("quantizing", "--json", file["quantize"]),
            study("quantizing", "--json", file["quantize"], *tiny, *short),
        ),
        TimedSection(
            "steps",
            "steps.json",
            50 / 480,
            study("steps", "--json", file["steps"]),
            study("steps", "--json", file["steps"], *tiny),
        ),
        TimedSection(
            "products",
            "products.json",
            75 / 480,
            (*bench, *large, "--json", file["products"]),
            (*bench, *small, "--json", file["products"]),
        ),
        TimedSection(
            "peers",
            "peers.json",
            35 / 480,
            study("quantizing", "--json", file["peers"], "--library", "llmcompressor", "--blocks", "1"),
            study("quantizing", "--json", file["peers"], "--library", "llmcompressor", *tiny, *short),
        ),
    )


def install(folder: Path, log: IO[str]) -> None:
    """Unpack the wheels that `wheels.py` fetched into a folder; a note where there are none."""
    files = sorted(WHEELS.glob("*.whl"))
    if not files:
        print(f"no wheels in {WHEELS}: run wheels.py before, if greenlet or a peer is not installed", flush=True)
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(folder), *map(str, files)], check=True, stdout=log, stderr=log)


def run(section: TimedSection, words: Sequence[str], environment: dict[str, str], limit: float, log: IO[str]) -> str:
    """Run a section's command to its end, or until the limit in seconds; how it ended."""
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        code = process.wait(timeout=max(1.0, limit))
    except subprocess.TimeoutExpired:
        for kind, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
            os.killpg(process.pid, kind)
            try:
                process.wait(timeout=patience)
                break
            except subprocess.TimeoutExpired:
                continue
        return f"stopped after {limit:.0f} s"
    return "done" if code == 0 else f"exit code {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="leave out all others")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU")
    asked = parser.parse_args()
    out = asked.out.resolve()
    every = sections(out)
    chosen = [section for section in every if asked.only is None or section.name in asked.only]
    unknown = set(asked.only or ()) - {section.name for section in every}
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}; allowed: {', '.join(section.name for section in every)}")
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    ended: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as packages, (out / "log.txt").open("w+", **READABLE) as log:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        path = [str(ROOT), *([] if asked.dry else [packages]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        if asked.dry:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        else:
            install(Path(packages), log)
        whole, due = sum(section.share for section in chosen), 0.0
        for section in chosen:
            due += asked.seconds * section.share / whole
            started, at = time.monotonic(), log.tell()
            interpret = {"TRITON_INTERPRET": "1"} if asked.dry and section.name in INTERPRETED else {}
            words = section.dry if asked.dry else section.words
            how = run(section, words, environment | interpret, due - (started - began), log)
            log.flush()
            log.seek(at)
            said = log.read()
            ended[section.name] = {"ended": how, "seconds": round(time.monotonic() - started, 1), "file": section.file}
            (out / "day.json").write_text(json.dumps(ended, indent=1) + "\n", encoding="utf-8")
            print(f"== {section.name}: {how}, {ended[section.name]['seconds']} s\n{said[-SHOWN:]}", flush=True)
    for name, about in ended.items():
        print(f"{name:10} {about['seconds']:6.1f} s  {about['ended']}")
    return 0 if all(about["ended"] == "done" for about in ended.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
