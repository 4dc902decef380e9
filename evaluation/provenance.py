"""The provenance of figures: the models measured, the runs that made them, and the machine."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.base.schema import built, fits
from compress.base.version import VERSION
from compress.checkpoint.files import RECORD
from compress.checkpoint.portable_names import command, portable
from compress.checkpoint.read.source import Source
from compress.checkpoint.write.manifest import read_record
from compress.evaluation.cost.size import size_result
from compress.evaluation.cost.size_in_memory import size_in_memory
from compress.evaluation.document import Evaluation, Named, RunResult, SizeResult
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu.processor import cpu_flags, cpu_name

NO_REFERENCE = "no reference was given"
SHARDED = "the model was in memory, sharded"


@dataclass(frozen=True)
class MeasuredModel:
    """A model as it was given, and the network that it was measured as."""

    given: nn.Module | Source
    network: nn.Module


def size_of(model: nn.Module | Source | None) -> SizeResult | None:
    """Bytes on disk, from the headers of the files; of a model in memory those of its tensors, packed. None of a model
    that is sharded."""
    if model is None:
        return None
    return size_result(model) if isinstance(model, Source) else size_in_memory(model)


def name_model(model: nn.Module | Source, network: nn.Module, size: SizeResult | None) -> Named:
    """A model as it was given, and the network that it was measured as."""
    dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
    kind = type(network).__name__
    if not isinstance(model, Source) or size is None:
        return Named(kind, kind, sum(parameter.numel() for parameter in network.parameters()), dtype)
    architecture = str(next(iter(model.config.get("architectures") or ()), kind))
    return Named(portable(model.name), architecture, size.parameters, dtype, model.fingerprint())


def run_of(model: nn.Module | Source) -> tuple[dict[str, Any] | None, RunResult | None]:
    """(The recipe of a checkpoint, every option spelled out, the record of its run); None and None where no run of this
    tool has written it. Raises CheckpointError for a damaged record."""
    path = model.path / RECORD if isinstance(model, Source) else None
    if path is None or not path.exists():
        return None, None
    record = read_record(path.parent)
    noted = {field.name: record[field.name] for field in fields(RunResult) if field.name in record}
    fits(noted, RunResult, path)
    identity = record.get("identity")
    recipe = identity.get("recipe") if isinstance(identity, dict) else None
    run: RunResult = built(noted, RunResult)
    for layer in run.layers:
        layer.figures.pop("sha256", None)  # for `compress verify`, which reads the record
    return recipe if isinstance(recipe, dict) else None, run


def missing_of(reference: bool, size: SizeResult | None) -> dict[str, str]:
    """{measurement: reason} for measurements that nothing was given for: the reference, the size on disk."""
    missing = {} if reference else {"reference": NO_REFERENCE}
    return missing if size is not None else {**missing, "size": SHARDED}


def evaluation_of(ours: MeasuredModel, theirs: MeasuredModel | None, device: torch.device) -> Evaluation:
    """An evaluation without figures: the model and its reference, their sizes, the run, and the machine."""
    size, (recipe, run) = size_of(ours.given), run_of(ours.given)
    reference_size = None if theirs is None else size_of(theirs.given)
    return Evaluation(
        model=name_model(ours.given, ours.network, size),
        texts=[],
        reference=None if theirs is None else name_model(theirs.given, theirs.network, reference_size),
        recipe=recipe,
        size=size,
        reference_size=reference_size,
        run=run,
        missing=missing_of(theirs is not None, size),
        provenance=circumstances(device),
    )


def circumstances(device: torch.device) -> dict[str, Any]:
    """The command (None in a program of somebody's own), the commit, the versions, the machine."""
    facts = origin(device)
    return {**facts, "command": command(), "versions": {"compress": VERSION, **facts["versions"]}}


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
        "versions": {name: version_of(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
    }


def version_of(package: str) -> str | None:
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
