"""What calibration fixed in a checkpoint: its ranges, from the record of the run, as figures and as a page of plots.

In a plot a bar's height is the number of values per bin of the finest width, on a logarithmic axis, so that bars of
different widths compare; solid lines are the bounds of the range, dotted ones what was observed. Nothing is drawn
before it is scrolled to, so that a page of hundreds of plots opens at once. Names come from a checkpoint, which may be
anybody's: they are escaped, and never part of a plot.
"""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from compress.checkpoint.files import RECORD
from compress.checkpoint.manifest import read_record
from compress.checkpoint.record import RangeRecord
from compress.checkpoint.source import find_source
from compress.errors import InputError
from compress.evaluation.page import write_page

NO_HISTOGRAMS = "no histogram was kept: the option histograms=true of a pass keeps them"
INSIDE, BEYOND, OBSERVED = "#4c78a8", "#d62728", "#777777"
MARGIN = 0.03  # of a plot's width, beside what it shows
STYLE = (
    "table{border-collapse:collapse}th,td{text-align:right;padding:.1em .6em;border-bottom:1px solid #ddd}"
    "th:first-child,td:first-child{text-align:left;overflow-wrap:anywhere}.worst{background:#fde0dd}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(340px,1fr));gap:.5em}figure{margin:0}"
    ".plot{height:220px}figcaption{font-size:.8em;overflow-wrap:anywhere}summary{font-weight:bold;margin:1em 0 .3em}"
)
SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((e) => e.isIntersecting)) {
    watcher.unobserve(entry.target);
    const figure = figures[entry.target.dataset.figure];
    Plotly.newPlot(entry.target, figure.data, figure.layout, {displayModeBar: false, responsive: true});
  }
}, {rootMargin: "400px"});
for (const place of document.querySelectorAll(".plot")) watcher.observe(place);
"""


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
    return ranges


def most_clipped(ranges: Sequence[RangeRecord]) -> RangeRecord | None:
    """The range with the largest clipped share, the first of equals; None where none was counted."""
    counted = [each for each in ranges if each.clipped is not None]
    return max(counted, key=lambda each: each.clipped or 0.0, default=None)


def percent(share: float | None) -> str:
    """A share to three digits, or a dash for one that was not counted."""
    return "-" if share is None else f"{100 * share:.3g}%"


def interval(low: float, high: float) -> str:
    """Two bounds to four digits."""
    return f"{low:.4g} .. {high:.4g}"


def content(ranges: Sequence[RangeRecord]) -> list[dict[str, Any]]:
    """The ranges as JSON, histograms with the edges of their bins."""
    found = []
    for each in ranges:
        noted = asdict(each)
        if each.histogram is not None:
            noted["histogram"]["edges"] = each.histogram.edges
        found.append(noted)
    return found


def figure(record: RangeRecord) -> dict[str, Any]:
    """Plotly's data and layout for the histogram of a range: bars inside and beyond it, its bounds, the extremes."""
    histogram = record.histogram
    assert histogram is not None
    edges = histogram.edges
    bars = [(-edges[i + 1], -edges[i], n) for i, n in reversed(list(enumerate(histogram.negative)))]
    bars += [(edges[i], edges[i + 1], n) for i, n in enumerate(histogram.rest)]
    split: dict[str, list[tuple[float, float, int]]] = {INSIDE: [], BEYOND: []}
    for bar in bars:
        if bar[2]:
            split[BEYOND if bar[1] <= record.low or bar[0] >= record.high else INSIDE].append(bar)
    data = [
        {
            "type": "bar",
            "x": [(left + right) / 2 for left, right, _ in found],
            "width": [right - left for left, right, _ in found],
            "y": [n * histogram.width / (right - left) for left, right, n in found],
            "customdata": [n for _, _, n in found],
            "hovertemplate": "%{customdata} values around %{x:.4g}<extra></extra>",
            "marker": {"color": color, "line": {"width": 0}},
        }
        for color, found in split.items()
    ]
    first, last = min(record.low, record.lowest), max(record.high, record.highest)
    beside = MARGIN * (last - first) or histogram.width
    lines = [(value, "dot", OBSERVED) for value in (record.lowest, record.highest)]
    lines += [(value, "solid", BEYOND) for value in (record.low, record.high)]
    shapes = [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": value,
            "x1": value,
            "y0": 0,
            "y1": 1,
            "line": {"dash": dash, "color": color, "width": 1.5},
        }
        for value, dash, color in lines
    ]
    layout = {
        "barmode": "overlay",
        "showlegend": False,
        "margin": {"l": 45, "r": 10, "t": 5, "b": 25},
        "xaxis": {"range": [first - beside, last + beside]},
        "yaxis": {"type": "log", "exponentformat": "power"},
        "shapes": shapes,
    }
    return {"data": data, "layout": layout}


def write_ranges(model: str, ranges: Sequence[RangeRecord], path: Path) -> None:
    """One page: a table of the ranges, and the histograms that there are, block by block."""
    drawn = [i for i, each in enumerate(ranges) if each.histogram is not None]
    parts = [_table(ranges, set(drawn))]
    if drawn:
        parts.append(
            "<p>Bars: values per bin of the finest width, on a logarithmic axis; red where they are beyond the range. "
            "Solid lines: the bounds of the range. Dotted: the extremes that were observed. Drag to zoom, double-click "
            "to go back.</p>"
        )
        for block, members in groupby(drawn, key=lambda i: block_of(ranges[i].tensor)):
            figures = "".join(
                f'<figure id="range-{i}"><figcaption>{_about(ranges[i])}</figcaption>'
                f'<div class="plot" data-figure="{i}"></div></figure>'
                for i in members
            )
            title = html.escape(block) or "the model"
            parts.append(f'<details open><summary>{title}</summary><div class="plots">{figures}</div></details>')
        # < would end the script if a name held </script>; JSON has another way to write it.
        made = json.dumps({i: figure(ranges[i]) for i in drawn}, separators=(",", ":")).replace("<", "\\u003c")
        parts.append(f'<script type="application/json" id="figures">{made}</script>')
        parts.append(f"<script>{import_module('plotly.offline').get_plotlyjs()}</script><script>{SCRIPT}</script>")
    else:
        parts.append(f"<p>{NO_HISTOGRAMS}</p>")
    write_page(path, f"compress calibration: {model}", "".join(parts), STYLE)


def block_of(tensor: str) -> str:
    """The part of a name up to its first number: model.layers.3 of model.layers.3.mlp.up_proj."""
    found = re.match(r"(.*?\.\d+)(\.|$)", tensor)
    return found[1] if found else ""


def _about(record: RangeRecord) -> str:
    """Whose range it is, as HTML."""
    names = "<br>".join(html.escape(name) for name in (record.tensor, *record.also))
    return names if record.role == "input" else f"{html.escape(record.role)} of {names}"


def _table(ranges: Sequence[RangeRecord], drawn: set[int]) -> str:
    worst = most_clipped(ranges)
    rows = []
    for i, each in enumerate(ranges):
        about = f'<a href="#range-{i}">{_about(each)}</a>' if i in drawn else _about(each)
        cells = [
            each.calibrator,
            interval(each.lowest, each.highest),
            interval(each.low, each.high) + (f" ({each.ranges} ranges)" if each.ranges > 1 else ""),
            percent(each.clipped),
            f"{each.tokens}",
        ]
        marked = ' class="worst"' if each is worst and each.clipped else ""
        rows.append(f"<tr{marked}><td>{about}</td>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    headings = ("tensor", "calibrator", "observed", "range", "clipped", "tokens")
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
