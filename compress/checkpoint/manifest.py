"""What a run has written about itself, read back: `compress.json`."""

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from compress.checkpoint.files import RECORD, read_json
from compress.checkpoint.record import LayerRecord, RangeRecord
from compress.schema import fits


class Run(TypedDict):
    """Of `compress.json`, what is read again."""

    layers: list[LayerRecord]
    left_alone: dict[str, str]
    ranges: NotRequired[list[RangeRecord]]
    tensors: NotRequired[dict[str, str]]
    files: NotRequired[list[str]]


def read_record(directory: Path) -> dict[str, Any]:
    """The record of a finished run. Raises CheckpointError, naming the key, for one that no run has written."""
    found = read_json(directory / RECORD)
    fits(found, Run, directory / RECORD)
    return found
