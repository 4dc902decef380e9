"""The ranges that calibration fixed in a checkpoint, from the record of the run, as figures and as a page.

In a picture a bar's height is the number of values per bin of the finest width, on a logarithmic axis, so that bars of
different widths compare; solid lines are the bounds of the range, dotted ones the observed extremes.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.files import RECORD
from compress.checkpoint.portable_names import shown
from compress.checkpoint.read.source import find_source
from compress.checkpoint.write.manifest import read_record
from compress.checkpoint.write.record import RangeRecord
from compress.evaluation.report import wording
from compress.evaluation.report.content import Article, Block, Picture, Report, ReportTable, Section, Tile, Words
from compress.evaluation.report.drawing import WIDE, Axis, hover, inline, label, padded, rule, tick
from compress.evaluation.report.page import write_page

NO_HISTOGRAMS = "no histogram was kept: the option histograms=true of a pass keeps them"
READING = (
    "Bars: values per bin of the finest width, on a logarithmic axis; in the colour of the solid lines where they are "
    "beyond the range. Solid lines: the bounds of the range. Dotted lines: the extremes that were observed."
)
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 190.0, 62.0, 8.0, 10.0, 26.0
LEAST, LARGEST = 1e-60, 1e60  # sizes of a value, well beyond those of a float of 32 bits
MOST_BINS = 128  # a side, see `HistogramRecord`
MARGIN = 0.03  # free space beside the shown values, as a share of them
LEAST_WIDTH = 1.5  # of a bar, in units of the picture


@dataclass(frozen=True)
class Bar:
    """Values from left up to right. height: their number per bin of the finest width. beyond: True outside the
    range."""

    left: float
    right: float
    count: int
    height: float
    beyond: bool


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


def clipped(ranges: Sequence[RangeRecord]) -> str:
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


def block_of(tensor: str) -> str:
    """The part of a name up to its first number: model.layers.3 of model.layers.3.mlp.up_proj."""
    found = re.match(r"(.*?\.\d+)(\.|$)", tensor)
    return found[1] if found else ""


def interval(low: float, high: float) -> str:
    """Two bounds to four digits."""
    return f"{low:.4g} .. {high:.4g}"


def table(ranges: Sequence[RangeRecord], anchors: Sequence[str] = ()) -> ReportTable:
    """One row per range; the one that clips most is strong. anchors: for each range, that of its picture."""
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
    return ReportTable(columns, rows, names=2, strong=strong, links=anchors)


def content(ranges: Sequence[RangeRecord]) -> list[dict[str, Any]]:
    """The ranges as JSON, histograms with the edges of their bins."""
    found = []
    for each in ranges:
        noted = asdict(each)
        if each.histogram is not None:
            noted["histogram"]["edges"] = each.histogram.edges
        found.append(noted)
    return found


def bars(record: RangeRecord) -> list[Bar]:
    """The histogram of a range from left to right, without bins that hold nothing."""
    histogram = record.histogram
    assert histogram is not None
    edges = histogram.edges
    bins = [(-edges[i + 1], -edges[i], n) for i, n in reversed(list(enumerate(histogram.negative)))]
    bins += [(edges[i], edges[i + 1], n) for i, n in enumerate(histogram.rest)]
    return [
        Bar(left, right, n, n * histogram.width / (right - left), right <= record.low or left >= record.high)
        for left, right, n in bins
        if n
    ]


def joined(found: Sequence[Bar], least: float) -> list[Bar]:
    """Merge neighbouring bars that are too narrow to be told apart: merged ones are no wider than `least`."""
    made: list[Bar] = []
    for bar in found:
        if made and made[-1].beyond == bar.beyond and bar.right - made[-1].left <= least:
            before = made.pop()
            area = before.height * (before.right - before.left) + bar.height * (bar.right - bar.left)
            height = area / (bar.right - before.left)
            bar = Bar(before.left, bar.right, before.count + bar.count, height, bar.beyond)
        made.append(bar)
    return made


def figure(record: RangeRecord, anchor: str = "") -> Picture:
    """The histogram of a range: bars inside and beyond it, its bounds, the extremes."""
    ends = (record.low, record.high, record.lowest, record.highest)
    across = Axis(*padded(ends, False, MARGIN), LEFT, WIDE - RIGHT)
    found = joined(bars(record), LEAST_WIDTH * (across.high - across.low) / (across.end - across.start))
    heights = [bar.height for bar in found] or [1.0]
    floor = HEIGHT - BOTTOM
    up = Axis(min(1.0, *heights) / 2, 1.2 * max(heights), floor, TOP, logarithmic=True)
    marks = []
    for value in up.ticks():
        y = up.place(value)
        marks += [rule(LEFT, y, WIDE - RIGHT, y), label(LEFT - 6, y + 4, f"{value:g}", "end")]
    for beyond, style in ((False, "main"), (True, "beyond")):
        drawn = "".join(_bar(bar, across, up) for bar in found if bar.beyond == beyond)
        marks.append(f'<g class="{style}" shape-rendering="crispEdges">{drawn}</g>')
    marks.append(rule(LEFT, floor, WIDE - RIGHT, floor))
    marks += [tick(across.place(value), floor + 17, f"{value:.4g}") for value in across.ticks()]
    for what, value, style in (
        ("smallest observed", record.lowest, "extreme"),
        ("largest observed", record.highest, "extreme"),
        ("lower bound", record.low, "bound"),
        ("upper bound", record.high, "bound"),
    ):
        x = across.place(value)
        marks.append(f"<g>{hover(f'{what}: {value:.4g}')}{rule(x, TOP, x, floor, style)}</g>")
    name = wording.name(title_of(record))
    caption = f"Range {interval(record.low, record.high)}, observed {interval(record.lowest, record.highest)}"
    caption += "." if record.clipped is None else f", clipped {wording.share(record.clipped)}."
    return Picture(name, inline(f"histogram of {name}", HEIGHT, marks), caption, anchor)


def _bar(bar: Bar, across: Axis, up: Axis) -> str:
    """A bar as an SVG path, which takes less room in a page of thousands than a rectangle."""
    x, y = across.place(bar.left), up.place(bar.height)
    width = max(LEAST_WIDTH, across.place(bar.right) - x)
    said = hover(f"{bar.count:,} value{'' if bar.count == 1 else 's'} from {bar.left:.4g} to {bar.right:.4g}")
    return f'<path d="M{x:.1f} {up.start:.0f}V{y:.1f}h{width:.1f}V{up.start:.0f}">{said}</path>'


def write_ranges(model: str, ranges: Sequence[RangeRecord], path: Path) -> None:
    """Write a page: a table of the ranges, and the histograms that were recorded, block by block. Raises InputError
    where the file cannot be written."""
    write_page(path, report_of(model, ranges))


def report_of(model: str, ranges: Sequence[RangeRecord]) -> Report:
    """The content of the page."""
    anchors = ["" if each.histogram is None else f"range-{i}" for i, each in enumerate(ranges)]
    reading = READING if any(anchors) else NO_HISTOGRAMS
    blocks: list[Block] = [table(ranges, anchors), Words(reading, "note")]
    sections = [Section("Ranges", blocks)]
    drawn = [(each, anchor) for each, anchor in zip(ranges, anchors, strict=True) if anchor]
    for block, members in groupby(drawn, key=lambda pair: block_of(pair[0].tensor)):
        pictures: list[Block] = [figure(each, anchor) for each, anchor in members]
        sections.append(Section(wording.name(block) or "Outside the blocks", pictures))
    name = wording.name(shown(model))
    run = Article(name, "", clipped(ranges), _tiles(ranges), sections)
    return Report(f"Calibrated ranges of {name}", run.verdict, [run], command="inspect --calibration", footnote="")


def _tiles(ranges: Sequence[RangeRecord]) -> list[Tile]:
    worst, tokens = most_clipped(ranges), {each.tokens for each in ranges}
    calibrators = ", ".join(dict.fromkeys(wording.name(each.calibrator) for each in ranges))
    return [
        Tile("calibrated ranges", wording.count(len(ranges)), calibrators),
        Tile("clipped at most", wording.share(None if worst is None else worst.clipped), "of a range's values"),
        Tile("tokens seen", wording.count(max(tokens)), "by every range" if len(tokens) == 1 else "at most"),
    ]
