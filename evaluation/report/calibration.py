"""The ranges that calibration fixed in a checkpoint, from the record of the run."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.files import RECORD
from compress.checkpoint.read.source import find_source
from compress.checkpoint.write.manifest import read_record
from compress.checkpoint.write.record import RangeRecord
from compress.evaluation.report import wording
from compress.evaluation.report.content import ReportTable

LEAST, LARGEST = 1e-60, 1e60  # sizes of a value, well beyond those of a float of 32 bits
MOST_BINS = 128  # a side, see `HistogramRecord`


def calibrated_ranges(model: str) -> list[RangeRecord]:
    """The ranges that calibration fixed, in the order of the model.

    Raises InputError for a checkpoint that this tool did not write or that has none, CheckpointError for a damaged
    record.
    """
    source = find_source(model)
    path = source.path / RECORD
    if not path.exists():
        raise InputError(f"{source.name} holds no {RECORD}: give a directory that `compress quantize` wrote")
    ranges = [RangeRecord.restored(each) for each in read_record(source.path).get("ranges", ())]
    if not ranges:
        raise InputError(
            f"{source.name} has no calibrated ranges: its inputs are not rounded, or to every token as it comes; "
            "activations=static, outputs=static or a kv-cache per head or tensor fix some when quantizing"
        )
    for i, each in enumerate(ranges):
        if (wrong := _impossible(each)) is not None:
            raise CheckpointError(f"{path}: ranges[{i}].{wrong}, which no calibration finds; quantize anew")
    return ranges


def _impossible(record: RangeRecord) -> str | None:
    """The first figure of a range that is impossible, in words: infinite or not a number, an inconsistent histogram; or
    None."""
    for key in ("low", "high", "lowest", "highest"):
        value = float(getattr(record, key))
        if not (value == 0 or LEAST <= abs(value) <= LARGEST):
            return f"{key} is {value:g}"
    histogram = record.histogram
    if histogram is None:
        return None
    if not LEAST <= histogram.width <= LARGEST:
        return f"histogram.width is {histogram.width:g}"
    for side in ("negative", "rest"):
        counts = getattr(histogram, side)
        if len(counts) > MOST_BINS:
            return f"histogram.{side} has {len(counts)} bins"
        if any(count < 0 for count in counts):
            return f"histogram.{side} has counts below zero"
    return None


def most_clipped(ranges: Sequence[RangeRecord]) -> RangeRecord | None:
    """The range with the largest clipped share, the first of equals; None where none was counted."""
    counted = [each for each in ranges if each.clipped is not None]
    return max(counted, key=lambda each: each.clipped or 0.0, default=None)


def clipping_line(ranges: Sequence[RangeRecord]) -> str:
    """A line on the largest share of values clipped by a calibrated range."""
    worst = most_clipped(ranges)
    count = f"{len(ranges)} calibrated ranges"
    if worst is None:
        return f"{count}: what they clip was not counted (--set histograms=true counts it)"
    unknown = sum(each.clipped is None for each in ranges)
    rest = f"; not counted for {unknown} (--set histograms=true counts it)" if unknown else ""
    if not worst.clipped:
        return f"{count}: nothing is clipped{rest}"
    return f"{count}: at most {wording.share(worst.clipped)} is clipped ({worst.role} of {worst.tensor}){rest}"


def title_of(record: RangeRecord) -> str:
    """The tensor that a range belongs to; of layers that read it together, without the path that they share."""
    path = record.tensor[: record.tensor.rfind(".") + 1]
    names = ", ".join((record.tensor, *(other.removeprefix(path) for other in record.also)))
    return names if record.role == "input" else f"{record.role} of {names}"


def interval(low: float, high: float) -> str:
    """Two bounds to four digits."""
    return f"{low:.4g} .. {high:.4g}"


def table(ranges: Sequence[RangeRecord]) -> ReportTable:
    """One row per range; the one that clips most is strong."""
    worst = most_clipped(ranges)
    rows = [
        (
            wording.name(title_of(each)),
            wording.name(each.calibrator),
            interval(each.lowest, each.highest),
            interval(each.low, each.high) + (f" ({each.ranges} ranges)" if each.ranges > 1 else ""),
            wording.NONE if each.clipped is None else wording.share(each.clipped),
            wording.count(each.tokens),
        )
        for each in ranges
    ]
    strong = frozenset(i for i, each in enumerate(ranges) if each is worst and each.clipped)
    columns = ("tensor", "calibrator", "observed", "range", "clipped", "tokens")
    return ReportTable(columns, rows, names=2, strong=strong)


def content(ranges: Sequence[RangeRecord]) -> list[dict[str, Any]]:
    """The ranges as JSON, histograms with the edges of their bins."""
    entries = []
    for each in ranges:
        noted = asdict(each)
        if each.histogram is not None:
            noted["histogram"]["edges"] = each.histogram.edges
        entries.append(noted)
    return entries
