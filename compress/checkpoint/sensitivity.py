"""Tables of the loss of each layer of a model under each candidate, and their cache on disk.

A candidate is a sequence of passes for a layer. A unit is a set of layers that get the same candidate: those that read
one tensor (q, k and v of an attention, gate and up of a gated MLP), which readers fuse to one, or a single layer.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.base.errors import CheckpointError
from compress.base.schema import built, fits
from compress.checkpoint.files import read_json, write_whole
from compress.kernels.cache_folder import cache_directory
from compress.kernels.private_folders import why_not_believed

FORMAT = 1
FAR = 10**9  # an offset in a weight file: as many digits as any offset below 10 GB has at most


@dataclass(frozen=True)
class Tried:
    """The figures of a unit under a candidate.

    relative_loss: |X W^T - X Q^T|^2 over |X W^T|^2. fisher: the KL between the original and the original with this
    unit replaced, in nats per token, as `search.fisher` estimates it. bytes: of the unit's tensors in the checkpoint.
    header_bytes: upper bound for their header entries.
    """

    relative_loss: float
    bytes: int
    header_bytes: int
    fisher: float


@dataclass(frozen=True)
class Unit:
    """Layers that get the same candidate. kind: their names inside the block. weights: the number of their weights.
    tried: {name of a candidate that suits them: its figures}."""

    name: str
    block: str
    kind: str
    layers: list[str]
    weights: int
    tried: dict[str, Tried]


@dataclass(frozen=True)
class Sensitivity:
    """The sensitivities of one model.

    candidates: {name: passes, as a recipe holds them}. uniform_kl: {candidate: KL of the model with this candidate on
    every layer, each decided on the original model}. other_bytes: of the checkpoint without the units. left_out:
    {layer: the reason why it is in no unit}.
    """

    model: dict[str, Any]
    calibration: dict[str, Any]
    held_out: dict[str, Any] | None
    candidates: dict[str, list[dict[str, Any]]]
    units: list[Unit]
    uniform_kl: dict[str, float]
    other_bytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    format: int = FORMAT

    @property
    def weights(self) -> int:
        """The number of weights of all units."""
        return sum(unit.weights for unit in self.units)


def header_bytes(name: str, shape: Sequence[int]) -> int:
    """The most bytes that a tensor's entry takes in the header of a weight file."""
    entry = {name: {"dtype": "F8_E4M3", "shape": list(shape), "data_offsets": [FAR, FAR]}}
    return len(json.dumps(entry, separators=(",", ":")).encode()) - 1  # without two braces, with a comma


def folder() -> Path:
    """The cache directory of all tables."""
    return cache_directory() / "sensitivity"


def read_sensitivity(path: Path) -> Sensitivity:
    """The table in a file. Raises CheckpointError for a file that holds none, or one of another version."""
    entry = read_json(path)
    fits(entry, Sensitivity, path)
    if entry["format"] != FORMAT:
        raise CheckpointError(f"{path}: format is {entry['format']!r}; it must be {FORMAT}: measure it anew")
    found: Sensitivity = built(entry, Sensitivity)
    return found


def cached_sensitivity(path: Path) -> Sensitivity | None:
    """A cached table; None where there is none, or one that cannot be read or that another user may have written."""
    if not path.is_file() or why_not_believed(path) is not None:
        return None
    try:
        return read_sensitivity(path)
    except CheckpointError:
        return None


def cache_sensitivity(path: Path, found: Sensitivity) -> None:
    """Cache a table. Where it cannot be written, the next call measures again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(found)) + "\n")


def sensitivity_of_model(fingerprint: str) -> Sensitivity | None:
    """The latest cached table of a model; None where there is none. fingerprint: of its weights and configuration."""
    with suppress(OSError):
        found = [path for path in folder().glob("*.json") if fingerprint in path.read_text(encoding="utf-8")]
        tables = map(cached_sensitivity, sorted(found, key=lambda path: -path.stat().st_mtime_ns))
        known = (table for table in tables if table is not None and table.model.get("fingerprint") == fingerprint)
        return next(known, None)
    return None
