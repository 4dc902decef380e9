"""The layers of a run, from its record: a map of their errors, the worst of them, and each one's health."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compress.checkpoint.write.record import LayerRecord
from compress.evaluation.report import wording
from compress.evaluation.report.content import Block, Picture, ReportTable, Section, Words
from compress.evaluation.report.drawing import WIDE, Axis, hover, inline, label

WORST = 10
LEFT, TOP, FOOT = 52.0, 26.0, 2.0
ROW, LEAST_ROW, MOST_HEIGHT = 20.0, 7.0, 640.0
FAINTEST = 0.06  # opacity of the smallest value
MOST_LETTERS = 9  # of a kind above its column
PLACE = re.compile(r"^(?:(.*?)\.)?(\d+)\.(.+)$")
OUTSIDE = "(outside)"
# Figures of a layer's record, and their display: (figure, heading, format).
COLUMNS = (
    ("loss", "error", "share"),
    ("rtn_loss", "plain rounding", "share"),
    ("input_clipped", "inputs clipped", "share"),
    ("output_clipped", "outputs clipped", "share"),
    ("dead_channels", "dead channels", "count"),
    ("damp", "damping", "number"),
    ("shrinkage", "shrinkage", "share"),
    ("sparsity", "zeros", "share"),
    ("tokens", "tokens", "count"),
)


@dataclass(frozen=True)
class Mapped:
    """The subject of a heat map. what: its name in a sentence; said: formats a value in so many digits."""

    title: str
    what: str
    caption: str
    said: Callable[[float, int], str]


ERRORS = Mapped(
    "Error by layer",
    "relative output error",
    "Mean squared error of a layer's output, as a share of the output's own mean square, on the calibration data.",
    wording.share,
)


def place_of(layer: str) -> tuple[str, str]:
    """(block, kind) of a layer: model.layers.3.mlp.up_proj is the mlp.up_proj of model.layers.3."""
    found = PLACE.match(layer)
    if found is None:
        return OUTSIDE, layer
    before, count, kind = found.groups()
    return (f"{before}.{count}" if before else count), kind


def last_of_each(records: Sequence[LayerRecord]) -> dict[str, LayerRecord]:
    """{layer: record of the last pass with a figure of its error}; a layer may have been through several."""
    found: dict[str, LayerRecord] = {}
    for record in records:
        if record.name not in found or "loss" in record.figures:
            found[record.name] = record
    return found


def value_of(record: LayerRecord, key: str) -> float | None:
    """A figure of a layer; None where there is none."""
    found = record.figures.get(key)
    if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
        return None
    return float(found)


def section(records: Sequence[LayerRecord]) -> Section | None:
    """Everything about the layers; None where the record has none."""
    layers = last_of_each(records)
    if not layers:
        return None
    losses = {name: loss for name, each in layers.items() if (loss := value_of(each, "loss")) is not None}
    blocks: list[Block] = []
    if losses:
        blocks += [heat_map(losses, ERRORS), worst(layers, losses)]
    else:
        blocks.append(Words("Errors by layer were not measured: the passes of this run compute none.", "note"))
    blocks += _health(layers)
    blocks.append(every(layers))
    return Section("Layers", blocks)


def heat_map(values: Mapping[str, float], about: Mapped) -> Picture:
    """Blocks downwards, kinds of layers to the right; the darker, the larger, by the logarithm. values: by layer."""
    rows = list(dict.fromkeys(place_of(name)[0] for name in values))
    kinds = list(dict.fromkeys(place_of(name)[1] for name in values))
    height = min(ROW, max(LEAST_ROW, MOST_HEIGHT / len(rows)))
    width = (WIDE - LEFT - 2) / len(kinds)
    positive = [value for value in values.values() if value > 0] or [1.0]
    depth = Axis(min(positive), max(positive), FAINTEST, 1.0, logarithmic=True)
    turned = width < MOST_LETTERS * 6.0 and any(len(_short(kind, kinds)) * 6.0 > width for kind in kinds)
    top = TOP + (44.0 if turned else 0.0)
    marks = []
    for i, kind in enumerate(kinds):
        x = LEFT + (i + 0.5) * width
        if turned and width >= 10:
            tooltip = wording.name(_short(kind, kinds))[:MOST_LETTERS]
            marks.append(f'<g transform="rotate(-60 {x:.1f} {top - 8:.1f})">{label(x, top - 8, tooltip)}</g>')
        elif not turned:
            marks.append(label(x, TOP - 8, wording.name(_short(kind, kinds)), "middle"))
    shown = 1 if height >= 12 else math.ceil(12 / height)
    for i, row in enumerate(rows):
        if i % shown == 0:
            marks.append(label(LEFT - 6, top + (i + 0.5) * height + 4, _number(row), "end"))
    for name, value in values.items():
        row, kind = place_of(name)
        x, y = LEFT + kinds.index(kind) * width, top + rows.index(row) * height
        shade = depth.place(value) if value > 0 else 0.0
        tooltip = hover(f"{wording.name(name)}: {about.said(value, 3)}")
        marks.append(
            f'<rect x="{x + 0.75:.1f}" y="{y + 0.75:.1f}" width="{max(1.0, width - 1.5):.1f}" rx="2" '
            f'height="{height - 1.5:.1f}" class="main" fill-opacity="{shade:.2f}">{tooltip}</rect>'
        )
    drawn = inline(f"{about.what} of {len(values)} layers, by block and kind", top + len(rows) * height + FOOT, marks)
    ends = f"from {about.said(depth.low, 2)} to {about.said(depth.high, 2)}"
    return Picture(
        about.title, drawn, f"{about.caption} The stronger the colour, the larger: {ends}, by the logarithm."
    )


def _number(block: str) -> str:
    """A block's number, or up to seven letters of a name without one."""
    last = block.rpartition(".")[2]
    return last if last.isdecimal() else wording.name(block)[:7]


def _short(kind: str, kinds: Sequence[str]) -> str:
    """The last part of a kind's name where it is unique, else the whole name; without the suffix `_proj`."""
    last = kind.rpartition(".")[2]
    alone = sum(each.rpartition(".")[2] == last for each in kinds) == 1
    return (last if alone else kind).replace("_proj", "")


def worst(layers: Mapping[str, LayerRecord], losses: Mapping[str, float]) -> ReportTable:
    """The layers with the largest errors."""
    first = sorted(losses, key=lambda name: -losses[name])[:WORST]
    compared = any(value_of(layers[name], "rtn_loss") is not None for name in first)
    rows = []
    for name in first:
        row = (wording.name(name), layers[name].scheme or layers[name].method, wording.share(losses[name]))
        rows.append((*row, wording.share(value_of(layers[name], "rtn_loss"))) if compared else row)
    columns = ("layer", "scheme", "error", "plain rounding")
    few = len(rows) if len(rows) < WORST else "ten"
    return ReportTable(columns if compared else columns[:3], rows, f"The {few} layers with the largest error", names=2)


def _health(layers: Mapping[str, LayerRecord]) -> list[Block]:
    """Remarkable facts about the layers' health, a line each."""
    sentences = []
    dead = {name: n for name, each in layers.items() if (n := value_of(each, "dead_channels"))}
    if dead:
        most = max(dead, key=lambda name: dead[name])
        sentences.append(
            f"Input channels that are always zero: in {len(dead)} layers, most in {most}, {dead[most]:.0f}."
        )
    damps = {damp for each in layers.values() if (damp := value_of(each, "damp")) is not None}
    if len(damps) > 1:
        sentences.append(
            f"Damping went from {min(damps):g} to {max(damps):g}: some Hessians needed more to be inverted."
        )
    for side in ("input", "output"):
        cut = {name: c for name, each in layers.items() if (c := value_of(each, f"{side}_clipped")) is not None}
        if cut and max(cut.values()) > 0:
            most = max(cut, key=lambda name: cut[name])
            sentences.append(f"Most clipped {side}: {most}, {wording.share(cut[most])} of its values.")
    return [Words(" ".join(wording.name(each) for each in sentences))] if sentences else []


def every(layers: Mapping[str, LayerRecord]) -> ReportTable:
    """All layers, with the figures that any of them has."""
    known = [column for column in COLUMNS if any(value_of(each, column[0]) is not None for each in layers.values())]
    rows = [
        (wording.name(name), each.method, each.scheme, *(_cell(value_of(each, key), how) for key, _, how in known))
        for name, each in layers.items()
    ]
    headings = ("layer", "method", "scheme", *(heading for _, heading, _ in known))
    return ReportTable(headings, rows, f"All {len(rows)} layers", names=3, folded=True)


def _cell(value: float | None, how: str) -> str:
    if value is None:
        return wording.NONE
    if how == "count":
        return wording.count(int(value))
    return wording.share(value) if how == "share" else wording.number(value)
