"""The content of a benchmark's report on a terminal: tables and sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from compress.evaluation.report.content import ReportTable
from compress.evaluation.speed.report import SpeedReport
from compress.kernels.measure.halved import HALVED

MIB = 2**20
UNITS = {"B/s": ("GB/s", 1e9), "op/s": ("TFLOP/s", 1e12)}


def tables(report: SpeedReport) -> list[ReportTable | str]:
    """Tables and lines to show, from top to bottom."""
    shown: list[ReportTable | str] = [_ceilings(report)]
    if report.tuned:
        shown.append(f"tuned: {len(report.tuned)} entries of the table of this user")
    shown += [_linears(report)] if report.what == "linears" else [_models(report)]
    shown += list(dict.fromkeys(line for entry in report.results for line in kernels(entry)))
    shown += slower(report.results)
    shown += [f"not measured: {line}" for line in skipped(report.results)]
    shown += [f"note: {line}" for line in dict.fromkeys(report.notes)]
    return shown


def kernels(entry: Mapping[str, Any]) -> list[str]:
    """A line for each part of a variant with compressed layers, naming its kernels."""
    found = entry.get("kernels", {})
    return [f"{entry['variant']}, {part}: {', '.join(names)}" for part, names in found.items() if names]


def slower(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for every 2:4 candidate that is not faster than the same bits of all weights, with the places where it is
    not."""
    places: dict[str, list[str]] = {}
    for entry in results:
        name = entry.get("candidate", "")
        over = entry.get("speedup_over", {}).get(HALVED.get(name))
        if over is not None and over <= 1:
            places.setdefault(name, []).append(f"{entry['N']}x{entry['K']} M={entry['M']}: {ratio(over)}")
    return [f"{name} is no faster than {HALVED[name]}: {', '.join(found)}" for name, found in places.items()]


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


def title_of(report: SpeedReport) -> str:
    """The measured model and settings, and the statistic that is quoted."""
    s = report.settings
    what = "linear layers" if report.what == "linears" else s["model"]
    prompt = "" if report.what == "linears" else f", prompt of {s['prompt']}, {s['new']} new tokens"
    return f"{what}, {s['dtype']}{prompt}, {s['quoted']} of {s['rounds']} rounds"


def _ceilings(report: SpeedReport) -> str:
    threads = f", {report.facts['threads']} threads" if report.device.type == "cpu" else ""
    reached = [
        f"{name} {entry.get('skipped') or rate(entry['per_s'], entry['unit'], 'int' in name)}"
        for name, entry in report.ceilings.items()
    ]
    return f"ceilings of {report.facts['device']}{threads}: {', '.join(reached)}"


def _linears(report: SpeedReport) -> ReportTable:
    rivals = {other for entry in report.results for other in entry.get("speedup_over", {})}
    others = [name for name in dict.fromkeys(e["candidate"] for e in report.results) if name in rivals]
    names = ("outputs x inputs", "M", "candidate", "bound")
    columns = (*names, "time, us", "rate", "share", *(f"vs {name.removeprefix('torch._')}" for name in others))
    rows: list[tuple[str, ...]] = []
    before: tuple[int, ...] = ()
    for entry in report.results:
        product = (entry["N"], entry["K"], entry["M"])
        shape = (f"{entry['N']} x {entry['K']}", f"{entry['M']}") if product != before else ("", "")
        before = product
        if "time_ms" not in entry:
            left_out = (*shape, entry["candidate"], "not measured")
            rows.append((*left_out, *[""] * (len(columns) - len(left_out))))
            continue
        name = entry["candidate"] + (" (eager)" if entry.get("launch") == "eager" else "")
        reached = rate(entry["operations_per_s"], "op/s", entry["arithmetic"] == "int8")
        if entry["bound"] == "memory":
            reached = rate(entry["bytes_per_s"], "B/s")
        figures = (f"{entry['time_ms'] * 1e3:.1f}", reached, percent(entry["share"]))
        ratios = [ratio(entry["speedup_over"].get(other)) for other in others]
        rows.append((*shape, name, entry["bound"] or "-", *figures, *ratios))
    return ReportTable(columns, rows, title_of(report), names=len(names))


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
    return ReportTable((*names, *speeds, "weights MiB", "peak MiB"), rows, title_of(report), names=len(names))


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
