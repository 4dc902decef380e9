"""What a run has written about itself, read back: `compress.json`, and `progress.json` of one that is unfinished."""

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from compress.cache import CacheScheme
from compress.checkpoint import RECORD, read_json
from compress.record import LayerRecord, RangeRecord
from compress.rescale import FoldRecord
from compress.schema import fits
from compress.scheme import Scheme


class Run(TypedDict):
    """Of `compress.json`, what is read again."""

    layers: list[LayerRecord]
    left_alone: dict[str, str]
    ranges: NotRequired[list[RangeRecord]]


class LayerPlace(TypedDict):
    file: str
    scheme: Scheme | None


class CachePlace(TypedDict):
    file: str
    scheme: CacheScheme


class NotedFold(TypedDict):
    producer: str
    kind: str
    channels: int
    consumers: list[str]


class FoldPlace(TypedDict):
    file: str
    folds: list[NotedFold]


class Block(TypedDict):
    """A finished block of `progress.json`."""

    files: dict[str, list[str]]
    layers: dict[str, LayerPlace]
    records: list[LayerRecord]
    ranges: list[RangeRecord]
    left_alone: dict[str, str]
    fold_records: list[FoldRecord]
    folds: FoldPlace | None
    caches: dict[str, CachePlace]


class Progress(TypedDict):
    identity: str
    blocks: dict[str, Block]


def read_record(directory: Path) -> dict[str, Any]:
    """The record of a finished run. Raises CheckpointError, naming the key, for one that no run has written."""
    found = read_json(directory / RECORD)
    fits(found, Run, directory / RECORD)
    return found


def read_progress(path: Path) -> dict[str, Any]:
    """What `progress.json` says. Raises CheckpointError, naming the key, where it is damaged."""
    found = read_json(path)
    fits(found, Progress, path)
    return found
