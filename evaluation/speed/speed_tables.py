"""The report of a benchmark of a model on a terminal: a table and sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from compress.evaluation.report.content import ReportTable
from compress.evaluation.speed.report import SpeedReport

MIB = 2**20


def tables(report: SpeedReport) -> list[ReportTable | str]:
    """Tables and lines to show, from top to bottom."""
    lines = dict.fromkeys(line for entry in report.results for line in kernels(entry))
    threads = f", {report.facts['threads']} threads" if report.device.type == "cpu" else ""
    return [f"{report.facts['device']}{threads}", _models(report), *lines, *remarks(report)]


def remarks(report: SpeedReport) -> list[str]:
    """The lines below the table of a report: what was not measured, and notes."""
    notes = [f"note: {line}" for line in dict.fromkeys(report.notes)]
    return [*(f"not measured: {line}" for line in skipped_lines(report.results)), *notes]


def kernels(entry: Mapping[str, Any]) -> list[str]:
    """A line for each part of a variant with compressed layers, naming its kernels."""
    found = entry.get("kernels", {})
    return [f"{entry['variant']}, {part}: {', '.join(names)}" for part, names in found.items() if names]


def skipped_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for every candidate or variant without figures, with the reason; places with the same reason share a
    line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in results:
        if "skipped" in entry:
            where = f"{entry['N']}x{entry['K']} M={entry['M']}" if "N" in entry else f"batch {entry['batch']}"
            reasons.setdefault((entry.get("candidate") or entry["variant"], entry["skipped"]), []).append(where)
    return [f"{name} ({', '.join(places)}): {reason}" for (name, reason), places in reasons.items()]


def title_of(settings: Mapping[str, Any]) -> str:
    """The measured model and settings, and the statistic that is quoted."""
    prompt = f", prompt of {settings['prompt']}, {settings['new']} new tokens" if "prompt" in settings else ""
    model, dtype = settings.get("model", "linear layers"), settings["dtype"]
    return f"{model}, {dtype}{prompt}, {settings['quoted']} of {settings['rounds']} rounds"


def _models(report: SpeedReport) -> ReportTable:
    names = ("variant", "batch", "layer error", "decode")
    speeds = ("prefill tok/s", "vs dense", "decode tok/s", "vs dense")
    rows: list[tuple[str, ...]] = []
    for entry in report.results:
        error = entry.get("layer_error")
        wrong = "reference" if entry.get("layers") == 0 else "-" if error is None else f"{error:.2g} of 1"
        head = (entry["variant"], f"{entry['batch']}", wrong)
        sizes = (_mib(entry.get("weights_bytes")), _mib(entry.get("peak_bytes")))
        if "decode" not in entry:
            rows.append((*head, "not measured", *"-" * len(speeds), *sizes))
            continue
        rates = []
        for part in ("prefill", "decode"):
            figures = entry[part]
            rates += [f"{figures['tokens_per_s']:.1f}", ratio(figures.get("speedup_over", {}).get("dense"))]
        rows.append((*head, entry["launch"], *rates, *sizes))
    return ReportTable((*names, *speeds, "weights MiB", "peak MiB"), rows, title_of(report.settings), names=len(names))


def ratio(value: float | None) -> str:
    """A ratio of speeds."""
    return "-" if value is None else f"{value:.2f}x"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:.1f}"
