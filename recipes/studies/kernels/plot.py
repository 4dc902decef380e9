"""A page of pictures and tables of a stored benchmark, of kernels or of a model. It needs no network.

python -m compress.recipes.studies.kernels.plot speed.json speed.html
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import files_overwrite_option
from compress.cli.options import writable
from compress.evaluation.report import wording
from compress.evaluation.report.content import Article, Block, Picture, Report, ReportTable, Section, Tile, Words
from compress.evaluation.report.drawing import LETTER, STRONG, WIDE, Axis, hover, inline, label, rule
from compress.evaluation.report.facts import fact_rows
from compress.evaluation.report.page import write_page
from compress.evaluation.speed import speed_tables
from compress.recipes.studies.kernels.tables import percent, rate, slower

BAR, ROW, HEADING = 12.0, 20.0, 26.0  # heights: of a bar, of its row, of the line above a group
CONTENT = ("settings", "ceilings", "tuned", "notes", "failures", "results")
NO_FACTS = ("format", "what", "complete", "device_peak_bytes", *CONTENT)
APART = 8.0  # between a name, its bar and its figure
LINEARS = (
    "Bars: how many times as fast as torch's dense product of the same shape, whose 1 is the line across; of other "
    "libraries in grey. Percentages: the share of what this machine reaches at best, measured in the same run."
)
MODELS = "Figures in brackets: the ratio to the dense model at the same batch."


@dataclass(frozen=True)
class SpeedBar:
    """value: its length, None for no bar. figure: text at its end. about: tooltip. style: `main` or `other`."""

    name: str
    value: float | None
    figure: str
    about: str = ""
    style: str = "main"


def page_of(report: Mapping[str, Any]) -> Report:
    """The content of the page of a stored report."""
    of_linears, settings, results = report["what"] == "linears", report["settings"], report["results"]
    sections = linear_sections(results) if of_linears else model_sections(results)
    remarks = [*slower(results), *dict.fromkeys(report["notes"])]
    if remarks:
        sections.append(Section("Remarks", [Words(wording.clean(line), "note") for line in remarks]))
    left = [f"{name}: {entry['skipped']}" for name, entry in report.get("ceilings", {}).items() if "skipped" in entry]
    left += speed_tables.skipped_lines(results)
    if left:
        sections.append(Section("Not measured", [Words(wording.clean(line), "note") for line in left]))
    facts = {key: value for key, value in report.items() if key not in (*NO_FACTS, "versions")}
    rows = fact_rows({**facts, **settings, **shapes_of(settings), "versions": report["versions"]})
    sections.append(Section("Where this comes from", [ReportTable(("", ""), rows, names=2)]))
    what = "linear layers" if of_linears else wording.name(settings["model"])
    verdict = f"On {report['device']}: {speed_tables.title_of(settings)}."
    return Report(
        f"Speed of {what}",
        wording.clean(verdict),
        [Article(what, "", verdict, _ceilings(report.get("ceilings", {})), sections)],
        command="bench",
        footnote="What is wrong is not timed.",
    )


def shapes_of(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Shapes of linear layers as a person writes them; empty for the settings of a model."""
    return {"shapes": [f"{N}x{K}" for N, K in settings["shapes"]]} if "shapes" in settings else {}


def _ceilings(ceilings: Mapping[str, Mapping[str, Any]]) -> list[Tile]:
    """The best rates of the machine."""
    tiles = []
    for name, entry in ceilings.items():
        if "skipped" not in entry:
            value, unit = rate(entry["per_s"], entry["unit"], "int" in name).split(" ")
            tiles.append(Tile(name, value, f"{unit} at best"))
    return tiles


def linear_sections(results: Sequence[Mapping[str, Any]]) -> list[Section]:
    """A section for every shape: a picture per number of tokens, all to one scale, and a table of the times."""
    timed = [entry for entry in results if "time_ms" in entry]
    sections: list[Section] = []
    for N, K in dict.fromkeys((entry["N"], entry["K"]) for entry in timed):
        here = [entry for entry in timed if (entry["N"], entry["K"]) == (N, K)]
        by_tokens = {M: [e for e in here if e["M"] == M] for M in sorted({e["M"] for e in here})}
        most = longest(ratio for entry in here if (ratio := over_dense(entry)) is not None)
        blocks: list[Block] = [] if sections else [Words(LINEARS, "note")]
        for M, entries in by_tokens.items():
            title = f"{M} token{'' if M == 1 else 's'}"
            groups = [("", [_candidate(entry) for entry in entries])]
            blocks.append(Picture(title, drawn(f"speed over dense of {N} x {K}, {title}", groups, most, mark=1.0)))
        names = dict.fromkeys(entry["candidate"] for entry in here)
        times = {(entry["candidate"], entry["M"]): wording.number(1e3 * entry["time_ms"]) for entry in here}
        rows = [(name, *(times.get((name, M), wording.NONE) for M in by_tokens)) for name in names]
        columns = ("microseconds", *(f"M = {M}" for M in by_tokens))
        blocks.append(ReportTable(columns, rows, "Time of one product, by tokens M", folded=True))
        sections.append(Section(f"{N} outputs x {K} inputs", blocks))
    return sections


def over_dense(entry: Mapping[str, Any]) -> float | None:
    """Speed relative to the dense product; None where that was not timed."""
    if entry["candidate"] == "dense":
        return 1.0
    ratio: float | None = entry["speedup_over"].get("dense")
    return ratio


def _candidate(entry: Mapping[str, Any]) -> SpeedBar:
    ratio, name = over_dense(entry), entry["candidate"]
    figure = f"{speed_tables.ratio(ratio)}, {percent(entry['share'])}"
    about = f"{name}: {1e3 * entry['time_ms']:,.1f} microseconds, {percent(entry['share'])} of the ceiling"
    return SpeedBar(name.removeprefix("torch._"), ratio, figure, about, "main" if entry.get("ours") else "other")


def model_sections(results: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Tokens per second of prefill and decode, and bytes, by variant and batch."""
    timed = [entry for entry in results if "decode" in entry]
    if not timed:
        return []
    speed: list[Block] = [Words(MODELS, "note")]
    for part, title in (("prefill", "Prefill, tokens per second"), ("decode", "Decoding, tokens per second")):
        speed.append(_grouped(title, timed, partial(_rate, part)))
    first = timed[0]["batch"]
    held = [entry for entry in timed if entry["batch"] == first]
    return [Section("Speed and memory", [*speed, _grouped(f"Memory, batch {first}", held, _memory)])]


def _grouped(
    title: str, entries: Sequence[Mapping[str, Any]], bars: Callable[[Mapping[str, Any]], list[SpeedBar]]
) -> Picture:
    """A group of bars per variant."""
    groups = [
        (wording.name(variant), [bar for entry in members for bar in bars(entry)])
        for variant, members in groupby(entries, key=lambda entry: str(entry["variant"]))
    ]
    most = longest(bar.value for _, bars_of in groups for bar in bars_of if bar.value is not None)
    return Picture(title, drawn(title, groups, most))


def _rate(part: str, entry: Mapping[str, Any]) -> list[SpeedBar]:
    figures = entry[part]
    ratio = figures.get("speedup_over", {}).get("dense")
    style = "other" if entry["variant"] == "dense" else "main"
    about = f"{entry['variant']}, batch {entry['batch']}: {figures['time_ms']:.4g} ms"
    figure = wording.number(figures["tokens_per_s"]) + ("" if ratio is None else f" ({speed_tables.ratio(ratio)})")
    return [SpeedBar(f"batch {entry['batch']}", figures["tokens_per_s"], figure, about, style)]


def _memory(entry: Mapping[str, Any]) -> list[SpeedBar]:
    style = "other" if entry["variant"] == "dense" else "main"
    parts = (("weights", entry["weights_bytes"]), ("peak", entry["peak_bytes"]))
    return [SpeedBar(name, value, wording.data(value), style=style) for name, value in parts]


def longest(values: Iterable[float]) -> float:
    """The largest of the finite values, 1 where there is none above zero."""
    return max((value for value in values if math.isfinite(value) and value > 0), default=1.0)


def drawn(about: str, groups: Sequence[tuple[str, Sequence[SpeedBar]]], most: float, mark: float | None = None) -> str:
    """Bars from left to right, each with its name before it and its figure behind it. groups: (heading or nothing,
    bars). most: the value of a bar of full length. mark: a value with a line across all bars."""
    every = [bar for _, bars in groups for bar in bars]
    left = LETTER * max((len(bar.name) for bar in every), default=0) + APART
    room = LETTER * max((len(bar.figure) for bar in every), default=0) + APART
    across = Axis(0.0, most, left, max(left + ROW, WIDE - room))
    height = sum((HEADING if heading else 0.0) + ROW * len(bars) for heading, bars in groups)
    marks, y = [], 0.0
    if mark is not None and mark <= most:
        x = across.place(mark)
        marks.append(rule(x, 0, x, height, "bound"))
    for heading, bars in groups:
        if heading:
            y += HEADING
            marks.append(label(0, y - APART, shortened(heading), style="strong"))
        for bar in bars:
            marks.append(_bar(bar, across, y))
            y += ROW
    return inline(about, height + 2, marks)


def _bar(bar: SpeedBar, across: Axis, y: float) -> str:
    end = across.start if bar.value is None or not math.isfinite(bar.value) else across.place(bar.value)
    inside = hover(bar.about) if bar.about else ""
    box = f'x="{across.start:.1f}" y="{y + (ROW - BAR) / 2:.1f}" width="{end - across.start:.1f}" height="{BAR:.0f}"'
    base = y + ROW / 2 + 4.5
    named = label(across.start - APART, base, bar.name, "end")
    return f'<g>{inside}<rect {box} class="{bar.style}"/>{named}{label(end + APART, base, bar.figure, style="on")}</g>'


def shortened(text: str) -> str:
    """A heading cut to the width of the picture."""
    most = int(WIDE / STRONG)
    return text if len(text) <= most else text[: most - 3] + "..."


@click.command()
@click.argument("speed")
@click.argument("page", callback=writable)
@files_overwrite_option
@exits_cleanly
def plot(speed: str, page: str) -> None:
    """Draw the JSON file of a benchmark as one page."""
    write_page(Path(page), page_of(json.loads(Path(speed).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    plot()
