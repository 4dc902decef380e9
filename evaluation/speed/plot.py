"""A report as one page of plots (`compress.evaluation.page`)."""

import html
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from compress.evaluation.page import write_page
from compress.evaluation.speed.report import Report
from compress.evaluation.speed.table import skipped

HEIGHT = 420


def write_plots(report: Report, path: Path) -> None:
    """Write the page; it appears when it is complete."""
    go, io = import_module("plotly.graph_objects"), import_module("plotly.io")
    figures = linear_figures(report) if report.what == "linears" else model_figures(report)
    parts = []
    for i, (title, content) in enumerate(figures):
        made = go.Figure({**content, "layout": {**content["layout"], "title": {"text": title}, "height": HEIGHT}})
        parts.append(io.to_html(made, full_html=False, include_plotlyjs=i == 0))
    facts = {**report.facts, "settings": report.settings, "ceilings": report.ceilings}
    lines = [f"not measured: {line}" for line in skipped(report.results)] + list(dict.fromkeys(report.notes))
    parts += [f"<p>{html.escape(line)}</p>" for line in lines]
    parts.append(f"<pre>{html.escape(json.dumps(facts, indent=1))}</pre>")
    write_page(path, f"compress bench: {report.facts['device']}", "".join(parts))


def linear_figures(report: Report) -> list[tuple[str, dict[str, Any]]]:
    """(title, data and layout) of two plots per shape: ratio to dense, and share of the ceiling, over tokens."""
    timed = [entry for entry in report.results if "time_ms" in entry]
    figures = []
    for N, K in dict.fromkeys((entry["N"], entry["K"]) for entry in timed):
        here = [entry for entry in timed if (entry["N"], entry["K"]) == (N, K)]
        names = list(dict.fromkeys(entry["candidate"] for entry in here))
        for what, axis in (("speedup over dense", "ratio"), ("share of the measured ceiling", "share")):
            lines = []
            for name in names:
                points = [entry for entry in here if entry["candidate"] == name]
                values = [
                    entry["share"]
                    if axis == "share"
                    else entry["speedup_over"].get("dense", 1.0 if name == "dense" else None)
                    for entry in points
                ]
                x = [entry["M"] for entry in points]
                lines.append({"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": values})
            layout = {"xaxis": {"type": "log", "title": {"text": "tokens"}}, "yaxis": {"title": {"text": axis}}}
            figures.append((f"{N} x {K}: {what}", {"data": lines, "layout": layout}))
    return figures


def model_figures(report: Report) -> list[tuple[str, dict[str, Any]]]:
    """(title, data and layout): tokens per second of prefill and decode, and bytes, by variant and batch."""
    timed = [entry for entry in report.results if "decode" in entry]
    batches = list(dict.fromkeys(entry["batch"] for entry in timed))
    model = html.escape(report.settings["model"])  # plotly reads tags in titles
    figures = []
    for part in ("prefill", "decode"):
        bars = [_bars(f"batch {batch}", timed, batch, part) for batch in batches]
        layout = {"barmode": "group", "yaxis": {"title": {"text": "tokens per second"}}}
        figures.append((f"{model}: {part}", {"data": bars, "layout": layout}))
    first = [entry for entry in timed if entry["batch"] == batches[0]] if batches else []
    sizes = []
    for name, key in (("weights", "weights_bytes"), ("peak while running", "peak_bytes")):
        values = [entry[key] and entry[key] / 2**20 for entry in first]
        sizes.append({"type": "bar", "name": name, "x": [entry["variant"] for entry in first], "y": values})
    layout = {"barmode": "group", "yaxis": {"title": {"text": "MiB"}}}
    figures.append(
        (
            f"{model}: memory, batch {batches[0] if batches else '-'}",
            {"data": sizes, "layout": layout},
        )
    )
    return figures


def _bars(name: str, timed: list[dict[str, Any]], batch: int, part: str) -> dict[str, Any]:
    here = [entry for entry in timed if entry["batch"] == batch]
    x, y = [entry["variant"] for entry in here], [entry[part]["tokens_per_s"] for entry in here]
    return {"type": "bar", "name": name, "x": x, "y": y}
