"""The origin of a figure, needed to quote it: the command, the commit, the versions, the machine."""

import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu.processor import cpu_flags, cpu_name

PACKAGES = ("torch", "triton", "transformers", "gemlite", "numpy")
# Variables that cap the instructions of our kernels and of those that torch calls.
CAPS = ("COMPRESS_CPU", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
VECTOR_FLAGS = ("avx", "amx", "fma", "f16c", "sse4", "asimd", "i8mm", "bf16", "sve")


def timing_origin(device: torch.device) -> dict[str, Any]:
    """The origin of a time. load: processes that wanted a processor in the last minute, where the system says so.
    cpu_flags: the processor's vector instructions; caps: the variables that restrict them."""
    return {
        **origin(device),
        "cpu_kernels": list(cpu.why_not()) or cpu.library().instructions().decode(),
        "cpu_flags": sorted(flag for flag in cpu_flags() if flag.startswith(VECTOR_FLAGS)),
        "caps": {name: os.environ[name] for name in CAPS if os.environ.get(name)},
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def origin(device: torch.device) -> dict[str, Any]:
    """The origin of any figure. `commit` is None outside of a checkout; so is the version of a package that is not
    installed."""
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    return {
        "command": shlex.join(["compress", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") if tracked else None,
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")) if tracked else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "versions": {name: _installed(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """The output of git for the checkout that holds this file; None where git fails."""
    words = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
