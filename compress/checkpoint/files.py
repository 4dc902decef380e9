"""Writes files (JSON among them) in one step, whole or not at all, and computes hashes of contents."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.base.regular_files import parse_json
from compress.checkpoint.scratch import Scratch

RECORD = "compress.json"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
# File names of a checkpoint in our own words (`weights.own_config`). transformers loads files of a variant only when
# asked for it. With the usual names it would ignore the unknown method, with a warning, and go on with random weights.
VARIANT = "compress"
OWN_INDEX, OWN_WHOLE = f"model.safetensors.index.{VARIANT}.json", f"model.{VARIANT}.safetensors"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write or replace a file in one step: a reader finds the old content or the new one, never a mixture. Raises
    OSError, with the name of the file."""
    try:
        scratch = Scratch(path)
        try:
            scratch.file.write(content.encode() if isinstance(content, str) else content)
            scratch.become()
        except BaseException:
            scratch.drop()
            raise
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def write_named(path: Path, content: str) -> None:
    """`write_whole` of a file that a person named. Raises InputError where it cannot be written."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk, so that they survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(parts: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON description."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def checksum(tensor: Tensor) -> str:
    """SHA-256 of a tensor's values."""
    data = tensor.detach().cpu().contiguous().flatten()
    # A single element counts as contiguous whatever its stride, but such a tensor may have no view as bytes.
    data = data if data.numel() > 1 else data.clone(memory_format=torch.contiguous_format)
    return hashlib.sha256(data.view(torch.uint8).numpy().data).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write or replace a JSON file in one step."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises CheckpointError in one line for anything that is not one."""
    return parse_json(path)
