"""What each layer of a model loses by each of several candidates, as a table that can be kept.

A candidate is what may become of a layer: passes, one after the other. A unit is the layers that are treated alike:
those that read one tensor (q, k and v of an attention, gate and up of a gated MLP), which readers fuse to one, or a
layer by itself.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.checkpoint.files import read_json, write_whole
from compress.errors import CheckpointError
from compress.kernels.cache import cache_directory
from compress.system.schema import built, fits

FORMAT = 1
FAR = 10**9  # an offset in a weight file: no longer as a word than any in 10 GB


@dataclass(frozen=True)
class Tried:
    """A unit by a candidate. loss: |X W^T - X Q^T|^2, a mean over tokens, summed over the outputs of its layers;
    relative_loss: over |X W^T|^2 of the same. kl: nats per token between the original and the original with this unit
    replaced, None where that was not measured. bytes: of all tensors that the checkpoint holds of it; header_bytes: at
    most, of what the file's header says of these."""

    loss: float
    relative_loss: float
    bytes: int
    header_bytes: int
    kl: float | None = None


@dataclass(frozen=True)
class Unit:
    """Layers that are treated alike, of `weights` weights. kind: their names inside the block. tried: by the names of
    the candidates that suit them."""

    name: str
    block: str
    kind: str
    layers: list[str]
    weights: int
    tried: dict[str, Tried]


@dataclass(frozen=True)
class Sensitivity:
    """What was measured of one model.

    candidates: {name: passes, as a recipe has them}. uniform_kl: of the model in which every layer is what a candidate
    makes of it, all at once; run_kl: of what `quantize` makes of one of these, where every layer is decided behind the
    others, which it makes up for. other_bytes: of the checkpoint, without the units. left_out: {layer: why it has no
    unit}.
    """

    model: dict[str, Any]
    calibration: dict[str, Any]
    held_out: dict[str, Any] | None
    candidates: dict[str, list[dict[str, Any]]]
    units: list[Unit]
    uniform_kl: dict[str, float]
    run_kl: dict[str, float] = field(default_factory=dict)
    other_bytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    format: int = FORMAT

    @property
    def weights(self) -> int:
        """Of all units."""
        return sum(unit.weights for unit in self.units)


def header_bytes(name: str, shape: Sequence[int]) -> int:
    """What the header of a weight file has of a tensor, at most."""
    entry = {name: {"dtype": "F8_E4M3", "shape": list(shape), "data_offsets": [FAR, FAR]}}
    return len(json.dumps(entry, separators=(",", ":")).encode()) - 1  # of two braces, and a comma


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
