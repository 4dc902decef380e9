"""The report of a benchmark of a model on a terminal: a table and sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from compress.evaluation.report.content import ReportTable
from compress.evaluation.speed.report import SpeedReport

MIB = 2**20
UNITS = {"B/s": ("GB/s", 1e9), "op/s": ("TFLOP/s", 1e12)}


def tables(report: SpeedReport) -> list[ReportTable | str]:
    """Tables and lines to show, from top to bottom."""
    lines = dict.fromkeys(line for entry in report.results for line in kernels(entry))
    return [ceilings_line(report), _models(report), *lines, *remarks(report)]


def remarks(report: SpeedReport) -> list[str]:
    """The lines below the table of a report: what was not measured, and notes."""
    notes = [f"note: {line}" for line in dict.fromkeys(report.notes)]
    return [*(f"not measured: {line}" for line in skipped(report.results)), *notes]


def kernels(entry: Mapping[str, Any]) -> list[str]:
    """A line for each part of a variant with compressed layers, naming its kernels."""
    found = entry.get("kernels", {})
    return [f"{entry['variant']}, {part}: {', '.join(names)}" for part, names in found.items() if names]


def skipped(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for every candidate or variant without figures, with the reason; places with the same reason share a
    line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in results:
        if "skipped" in entry:
            where = f"{entry['N']}x{entry['K']} M={entry['M']}" if "N" in entry else f"batch {entry['batch']}"
            reasons.setdefault((entry.get("candidate") or entry["variant"], entry["skipped"]), []).append(where)
    return [f"{name} ({', '.join(places)}): {reason}" for (name, reason), places in reasons.items()]


def rate(per_s: float, unit: str, integers: bool = False) -> str:
    """A rate in its usual unit."""
    name, size = UNITS[unit]
    return f"{per_s / size:.4g} {name.replace('TFLOP', 'TOP') if integers else name}"


def title_of(settings: Mapping[str, Any]) -> str:
    """The measured model and settings, and the statistic that is quoted."""
    prompt = f", prompt of {settings['prompt']}, {settings['new']} new tokens" if "prompt" in settings else ""
    model, dtype = settings.get("model", "linear layers"), settings["dtype"]
    return f"{model}, {dtype}{prompt}, {settings['quoted']} of {settings['rounds']} rounds"


def ceilings_line(report: SpeedReport) -> str:
    """The best rates of the machine."""
    threads = f", {report.facts['threads']} threads" if report.device.type == "cpu" else ""
    reached = [
        f"{name} {entry.get('skipped') or rate(entry['per_s'], entry['unit'], 'int' in name)}"
        for name, entry in report.ceilings.items()
    ]
    return f"ceilings of {report.facts['device']}{threads}: {', '.join(reached)}"


def _models(report: SpeedReport) -> ReportTable:
    names = ("variant", "batch", "layer error", "logits error", "decode")
    speeds = ("prefill tok/s", "vs dense", "share", "decode tok/s", "vs dense", "share")
    rows: list[tuple[str, ...]] = []
    for entry in report.results:
        head = (entry["variant"], f"{entry['batch']}")
        errors = ("reference", "reference")
        if entry.get("layers") != 0:
            errors = (
                _error(entry.get("layer_error"), 1.0),
                _error(entry.get("logits_error"), entry.get("logits_allowed")),
            )
        sizes = (_mib(entry.get("weights_bytes")), _mib(entry.get("peak_bytes")))
        if "decode" not in entry:
            rows.append((*head, *errors, "not measured", *"-" * len(speeds), *sizes))
            continue
        rates = []
        for part in ("prefill", "decode"):
            figures = entry[part]
            rates += [f"{figures['tokens_per_s']:.1f}", ratio(figures.get("speedup_over", {}).get("dense"))]
            rates.append(percent(figures["share"]))
        rows.append((*head, *errors, entry["launch"], *rates, *sizes))
    return ReportTable((*names, *speeds, "weights MiB", "peak MiB"), rows, title_of(report.settings), names=len(names))


def ratio(value: float | None) -> str:
    """A ratio of speeds."""
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """A share in whole percent."""
    return "-" if value is None else f"{value:.0%}"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:.1f}"


def _error(value: float | None, allowed: float | None) -> str:
    return "-" if value is None or allowed is None else f"{value:.2g} of {allowed:.2g}"
