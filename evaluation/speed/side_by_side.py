"""Speed of a model beside its reference, measured in turns: one sequence, with a key-value cache.

A round is a prompt of random tokens and greedy steps after it (`compress.evaluation.speed.generation`), of the model
and then of the reference, so that other load on the machine affects both. A figure is the median of the rounds; its
error is half the distance between the quartiles, a spread, not a standard error of the median. Time to the first token
is that of the prompt, with the choice of the token.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from compress.base.errors import InputError
from compress.evaluation.cost.routes import kernel_rows
from compress.evaluation.document import Figure, SpeedResult, Timing
from compress.evaluation.speed.generation import GenerationTimer
from compress.inference.layers.compressed_layers import compressed_layers
from compress.kernels.cpu.processor import cpu_name

PROMPT, NEW, ROUNDS = 128, 32, 7
LEAST_ROUNDS = 3


def measure_speed(
    model: Any,
    reference: Any = None,
    *,
    beside: SpeedResult | None = None,
    checkpoint: str | None = None,
    prompt: int = PROMPT,
    new: int = NEW,
    rounds: int = ROUNDS,
    trust_remote_code: bool = False,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> SpeedResult:
    """Time a decoder that `compress.load` made, on the device where it is, and the reference in turns with it.

    beside: instead of a reference, its speed measured alone before; ignored where device, dtype, number of threads or
    tokens differ. prompt, new: tokens of the prompt, and decoded after it; fewer where the context is shorter. rounds:
    3 or more. checkpoint: the model's, whose layers' kernels are then listed. Raises InputError for models that
    generate nothing.
    """
    if rounds < LEAST_ROUNDS:
        raise InputError(f"rounds {rounds}; allowed: {LEAST_ROUNDS} or more, a spread needs them")
    both = [each for each in (model, reference) if each is not None]
    for each in both:
        if not getattr(each, "can_generate", lambda: False)():
            raise InputError(f"{type(each).__name__} does not generate text; speed is of decoders")
    prompt, new = _room(both, prompt, new)
    ready = [GenerationTimer(each, 1, prompt, new) for each in both]
    times: list[list[tuple[float, float]]] = [[] for _ in ready]
    for generation in ready:
        generation.capture()
        generation.round()
    for i in range(rounds):
        for generation, found in zip(ready, times, strict=True):
            found.append(generation.round())
        step(i + 1, rounds)
    parameter = next(model.parameters())
    device: torch.device = parameter.device
    timings = [_timing(found, prompt, new) for found in times]
    kernels, fallbacks = _kernels(model, checkpoint, device, prompt, trust_remote_code)
    where, threads = surroundings(device)
    result = SpeedResult(
        device=where,
        threads=threads,
        dtype=str(parameter.dtype).removeprefix("torch."),
        model=timings[0],
        reference=timings[1] if reference is not None else None,
        kernels=kernels,
        fallbacks=fallbacks,
    )
    if beside is None or not alike(result, beside):
        return result
    return replace(result, reference=beside.model, in_turns=False)


def surroundings(device: torch.device) -> tuple[str, int]:
    """The conditions of speed beside the model: the processor's name, and the number of torch's threads."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(), torch.get_num_threads()


def alike(one: SpeedResult, other: SpeedResult) -> bool:
    """True where two were measured in the same way and place."""
    return _conditions(one) == _conditions(other)


def _conditions(found: SpeedResult) -> tuple[object, ...]:
    timing = found.model
    return found.device, found.threads, found.dtype, timing.prompt_tokens, timing.decoded_tokens


def _room(models: list[Any], prompt: int, new: int) -> tuple[int, int]:
    """Tokens of the prompt and after it that the contexts of all models hold."""
    contexts = [getattr(each.config.get_text_config(), "max_position_embeddings", None) for each in models]
    least = min((context for context in contexts if context), default=prompt + new)
    if least < prompt + new:
        new = max(1, min(new, least // 4))
        prompt = least - new
    if prompt < 1:
        raise InputError(f"the model holds {least} tokens; a prompt and a decoded token need two")
    return prompt, new


def middle(values: list[float]) -> Figure:
    """The median, with half the distance between the quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(median, (high - low) / 2)


def _timing(rounds: list[tuple[float, float]], prompt: int, new: int) -> Timing:
    prefill = [milliseconds for milliseconds, _ in rounds]
    return Timing(
        prompt_tokens=prompt,
        decoded_tokens=new,
        prefill=middle([1e3 * prompt / each for each in prefill]),
        decode=middle([1e3 / each for _, each in rounds]),
        first_token_ms=middle(prefill),
    )


def _kernels(
    model: Any, checkpoint: str | None, device: torch.device, prompt: int, trusted: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """({kernels with their numbers of tokens: layers}, {reason against a faster kernel: layers})."""
    if checkpoint is None or next(compressed_layers(model), None) is None:
        return {}, {}
    kernels: dict[str, int] = {}
    fallbacks: dict[str, int] = {}
    dtype = next(model.parameters()).dtype
    for row in kernel_rows(checkpoint, device, dtype, (1, prompt), trusted):
        decode, prefill = row.kernels[1], row.kernels[prompt]
        name = decode if decode == prefill else f"{decode} (decoding), {prefill} (prompt)"
        kernels[name] = kernels.get(name, 0) + 1
        for reason in row.why_not:
            fallbacks[reason] = fallbacks.get(reason, 0) + 1
    return kernels, fallbacks
