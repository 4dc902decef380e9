"""Sensitivities that were measured, kept where what can be made again is kept, and found again by their model."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from compress.checkpoint.files import read_json, write_whole
from compress.checkpoint.sensitivity import FORMAT, Sensitivity
from compress.errors import CheckpointError
from compress.kernels.cache import cache_directory
from compress.schema import built, fits


def folder() -> Path:
    """Where all of them lie."""
    return cache_directory() / "sensitivity"


def read_sensitivity(path: Path) -> Sensitivity:
    """A table from its file. Raises CheckpointError for anything else."""
    entry = read_json(path)
    fits(entry, Sensitivity, path)
    if entry["format"] != FORMAT:
        raise CheckpointError(f"{path}: format is {entry['format']!r}; it must be {FORMAT}: measure it anew")
    found: Sensitivity = built(entry, Sensitivity)
    return found


def kept_sensitivity(path: Path) -> Sensitivity | None:
    """What was kept; None where nothing was, or what cannot be read."""
    if not path.is_file():
        return None
    try:
        return read_sensitivity(path)
    except CheckpointError:
        return None


def keep_sensitivity(path: Path, found: Sensitivity) -> None:
    """Keep it; where nothing can be written, it is measured again the next time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(found)) + "\n")


def sensitivity_of_model(fingerprint: str) -> Sensitivity | None:
    """The one that was measured last of a model; with a KL of each unit, where any is. fingerprint: of its weights and
    configuration."""
    with suppress(OSError):
        found = [path for path in folder().glob("*.json") if fingerprint in path.read_text(encoding="utf-8")]
        tables = [kept_sensitivity(path) for path in sorted(found, key=lambda path: -path.stat().st_mtime_ns)]
        known = [table for table in tables if table is not None and table.model.get("fingerprint") == fingerprint]
        return max(known, key=_has_kl, default=None)
    return None


def _has_kl(found: Sensitivity) -> bool:
    return all(tried.kl is not None for unit in found.units for tried in unit.tried.values())
