"""The record of a run, `compress.json`: made and read back."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from compress.base.memory import peak_bytes
from compress.base.schema import fits
from compress.base.version import VERSION
from compress.checkpoint.byte_savings import Saving
from compress.checkpoint.files import RECORD, read_json
from compress.checkpoint.portable_names import command
from compress.checkpoint.seal import Checksums
from compress.checkpoint.write.coverage import Coverage
from compress.checkpoint.write.record import LayerRecord, RangeRecord, RunRecord
from compress.model.edits.folds import FoldRecord

RECORDED_VERSIONS = ("torch", "transformers", "safetensors", "numpy")


class StoredRun(TypedDict):
    """The part of `compress.json` that is read back."""

    layers: list[LayerRecord]
    left_alone: dict[str, str]
    ranges: NotRequired[list[RangeRecord]]
    tensors: NotRequired[dict[str, str]]
    files: NotRequired[list[str]]
    checksums: NotRequired[Checksums]


def read_record(directory: Path) -> dict[str, Any]:
    """The record of a finished run. Raises CheckpointError, which names the key, for a record that no run has
    written."""
    found = read_json(directory / RECORD)
    fits(found, StoredRun, directory / RECORD)
    for layer in found["layers"]:
        layer.setdefault("figures", {})
    return found


def restore_run(record: Mapping[str, Any]) -> RunRecord:
    """The results of a finished run, from its record; without the measurements of its trainings, of which that has a
    summary."""
    coverage = record.get("coverage")
    same = ("caches", "not_folded", "left_alone", "notes", "structure", "block_forwards", "seconds", "spent")
    return RunRecord(
        layers=[LayerRecord(**{**layer, "shape": tuple(layer["shape"])}) for layer in record["layers"]],
        ranges=[RangeRecord.restored(each) for each in record.get("ranges", ())],
        folds=[FoldRecord(**fold) for fold in record.get("folds", ())],
        coverage=None if coverage is None else Coverage(**coverage),
        saving=Saving(**record["bytes"]),
        **{key: record[key] for key in same if key in record},
    )


def manifest(
    record: RunRecord,
    *,
    model: str,
    identity: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
    ranks: int,
    training: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The record of a finished run, without the entries of `Writer.complete` and of the verification.

    identity: everything that a resumed run must share with it. calibration: description of the calibration data.
    training: a summary of each training; `training.jsonl` has all lines.
    """
    return {
        "compress": VERSION,
        "model": model,
        "identity": identity,
        "command": command(),
        "calibration": calibration,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in RECORDED_VERSIONS}},
        "seeds": "none: a run draws no random numbers",
        "world_size": ranks,
        "seconds": round(record.seconds, 3),
        "spent": {activity: round(seconds, 3) for activity, seconds in record.spent.items()},
        "peak_memory_bytes": peak_bytes(),
        "block_forwards": record.block_forwards,
        "structure": record.structure,
        "coverage": None if record.coverage is None else asdict(record.coverage),
        "layers": [asdict(layer) for layer in record.layers],
        "caches": record.caches,
        "ranges": [asdict(each) for each in record.ranges],
        "folds": [asdict(fold) for fold in record.folds],
        "not_folded": record.not_folded,
        "training": list(training),
        "left_alone": record.left_alone,
        "notes": record.notes,
        "verification": None,
    }
