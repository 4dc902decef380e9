"""Hollow forwards: run a block with given outputs in the place of its layers' and norms', to observe their inputs.

In a hollow forward every linear layer and every norm returns fixed random numbers. It multiplies no matrix and cuts the
block into its elementary connections: the input of a layer depends only on the producers right before it, through
attention, gates, activation functions and residual sums. Scale one producer's channels by powers of two and compare: an
input that is scaled by 2^e in every token reads the producer's channel of exponent e; an input that does not change
does not read the producer; any other change rules a fold out.

Exactness: multiplying by a power of two commutes with rounding. So each product of a gate, and the whole sum over
tokens that attention forms of one channel, is scaled to the last bit, barring overflow and underflow. The given numbers
have magnitudes of 0.5 to 1.5, and factors go up to 2^96, in float32. No channel is dead, and each occurs with both
signs, so that functions that are linear on one side only (ELU) are detected.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from compress.model.calls import Call
from compress.model.structure.producers import Producer, distance

LARGEST_EXPONENT = 96  # 2^96 leaves a factor of 2^31 for other operations before float32 overflows
INTEGER_TOLERANCE = 1e-3  # far above float32's rounding in a backward pass, far below differences by chance

NOBODY: Mapping[str, Producer] = {}


@dataclass
class HollowOutputs:
    """Observations of a hollow forward. inputs: {(module, number of its call): input}; outputs: tensors that the block
    returned."""

    inputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def reached(self) -> set[str]:
        return {name for name, _ in self.inputs}


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Gives modules other forward functions for the body; their hooks and everything else stay."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


@contextmanager
def repeatable(block: nn.Module) -> Iterator[None]:
    """Seeds the random generators for the body, so that a block draws the same numbers each time, and restores them."""
    devices = {p.device for p in block.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        torch.manual_seed(0)
        yield


def given_output(seed: str, leading: torch.Size, channels: int) -> Tensor:
    """Random numbers [*leading, channels] of magnitude 0.5 to 1.5, always the same for a seed; positive in the first
    row, negative in the second, of either sign in the others."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    rows = leading.numel()
    magnitude = torch.rand(rows, channels, generator=generator) + 0.5
    sign = torch.randint(2, (rows, channels), generator=generator) * 2 - 1
    sign[:1], sign[1:2] = 1, -1
    return (magnitude * sign).reshape(*leading, channels)


def as_given(name: str, output: Tensor) -> Tensor:
    """The given output of a producer, unchanged."""
    return output


def hollow_forward(
    block: nn.Module,
    call: Call,
    producers: Mapping[str, Producer],
    given: Callable[[str, Tensor], Tensor] = as_given,
    gradients: bool = False,
    watched: Mapping[str, Producer] = NOBODY,
) -> HollowOutputs:
    """Run a hollow forward of the block. given: replaces a producer's given output [..., C]. gradients: record
    gradients with respect to the given outputs. watched: modules that compute as usual, whose inputs are observed,
    too."""
    seen = HollowOutputs()
    counts = dict.fromkeys((*producers, *watched), 0)

    def note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, int]:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        index, counts[name] = counts[name], counts[name] + 1
        if x.numel() > 0:  # a call of an expert without tokens is no observation
            seen.inputs[name, index] = x.clone()  # the block may change it in place later
        return x, index

    def stand_in(name: str, *args: Any, **kwargs: Any) -> Tensor:
        x, index = note(name, args, kwargs)
        producer = producers[name]
        output = given_output(f"{name}/{index}", producer.leading(x), producer.channels).to(x.device, x.dtype)
        return producer.arranged(given(name, output))

    def look(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        note(name, args, kwargs)
        return forward(*args, **kwargs)

    forwards = {p.module: partial(stand_in, name) for name, p in producers.items()}
    forwards |= {p.module: partial(look, name, p.module.forward) for name, p in watched.items()}
    with repeatable(block), replaced_forwards(forwards), torch.set_grad_enabled(gradients):
        seen.outputs = tensors_of(block(*call.args, **call.kwargs))
    return seen


def tensors_of(output: Any) -> list[Tensor]:
    """Copies of the tensors in the output of a block."""
    return [value.clone() for value in tree_flatten(output)[0] if isinstance(value, Tensor)]


def exponents(before: Tensor, after: Tensor) -> Tensor | None:
    """Exponents e [K] with after = before * 2^e exactly, in every token of each channel; None where there are none.

    Also None where a channel is zero in every token, since zero would fit any exponent.
    """
    before_MK, after_MK = before.reshape(-1, before.shape[-1]), after.reshape(-1, after.shape[-1])
    mantissa, exponent = torch.frexp(before_MK)
    other_mantissa, other_exponent = torch.frexp(after_MK)
    live = before_MK != 0
    if not torch.equal(mantissa, other_mantissa) or not bool(live.any(0).all()):
        return None
    change = (other_exponent - exponent).to(torch.int64)
    bound = torch.iinfo(torch.int64).max
    highest_K = change.where(live, -bound).amax(0)
    return highest_K if torch.equal(highest_K, change.where(live, bound).amin(0)) else None


def compare(
    base: HollowOutputs, seen: HollowOutputs, producers: dict[str, Producer]
) -> tuple[dict[str, Tensor], str | None]:
    """({linear layer: exponents [K]} of the inputs that a probe scaled, None), or ({}, the reason why the probe did
    more than scale inputs)."""
    if base.inputs.keys() != seen.inputs.keys():
        return {}, "decides which layers are called"
    changes: dict[str, Tensor] = {}
    untouched: set[str] = set()
    for (name, index), before in base.inputs.items():
        after = seen.inputs[name, index]
        if before.shape == after.shape and torch.equal(before, after):
            untouched.add(name)
            continue
        if not producers[name].is_linear:
            return {}, f"feeds the norm {name}"
        exponent_K = exponents(before, after) if before.shape == after.shape else None
        if exponent_K is None:
            return {}, f"enters {name} as more than a scale of single channels"
        if name in changes and not torch.equal(changes[name], exponent_K):
            return {}, f"enters {name} in different ways in its several calls"
        changes[name] = exponent_K
    for name in changes:
        if name in untouched:
            return {}, f"enters {name} in some of its calls and not in others"
    if distance(seen.outputs, base.outputs) != 0:
        return {}, "reaches the block's output without passing a linear layer"
    return changes, None


def changed_inputs(base: HollowOutputs, seen: HollowOutputs, producers: Mapping[str, Producer]) -> dict[str, Tensor]:
    """{layer: bool mask [K] of the inputs that changed in any token of any call}. It shows any dependence, while
    `compare` accepts scales only."""
    masks: dict[str, Tensor] = {}
    for (name, index), before in base.inputs.items():
        rows = producers[name].rows(before.detach())
        after = seen.inputs.get((name, index))
        different_K = torch.ones_like(rows[0], dtype=torch.bool)
        if after is not None and after.shape == before.shape:
            different_K = (rows != producers[name].rows(after)).any(0)
        masks[name] = masks[name] | different_K if name in masks else different_K
    return masks


def codes(channels: int) -> list[Tensor]:
    """Exponents [C] for each probe, with as few probes as tell the channels apart. 0 is left for untouched inputs."""
    count = 1
    while LARGEST_EXPONENT**count < channels:
        count += 1
    base = 2
    while base**count < channels:
        base += 1
    number_C = torch.arange(channels)
    return [number_C // base**i % base + 1 for i in range(count)]


def decode(found: list[Tensor], channels: int) -> Tensor | None:
    """Channel numbers [K] (-1: untouched) from the exponents of all probes; None for exponents of no number."""
    written = torch.stack(codes(channels))
    largest = written.amax(1)
    read = torch.stack(found).cpu()
    untouched = (read == 0).all(0)
    if bool(((read < 1) | (read > largest[:, None])).any(0).logical_and(~untouched).any()):
        return None
    base = int(written[0].max())
    number = sum((digits - 1) * base**i for i, digits in enumerate(read))
    assert isinstance(number, Tensor)
    if bool((number >= channels).logical_and(~untouched).any()):
        return None
    return torch.where(untouched, -1, number)


def scalable_channels(block: nn.Module, call: Call, producers: Mapping[str, Producer], name: str) -> Tensor | None:
    """Bool mask [C] of a producer's channels that seem to enter its readers as scales; None where none does.

    For a layer whose rows have several roles (a fused qkv or gate_up), of which only some are scales. By Euler's
    theorem an input x_j that is homogeneous of degree one in channel c has sum_t y_tc dx_j/dy_tc = x_j. Summed over all
    inputs and divided by x_j, this is the number of inputs that read the channel if they read it as a scale, and an
    arbitrary number otherwise. One backward pass per token computes it. The result is a guess that probing must
    confirm.
    """
    followed: list[Tensor] = []

    def leaf(producer: str, output: Tensor) -> Tensor:
        if producer != name:
            return output
        followed.append(output.requires_grad_())
        return output.clone()  # a leaf must not be changed in place

    seen = hollow_forward(block, call, producers, leaf, gradients=True)
    good_C = torch.ones(producers[name].channels, dtype=torch.bool)
    readers_C = torch.zeros(producers[name].channels)
    for (reader, _), x in seen.inputs.items():
        if not (producers[reader].is_linear and x.requires_grad):
            continue
        rows = x.reshape(-1, x.shape[-1])
        first = None
        # Not the first token: attention over one token does not depend on queries and keys.
        for row in {len(rows) - 1, len(rows) // 2, len(rows) // 3}:
            quotient = (rows[row] / rows[row].detach()).sum()
            slopes = torch.autograd.grad(quotient, followed, retain_graph=True, allow_unused=True)
            count_C = torch.zeros_like(readers_C)
            for given, slope in zip(followed, slopes, strict=True):
                if slope is not None:
                    count_C += (given * slope).detach().reshape(-1, len(count_C)).sum(0).cpu()
            whole_C = count_C.round()
            good_C &= ((count_C - whole_C).abs() < INTEGER_TOLERANCE) & (whole_C >= 0)
            if first is not None:
                good_C &= whole_C == first
            first = whole_C
        assert first is not None
        readers_C += first
    good_C &= readers_C > 0
    return good_C if bool(good_C.any()) else None
