"""The optional measurements of an evaluation: speed, memory and continuations of checkpoints, as they run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.device import find_device
from compress.base.errors import CompressError, InputError
from compress.base.progress import Reporter
from compress.checkpoint.read.pretrained import load_tokenizer, read_config
from compress.checkpoint.read.source import find_source
from compress.data.rows import Row
from compress.data.text import load_tokens
from compress.evaluation.document import Evaluation, SizeResult, SpeedResult
from compress.evaluation.quality.generations import beginnings, generate
from compress.evaluation.speed.memory import peak_bytes
from compress.evaluation.speed.side_by_side import measure_speed
from compress.inference.load.loading import load
from compress.model.calls import evaluating

NOT_ASKED = {
    "speed": "it was not asked for (--speed)",
    "peak memory": "it was not asked for (--memory)",
    "continuations": "they were not asked for (--continuations)",
}


@dataclass(frozen=True)
class Asked:
    """The optional measurements asked for. prompts: texts to continue; with `continuations` and no prompts, beginnings
    of the text. beside: the reference's speed, if it was measured before and is not to be measured again."""

    speed: bool = False
    memory: bool = False
    continuations: bool = False
    prompts: Sequence[Row] = ()
    beside: SpeedResult | None = None


def with_asked(
    evaluation: Evaluation,
    model: str,
    *,
    reference: str | None,
    asked: Asked,
    text: str | Tensor,
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
    if asked.speed or asked.continuations:
        alone = asked.beside is not None and not asked.continuations
        ours = _load(model, target, trust_remote_code)
        theirs = None if reference is None or alone else _load(reference, target, trust_remote_code)
        with evaluating(ours), evaluating(ours if theirs is None else theirs):
            if asked.speed:
                with measuring("speed", "measuring speed"):
                    how: dict[str, Any] = {"checkpoint": model, "trust_remote_code": trust_remote_code}
                    beside = None if asked.beside is not None else theirs
                    evaluation = replace(evaluation, speed=measure_speed(ours, beside, beside=asked.beside, **how))
            if asked.continuations:
                with measuring("continuations", "continuing prompts"):
                    prompts = asked.prompts or _beginnings(model, text, trust_remote_code)
                    tokenizer = load_tokenizer(find_source(model, trust_remote_code))
                    evaluation = replace(evaluation, generations=generate(ours, theirs, tokenizer, prompts))
    return replace(evaluation, missing={**evaluation.missing, **missing})


def speed_alone(model: str, device: str | torch.device | None = None, trust_remote_code: bool = False) -> SpeedResult:
    """The speed of a checkpoint by itself, to compare with that of others (`Asked.beside`). Raises InputError for a
    model that generates nothing."""
    network = _load(model, find_device(device), trust_remote_code)
    with evaluating(network):
        return measure_speed(network, checkpoint=model, trust_remote_code=trust_remote_code)


def _load(name: str, device: torch.device, trusted: bool) -> nn.Module:
    return load(name, torch.float32 if device.type == "cpu" else None, device, trust_remote_code=trusted)


def _beginnings(model: str, text: str | Tensor, trusted: bool) -> list[str]:
    source = find_source(model, trusted)
    tokenizer: Any = load_tokenizer(source)
    tokens = load_tokens(text, tokenizer, read_config(source), what="held-out")
    return beginnings(tokenizer, tokens.ids)


def _with_memory(
    evaluation: Evaluation, model: str, reference: str | None, device: torch.device, trusted: bool
) -> Evaluation:
    def sized(size: SizeResult | None, name: str) -> SizeResult | None:
        loading, running = peak_bytes(name, device, trusted)
        return None if size is None else replace(size, peak_load_bytes=loading, peak_run_bytes=running)

    own = sized(evaluation.size, model)
    other = evaluation.reference_size if reference is None else sized(evaluation.reference_size, reference)
    return replace(evaluation, size=own, reference_size=other)
