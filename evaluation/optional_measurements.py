"""The optional measurements of an evaluation: speed, memory and continuations of checkpoints, as they run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.device import find_device
from compress.base.errors import CompressError, InputError
from compress.base.progress import Reporter
from compress.checkpoint.read.pretrained import load_tokenizer, read_config
from compress.checkpoint.read.source import find_source
from compress.data.text import load_tokens
from compress.evaluation.document import Evaluation, SizeResult, SpeedResult
from compress.evaluation.quality.generations import beginnings, generate
from compress.evaluation.speed.peak import peak_bytes
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
    prompts: Sequence[str] = ()
    beside: SpeedResult | None = None


def with_asked(
    found: Evaluation,
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

    def unmeasured(what: str, error: CompressError | InputError) -> None:
        missing[what] = str(error)
        reporter.note(f"{what} not measured: {error}")

    if asked.memory:
        reporter.note("measuring memory in processes of their own")
        try:
            found = _with_memory(found, model, reference, target, trust_remote_code)
            del missing["peak memory"]
        except (CompressError, InputError) as error:
            unmeasured("peak memory", error)
    if asked.speed or asked.continuations:
        names = (model, reference if asked.beside is None or asked.continuations else None)
        loaded = [None if name is None else _loaded(name, target, trust_remote_code) for name in names]
        ours, theirs = loaded[0], loaded[1]
        assert ours is not None
        with evaluating(ours), evaluating(ours if theirs is None else theirs):
            if asked.speed:
                reporter.note("measuring speed")
                try:
                    how: dict[str, Any] = {"checkpoint": model, "trust_remote_code": trust_remote_code}
                    beside = None if asked.beside is not None else theirs
                    speed = measure_speed(ours, beside, beside=asked.beside, **how)
                    found = replace(found, speed=speed)
                    del missing["speed"]
                except (CompressError, InputError) as error:
                    unmeasured("speed", error)
            if asked.continuations:
                reporter.note("continuing prompts")
                try:
                    prompts = asked.prompts or _beginnings(model, text, trust_remote_code)
                    tokenizer = load_tokenizer(find_source(model, trust_remote_code))
                    found = replace(found, generations=generate(ours, theirs, tokenizer, prompts))
                    del missing["continuations"]
                except (CompressError, InputError) as error:
                    unmeasured("continuations", error)
    return replace(found, missing={**found.missing, **missing})


def speed_alone(model: str, device: str | torch.device | None = None, trust_remote_code: bool = False) -> SpeedResult:
    """The speed of a checkpoint by itself, to compare with that of others (`Asked.beside`). Raises InputError for a
    model that generates nothing."""
    loaded = _loaded(model, find_device(device), trust_remote_code)
    with evaluating(loaded):
        return measure_speed(loaded, checkpoint=model, trust_remote_code=trust_remote_code)


def _loaded(name: str, device: torch.device, trusted: bool) -> nn.Module:
    return load(name, torch.float32 if device.type == "cpu" else None, device, trust_remote_code=trusted)


def _beginnings(model: str, text: str | Tensor, trusted: bool) -> list[str]:
    source = find_source(model, trusted)
    tokenizer: Any = load_tokenizer(source)
    tokens = load_tokens(text, tokenizer, read_config(source), what="held-out")
    return beginnings(tokenizer, tokens.ids)


def _with_memory(
    found: Evaluation, model: str, reference: str | None, device: torch.device, trusted: bool
) -> Evaluation:
    def sized(size: SizeResult | None, name: str) -> SizeResult | None:
        loading, running = peak_bytes(name, device, trusted)
        return None if size is None else replace(size, peak_load_bytes=loading, peak_run_bytes=running)

    own = sized(found.size, model)
    other = found.reference_size if reference is None else sized(found.reference_size, reference)
    return replace(found, size=own, reference_size=other)
