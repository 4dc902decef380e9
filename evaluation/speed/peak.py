"""The peak memory of loading a model, and of running it, measured in a process of its own.

    python -m compress.evaluation.speed.peak MODEL DEVICE        prints {"load": bytes, "run": bytes} as JSON

On a CPU it is the most that the process ever held, libraries included; on a GPU what torch allocated there
(`torch.cuda.max_memory_allocated`). Running is a prompt of 128 random tokens and eight steps after it.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from compress.base import memory
from compress.base.errors import CompressError, InputError
from compress.checkpoint.read.source import find_source
from compress.inference.load.loading import load

STATUS = Path("/proc/self/status")
PROMPT, NEW = 128, 8
TRUSTED = "trusted"


def peak_bytes(model: str, device: torch.device, trust_remote_code: bool = False) -> tuple[int, int]:
    """(bytes to load, bytes to run). Raises CompressError with the process's last line where it fails."""
    home = Path(__file__).resolve().parents[2]
    place = str(home if (home / "compress").is_dir() else home.parent)
    known = os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))
    words = [sys.executable, "-P", "-m", "compress.evaluation.speed.peak", model, str(device)]
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
