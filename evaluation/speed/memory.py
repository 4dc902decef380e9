"""Bytes that a model holds, and the most that running it takes.

On a GPU the peak is what torch allocated (`torch.cuda.max_memory_allocated`), other models included. On a CPU it is the
anonymous memory of the process (files that are mapped do not count) above its level before the model was made, read
every few milliseconds; Linux only.

    python -m compress.evaluation.speed.memory MODEL DEVICE        prints {"load": bytes, "run": bytes} as JSON

measures a model in a process of its own. On a CPU that is the most that the process ever held, libraries included.
Running is a prompt of 128 random tokens and eight steps after it.
"""

import gc
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.base import memory
from compress.base.errors import CompressError, InputError
from compress.base.memory import anonymous_bytes, give_back
from compress.checkpoint.read.source import find_source
from compress.inference.load.loading import load

PAUSE_S = 0.005
STATUS = Path("/proc/self/status")
PROMPT, NEW = 128, 8
TRUSTED = "trusted"


def held_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers; shared ones are counted once."""
    tensors = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


class Peak:
    """The largest memory seen so far; None where it cannot be measured."""

    bytes: int | None = None


def settled_bytes(device: torch.device) -> int | None:
    """Bytes in use when nothing runs: the level that a CPU's peak is counted from. None where they cannot be
    measured."""
    gc.collect()
    give_back()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else anonymous_bytes()


@contextmanager
def watch_memory(device: torch.device, base: int | None) -> Iterator[Peak]:
    """Measures the peak of the device's memory (GPU), or of the process's above `base` (CPU), inside a context; set at
    its end."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    if base is None:
        yield peak
        return
    seen = [anonymous_bytes() or 0]
    done = threading.Event()

    def look() -> None:
        while not done.wait(PAUSE_S):
            seen.append(anonymous_bytes() or 0)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
    peak.bytes = max(0, max(*seen, anonymous_bytes() or 0) - base)


def peak_bytes(model: str, device: torch.device, trust_remote_code: bool = False) -> tuple[int, int]:
    """(bytes to load, bytes to run). Raises CompressError with the process's last line where it fails."""
    home = Path(__file__).resolve().parents[2]
    place = str(home if (home / "compress").is_dir() else home.parent)
    known = os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))
    words = [sys.executable, "-P", "-m", "compress.evaluation.speed.memory", model, str(device)]
    words += [TRUSTED] if trust_remote_code else []
    environment = {**os.environ, "PYTHONPATH": known}
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise CompressError(f"the memory of {model} cannot be measured: {lines[-1] if lines else 'no message'}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["load"], found["run"]


def _most(device: torch.device) -> int:
    """Peak memory of this process so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():  # of this program alone: getrusage also counts its parent's memory at the start
        lines = STATUS.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return memory.peak_bytes()


def main(model: str, where: str, trusted: bool) -> None:
    """Measure in this process, and print."""
    from compress.evaluation.speed.generation import GenerationTimer
    from compress.weights.formats.registry import import_plugin

    warnings.filterwarnings("ignore")
    device = torch.device(where)
    for module in (find_source(model, trusted).quantization or {}).get("modules", ()):
        import_plugin(module)
    dtype = torch.float32 if device.type == "cpu" else None
    network: Any = load(model, dtype, device, trust_remote_code=trusted)
    loaded = _most(device)
    if not getattr(network, "can_generate", lambda: False)():
        raise InputError(f"{type(network).__name__} does not generate text")
    context = getattr(network.config.get_text_config(), "max_position_embeddings", None) or PROMPT + NEW
    running = GenerationTimer(network, 1, min(PROMPT, max(1, context - NEW)), NEW)
    running.start()
    for _ in range(NEW - 1):
        running.step()
    print(json.dumps({"load": loaded, "run": _most(device)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], TRUSTED in sys.argv[3:])
