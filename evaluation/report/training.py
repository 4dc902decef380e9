"""The training of a checkpoint, from the lines that its run left beside it."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any, NotRequired, TypedDict

from compress.base.errors import CheckpointError, InputError
from compress.base.regular_files import check_nesting, regular
from compress.base.schema import fits
from compress.checkpoint.read.source import find_source
from compress.evaluation.report.content import ReportTable
from compress.train.loop.metrics import TRAINING

SHARE = 100  # of the steps, over which a mean is taken


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


def table(found: Sequence[TrainingCurve]) -> ReportTable:
    """A row for each training: steps, losses of the first and last hundredth, held-out losses, tokens a second."""
    rows: list[tuple[str, ...]] = []
    for curve in found:
        few = math.ceil(len(curve.steps) / SHARE)
        losses = [line["loss"] for line in curve.steps]
        first, last = (math.fsum(curve.held_out[i]["held_out"].values()) if curve.held_out else None for i in (0, -1))
        held_out = "not measured" if first is None or last is None else f"{first:.4g} -> {last:.4g}"
        speed = fmean(line.get("per_second", 0.0) for line in curve.steps)
        change = f"{fmean(losses[:few]):.4g} -> {fmean(losses[-few:]):.4g}"
        rows.append((str(curve.steps[-1]["step"]), change, held_out, f"{speed:.0f}"))
    return ReportTable(("steps", "loss", "held out", "tokens (samples)/s"), rows, names=0)
