"""The optional measurements of an evaluation: speed and memory of checkpoints, as they run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from compress.base.device import find_device
from compress.base.errors import CompressError, InputError
from compress.base.progress import Reporter
from compress.evaluation.document import Evaluation, SizeResult, SpeedResult
from compress.evaluation.speed.memory import peak_bytes
from compress.evaluation.speed.side_by_side import measure_speed
from compress.inference.load.loading import load
from compress.model.calls import evaluating

NOT_ASKED = {
    "speed": "it was not asked for (--speed)",
    "peak memory": "it was not asked for (--memory)",
}


@dataclass(frozen=True)
class Asked:
    """The optional measurements asked for. beside: the reference's speed, if it was measured before and is not to be
    measured again."""

    speed: bool = False
    memory: bool = False
    beside: SpeedResult | None = None


def with_asked(
    evaluation: Evaluation,
    model: str,
    *,
    reference: str | None,
    asked: Asked,
    device: str | torch.device | None,
    trust_remote_code: bool,
    reporter: Reporter,
) -> Evaluation:
    """The evaluation with the optional measurements added. The reason for each that failed is added to `missing` and
    reported."""
    missing, target = dict(NOT_ASKED), find_device(device)

    @contextmanager
    def measuring(what: str, note: str) -> Iterator[None]:
        reporter.note(note)
        try:
            yield
            del missing[what]
        except (CompressError, InputError) as error:
            missing[what] = str(error)
            reporter.note(f"{what} not measured: {error}")

    if asked.memory:
        with measuring("peak memory", "measuring memory in processes of their own"):
            evaluation = _with_memory(evaluation, model, reference, target, trust_remote_code)
    if asked.speed:
        ours, other = _load(model, target, trust_remote_code), None if asked.beside is not None else reference
        theirs = None if other is None else _load(other, target, trust_remote_code)
        how: dict[str, Any] = {"checkpoint": model, "trust_remote_code": trust_remote_code}
        with evaluating(ours), evaluating(theirs or ours), measuring("speed", "measuring speed"):
            evaluation = replace(evaluation, speed=measure_speed(ours, theirs, beside=asked.beside, **how))
    return replace(evaluation, missing={**evaluation.missing, **missing})


def speed_alone(model: str, device: str | torch.device | None = None, trust_remote_code: bool = False) -> SpeedResult:
    """The speed of a checkpoint by itself, to compare with that of others (`Asked.beside`). Raises InputError for a
    model that generates nothing."""
    network = _load(model, find_device(device), trust_remote_code)
    with evaluating(network):
        return measure_speed(network, checkpoint=model, trust_remote_code=trust_remote_code)


def _load(name: str, device: torch.device, trusted: bool) -> nn.Module:
    return load(name, torch.float32 if device.type == "cpu" else None, device, trust_remote_code=trusted)


def _with_memory(
    evaluation: Evaluation, model: str, reference: str | None, device: torch.device, trusted: bool
) -> Evaluation:
    def sized(size: SizeResult | None, name: str) -> SizeResult | None:
        loading, running = peak_bytes(name, device, trusted)
        return None if size is None else replace(size, peak_load_bytes=loading, peak_run_bytes=running)

    own = sized(evaluation.size, model)
    other = evaluation.reference_size if reference is None else sized(evaluation.reference_size, reference)
    return replace(evaluation, size=own, reference_size=other)
