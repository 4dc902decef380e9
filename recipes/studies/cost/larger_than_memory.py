"""Quantizing a checkpoint that is larger than the memory of the process: limited, killed, resumed.

    python recipes/studies/cost/larger_than_memory.py [--layers 32] [--gib 2] [--kills 2] \\
        [--folder FOLDER] --json OUT.json -- --method rtn
    python recipes/studies/cost/larger_than_memory.py ... -- --method gptq --effort fast --spill FOLDER

Writes a bfloat16 Llama of random weights in the shape of 01-ai/Yi-6B (12.1 GB in 32 blocks, in files of at most 5 GB),
unless the folder has it, and quantizes it by the command line with the words after `--`, in a memory cgroup of `--gib`
that holds everything: the process' own memory, mapped weights, page cache. Linux counts cached pages of files there,
too, and drops or writes them when the group is full. While it runs, the anonymous memory (`RssAnon` of
/proc/PID/status: what no file backs) is read every 50 ms. The command is killed (SIGKILL) after equal shares of the
blocks, and goes on with `--resume`. A method that calibrates gets 4 x 128 random tokens.

Needs the right to make a memory cgroup (version 1 or 2), as root has.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from compress.base.memory import anonymous_bytes
from compress.recipes.studies.figures import asked, made_by

FILE_BYTES = 5_000_000_000
SAMPLES, LENGTH = 4, 128
INTERVAL_S = 0.05
GROUPS = Path("/sys/fs/cgroup")


def write_model(folder: Path, layers: int) -> int:
    """A checkpoint in the shape of Yi-6B with so many blocks, and calibration tokens beside it; returns its bytes."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=64000,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
        generator = torch.Generator().manual_seed(0)
        torch.save(torch.randint(config.vocab_size, (SAMPLES, LENGTH), generator=generator), folder / "tokens.pt")
        files = _files(shapes)
        for file, names in files.items():
            save_file({name: _weight(shapes[name], generator) for name in names}, folder / file, {"format": "pt"})
        held = {name: file for file, names in files.items() for name in names}
        index.write_text(json.dumps({"metadata": {}, "weight_map": held}), encoding="utf-8")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _files(shapes: dict[str, torch.Size]) -> dict[str, list[str]]:
    found: list[list[str]] = [[]]
    room = FILE_BYTES
    for name, shape in shapes.items():
        size = 2 * shape.numel()
        if size > room:
            found.append([])
            room = FILE_BYTES
        found[-1].append(name)
        room -= size
    return {f"model-{i:05d}-of-{len(found):05d}.safetensors": names for i, names in enumerate(found, 1)}


def _weight(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A cgroup of at most `limit` bytes of memory; yields the file that takes its processes."""
    first = (GROUPS / "memory").is_dir()
    group = (GROUPS / "memory" if first else GROUPS) / f"compress-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit), encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"no memory cgroup can be made here: {error}") from None
    try:
        yield group / "cgroup.procs"
    finally:
        for _ in range(100):  # a killed process leaves its group a moment later
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def finished_blocks(output: Path) -> int:
    """The blocks that an unfinished run has written."""
    try:
        progress = json.loads(output.with_name(f"{output.name}.partial").joinpath("progress.json").read_text("utf-8"))
    except (OSError, ValueError):
        return 0
    return len(progress["blocks"])


def run(words: Sequence[str], group: Path, output: Path, stop: int, peaks: dict[int, int]) -> int | None:
    """Run a command in a cgroup; its exit code, or None where it was killed because `stop` blocks were done. peaks:
    takes {blocks done: largest anonymous memory in the meantime}."""

    def enter() -> None:
        group.write_text(str(os.getpid()), encoding="utf-8")

    process = subprocess.Popen(words, preexec_fn=enter)
    while process.poll() is None:
        done = finished_blocks(output)
        peaks[done] = max(peaks.get(done, 0), anonymous_bytes(process.pid) or 0)
        if done >= stop:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return None
        time.sleep(INTERVAL_S)
    return process.returncode


def main() -> None:
    """The measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("larger-than-memory"))
    parser.add_argument("--output", help="name in the folder; a run that was stopped there goes on")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("words", nargs="+", help="options of compress quantize")
    arguments = parser.parse_args()
    source, output = arguments.folder / "in", arguments.folder / (arguments.output or f"out-{os.getpid()}")
    size = write_model(source, arguments.layers)
    words = [sys.executable, "-m", "compress", "quantize", str(source), "--output", str(output), *arguments.words]
    words += ["--quiet", "--no-verify"]
    if "rtn" not in arguments.words:
        words += ["--calibration", str(source / "tokens.pt")]
    peaks: dict[int, int] = {}
    seconds: list[int] = []
    begun = finished_blocks(output)
    with memory_group(int(arguments.gib * 2**30)) as group:
        for attempt in range(arguments.kills + 1):
            last = attempt == arguments.kills
            stop = begun + (arguments.layers - begun) * (attempt + 1) // (arguments.kills + 1)
            started = time.monotonic()
            code = run(
                [*words, *(["--resume"] if attempt or begun else [])],
                group,
                output,
                sys.maxsize if last else stop,
                peaks,
            )
            seconds.append(round(time.monotonic() - started))
            print(json.dumps({"attempt": attempt, "exit code": code, "seconds": seconds[-1]}), flush=True)
            if code or (last and code is None):
                raise SystemExit(f"the command ended with {code}")
    record = json.loads((output / "compress.json").read_text(encoding="utf-8"))
    found = {
        "command": asked(__file__),
        **made_by(),
        "checkpoint_mb": round(size / 1e6),
        "limit_mb": round(arguments.gib * 2**30 / 1e6),
        "blocks_done_before": begun,
        "killed": arguments.kills,
        "seconds": seconds,
        "blocks": arguments.layers,
        "output_mb": round(record["bytes"]["after"] / 1e6),
        "peak_anonymous_mb": round(max(peaks.values()) / 1e6),
        "peak_anonymous_mb_by_blocks_done": {done: round(peak / 1e6) for done, peak in sorted(peaks.items())},
        "notes": record["notes"],
    }
    arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in found.items() if k != "notes"}))


if __name__ == "__main__":
    main()
