"""The report of a benchmark of kernels on a terminal: a table of products and sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from compress.evaluation.report.content import ReportTable
from compress.evaluation.speed.report import SpeedReport
from compress.evaluation.speed.speed_tables import ratio, remarks, title_of
from compress.recipes.studies.kernels.halved import HALVED

UNITS = {"B/s": ("GB/s", 1e9), "op/s": ("TFLOP/s", 1e12)}


@dataclass
class KernelReport(SpeedReport):
    """The report of a benchmark of kernels: also the ceilings of the machine, {name: {"unit", "per_s", its times}} or
    {"unit", "skipped": why}, and what was tuned."""

    ceilings: dict[str, dict[str, Any]] = field(default_factory=dict)
    tuned: list[dict[str, Any]] = field(default_factory=list)
    more: ClassVar[tuple[str, ...]] = ("ceilings", "tuned")


def tables(report: KernelReport) -> list[ReportTable | str]:
    """Tables and lines to show, from top to bottom."""
    tuned = [f"tuned: {len(report.tuned)} entries of the table of this user"] if report.tuned else []
    return [ceilings_line(report), *tuned, _linears(report), *slower(report.results), *remarks(report)]


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


def _linears(report: KernelReport) -> ReportTable:
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
    return ReportTable(columns, rows, title_of(report.settings), names=len(names))


def ceilings_line(report: KernelReport) -> str:
    """The best rates of the machine."""
    threads = f", {report.facts['threads']} threads" if report.device.type == "cpu" else ""
    reached = [
        f"{name} {entry.get('skipped') or rate(entry['per_s'], entry['unit'], 'int' in name)}"
        for name, entry in report.ceilings.items()
    ]
    return f"ceilings of {report.facts['device']}{threads}: {', '.join(reached)}"


def rate(per_s: float, unit: str, integers: bool = False) -> str:
    """A rate in its usual unit."""
    name, size = UNITS[unit]
    return f"{per_s / size:.4g} {name.replace('TFLOP', 'TOP') if integers else name}"


def percent(value: float | None) -> str:
    """A share in whole percent."""
    return "-" if value is None else f"{value:.0%}"
