"""The training of a checkpoint, from the lines that its run left beside it: as figures and as a picture.

In the picture the loss is drawn upwards by its logarithm: every step as a thin line, the mean over a hundredth of the
steps as a thick one, held-out samples as dots. Trainings of one run follow each other to the right.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NotRequired, TypedDict

from compress.base.errors import CheckpointError, InputError
from compress.base.regular_files import check_nesting, regular
from compress.base.schema import fits
from compress.checkpoint.files import write_whole
from compress.checkpoint.ownership import noted
from compress.checkpoint.read.source import find_source
from compress.evaluation.report.drawing import MARGIN, SIZE, Frame, key, picture
from compress.train.loop.metrics import TRAINING

STEP, MEAN, HELD_OUT = "#a6c8e0", "#4477aa", "#ee6677"
SHARE = 100  # of the steps, over which a mean is taken
LEAST = 1e-12  # smaller losses are drawn as this one


class Line(TypedDict):
    """The fields read from a line of `training.jsonl`."""

    training: int
    step: int
    loss: NotRequired[float]
    per_second: NotRequired[float]
    held_out: NotRequired[dict[str, float]]


@dataclass(frozen=True)
class TrainingCurve:
    """One training: its steps, and the measurements on held-out samples."""

    steps: list[Line]
    held_out: list[Line]


def curves(model: str) -> list[TrainingCurve]:
    """The trainings of a model. Raises InputError for a checkpoint without any, CheckpointError for a damaged file."""
    source = find_source(model)
    path = source.path / TRAINING
    if not path.exists():
        raise InputError(f"{source.name} holds no {TRAINING}; give what `compress qat` or `compress distill` wrote")
    try:
        lines: list[Line] = [json.loads(text) for text in regular(path, "training").read_text("utf-8").splitlines()]
        check_nesting(lines)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    for i, line in enumerate(lines, 1):
        fits(line, Line, f"{path}: line {i}")
    found = [list(group) for _, group in groupby(lines, key=lambda line: line["training"])]
    made = [TrainingCurve([x for x in g if "loss" in x], [x for x in g if "held_out" in x]) for g in found]
    if not made or not all(curve.steps for curve in made):
        raise CheckpointError(f"{path} has a training without steps; it must have a line for each")
    return made


def content(found: Sequence[TrainingCurve]) -> list[dict[str, Any]]:
    """The curves as JSON."""
    return [{"steps": curve.steps, "held_out": curve.held_out} for curve in found]


def rows(found: Sequence[TrainingCurve]) -> list[tuple[str, ...]]:
    """A row for each training: steps, losses of the first and last hundredth, held-out losses, tokens a second."""
    told: list[tuple[str, ...]] = []
    for curve in found:
        few = math.ceil(len(curve.steps) / SHARE)
        losses = [line["loss"] for line in curve.steps]
        first, last = (total(curve.held_out[i]) if curve.held_out else None for i in (0, -1))
        held_out = "not measured" if first is None or last is None else f"{first:.4g} -> {last:.4g}"
        speed = fmean(line.get("per_second", 0.0) for line in curve.steps)
        change = f"{fmean(losses[:few]):.4g} -> {fmean(losses[-few:]):.4g}"
        told.append((str(curve.steps[-1]["step"]), change, held_out, f"{speed:.0f}"))
    return told


def total(line: Line) -> float:
    """The sum of the losses on held-out samples, unweighted."""
    return math.fsum(line["held_out"].values())


def drawn(model: str, found: Sequence[TrainingCurve]) -> str:
    """The picture."""
    steps, means, dots, before = [], [], [], 0
    for curve in found:
        few = math.ceil(len(curve.steps) / SHARE)
        points = [(before + line["step"], max(LEAST, line["loss"])) for line in curve.steps]
        steps.append(points)
        means.append([(x, fmean(y for _, y in points[max(0, i + 1 - few) : i + 1])) for i, (x, _) in enumerate(points)])
        dots += [(before + line["step"], max(LEAST, total(line))) for line in curve.held_out]
        before += curve.steps[-1]["step"]
    values = [y for points in steps for _, y in points] + [y for _, y in dots]
    frame = Frame(0, before, min(values), max(values))
    marks = frame.axes([round(before * i / 4) for i in range(5)])
    for colour, width, lines in ((STEP, 1, steps), (MEAN, 2, means)):
        for points in lines:
            path = " ".join("{:.1f},{:.1f}".format(*frame.place(x, y)) for x, y in points)
            marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    for x, y in dots:
        across, up = frame.place(x, y)
        note = f"<title>step {x}: {y:.4g}</title>"
        marks.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4" fill="{HELD_OUT}">{note}</circle>')
    marks.append(f'<text x="{SIZE[0] / 2}" y="{SIZE[1] - MARGIN + 40}" text-anchor="middle">step</text>')
    kinds = [("loss of a step", STEP), (f"mean of 1/{SHARE}", MEAN), ("held out", HELD_OUT)]
    return picture(f"{model}: loss of training", [*marks, *key(kinds)])


def write_curves(model: str, found: Sequence[TrainingCurve], path: Path) -> None:
    """Write the picture. Raises InputError where the file cannot be written."""
    try:
        write_whole(path, noted(drawn(model, found)))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
