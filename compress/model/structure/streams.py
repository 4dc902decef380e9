"""Finds the hidden states that run through a whole model, what adds to them and what reads them: where rotations fit.

    x Q    writers  embeddings, and layers whose outputs are added up
           readers  norms, whose gains go into the layers behind them; layers that read it directly

Found by trial, without names. A hollow forward records gradients: outputs and inputs that one graph connects are of one
*part* of the model, since layers and norms cut it. Of each part that several norms read, trials ask:

1. all writers rotated, is every reader's input rotated, and nothing else changed?
2. all norms' outputs rotated, are the inputs of the layers behind them rotated, and nothing else changed?
3. all norms' outputs scaled channel by channel, are these inputs scaled likewise, and nothing else changed?
4. does each norm without its gain commute with the rotation?

A norm that subtracts the mean over channels commutes with rotations that leave the vector of ones as it is. All is
asked for any rotation first, then for those (`keeps_ones`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.errors import first_line
from compress.model.calls import Batch
from compress.model.edits.changes import DATA, change, for_now
from compress.model.layers import Layer
from compress.model.structure.hollow_model import HollowModel
from compress.model.structure.producers import ROUNDING, distance
from compress.weights.rotations.orthogonal import hadamard_rotation

Node = tuple[str, str]  # (a module, "writes" or "reads")
RETURNED: Node = ("", "returned")
NO_STREAM = "no hidden state is read by several norms (one that is written by norms has a gain for each channel)"
FEWEST_NORMS = 2  # that read a hidden state; one alone is of heads, or of a projection
TRIED_TOKENS = 8  # of random numbers, on which a norm is tried


@dataclass(frozen=True)
class StreamNorm:
    """A norm that reads a hidden state. offset: what it adds to its weight before it multiplies; readers: the layers
    that read it; exact: whether they read its very output, not a multiple."""

    name: str
    offset: float
    readers: tuple[str, ...]
    exact: bool


@dataclass(frozen=True)
class Stream:
    """A hidden state. writers: embeddings and layers; readers: layers that read it directly; keeps_ones: whether a
    rotation has to leave the vector of ones as it is."""

    width: int
    writers: tuple[str, ...]
    norms: tuple[StreamNorm, ...]
    readers: tuple[str, ...]
    keeps_ones: bool


@dataclass(frozen=True)
class FoundStreams:
    """The hidden states that take a rotation, and the reasons why others take none."""

    found: tuple[Stream, ...] = ()
    rejected: tuple[str, ...] = ()


@dataclass
class StreamPart:
    """Outputs and inputs of modules that belong together. returned: whether the model returns them."""

    writers: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    returned: bool = False


def find_streams(model: nn.Module, batch: Batch) -> FoundStreams:
    """The hidden states of a model, which is left as it is."""
    try:
        with torch.no_grad():
            hollow = HollowModel(model, batch)
            parts = parts_of(hollow)
            results = [_stream(hollow, part, parts) for part in parts if len(_norms(hollow, part)) >= FEWEST_NORMS]
    except Exception as error:  # noqa: BLE001 - a rotation is an offer: a model that cannot be tried goes without
        return FoundStreams(
            rejected=(f"it does not run without its weights: {type(error).__name__}: {first_line(error)}",)
        )
    streams = tuple(each for each in results if isinstance(each, Stream))
    reasons = tuple(dict.fromkeys(each for each in results if isinstance(each, str)))
    return FoundStreams(streams, reasons if results else (NO_STREAM,))


def parts_of(hollow: HollowModel) -> list[StreamPart]:
    """The parts of a model, by the graph of one hollow forward."""
    writer_of: dict[Any, Node] = {}
    above: dict[Node, Node] = {}

    def leaf(name: str, output: Tensor) -> Tensor:
        copy = output.requires_grad_().clone()  # a leaf must not be changed in place
        writer_of[copy.grad_fn] = (name, "writes")
        return copy

    def top(node: Node) -> Node:
        while above.setdefault(node, node) != node:
            node = above[node]
        return node

    seen = hollow.forward(leaf, gradients=True)
    ends: list[tuple[Node, Tensor]] = [((name, "reads"), x) for (name, _), x in seen.inputs.items()]
    owner: dict[Any, Node] = {}
    for end, x in [*ends, *((RETURNED, y) for y in seen.outputs)]:
        todo = [x.grad_fn]
        while todo:
            step = todo.pop()
            if step is None:
                continue
            if step in owner:
                above[top(owner[step])] = top(end)
                continue
            owner[step] = end
            if step in writer_of:
                above[top(writer_of[step])] = top(end)
            else:
                todo += [each for each, _ in step.next_functions]
    parts: dict[Node, StreamPart] = {}
    for node in list(above):
        part = parts.setdefault(top(node), StreamPart())
        if node == RETURNED:
            part.returned = True
        else:
            (part.writers if node[1] == "writes" else part.readers).append(node[0])
    order = {name: i for i, name in enumerate((*hollow.tables, *hollow.producers))}
    for part in parts.values():
        part.writers.sort(key=order.__getitem__)
        part.readers.sort(key=order.__getitem__)
    return list(parts.values())


def _norms(hollow: HollowModel, part: StreamPart) -> list[str]:
    return [name for name in part.readers if not hollow.producers[name].is_linear]


def _stream(hollow: HollowModel, part: StreamPart, parts: Sequence[StreamPart]) -> Stream | str:
    """The hidden state that a part is, or the reason why it takes no rotation."""
    norms = _norms(hollow, part)
    behind = {name: next((p for p in parts if name in p.writers), StreamPart()) for name in norms}
    for reason in _refusals(hollow, part, behind):
        return reason
    width, problems = hollow.width(part.writers[0]), []
    for keeps_ones in (False, True):
        problem = next(_failures(hollow, part, behind, keeps_ones), None)
        if problem is None:
            direct = tuple(name for name in part.readers if name not in norms)
            return Stream(width, tuple(part.writers), _stream_norms(hollow, behind), direct, keeps_ones)
        problems.append(problem)
    return problems[0]


def _refusals(hollow: HollowModel, part: StreamPart, behind: Mapping[str, StreamPart]) -> Iterator[str]:
    """The reasons why a part is no hidden state that could be rotated, by its connections alone."""
    if not part.writers:
        yield f"what {part.readers[0]} reads is no layer's or embedding's"
        return
    width = hollow.width(part.writers[0])
    for name in part.writers:
        if name in hollow.producers and not hollow.producers[name].is_linear:
            yield f"{name} is a norm that adds to it, with a gain for each channel"
        if hollow.width(name) != width:
            yield f"{name} adds {hollow.width(name)} channels to it, {part.writers[0]} {width}"
        if name in hollow.odd_tables:
            yield f"{name} returns something else than multiples of its rows"
    if part.returned:
        yield "the model returns it"
    for name, after in behind.items():
        if hollow.width(name) != width:
            yield f"{name} is a norm over {hollow.width(name)} of its {width} channels"
        if after.returned:
            yield f"the model returns what {name} makes of it"
        for other in (each for each in after.writers if each != name):
            yield f"what {name} makes of it meets what {other} writes"
        for reader in _norms(hollow, after):
            yield f"{reader} is a norm of what {name} makes of it"
    for name, producer in hollow.producers.items():
        called = name in hollow.base.reached
        if producer.is_linear and not called and width in Layer(name, producer.module).shape:
            yield f"{name} was not called in the trial, and may read it or add to it"


def _failures(
    hollow: HollowModel, part: StreamPart, behind: Mapping[str, StreamPart], keeps_ones: bool
) -> Iterator[str]:
    """The trials that fail, in words."""
    width = hollow.width(part.writers[0])
    rotation = hadamard_rotation(width, torch.Generator().manual_seed(0), ones=keeps_ones)
    gain_C = torch.rand(width, generator=torch.Generator().manual_seed(1)) + 0.5
    readers = {reader for after in behind.values() for reader in after.readers}
    trials: list[tuple[Collection[str], Callable[[Tensor], Tensor], Collection[str], str]] = [
        (part.writers, rotation.apply, part.readers, "rotated"),
        (behind, rotation.apply, readers, "rotated"),
        (behind, lambda x: x * gain_C.to(x), readers, "scaled"),
    ]
    for writers, altered, changed, how in trials:
        if problem := _problem(hollow, set(writers), altered, set(changed), how):
            yield problem
    for name in behind:
        if not _commutes(hollow, name, rotation.apply):
            yield f"{name} does not commute with rotations"


def _problem(
    hollow: HollowModel, writers: set[str], change: Callable[[Tensor], Tensor], readers: set[str], how: str
) -> str | None:
    """The reason why a change of the outputs of writers is not the same change of the inputs of readers, and nothing
    else."""
    seen, base = hollow.forward(lambda name, y: change(y) if name in writers else y), hollow.base
    if seen.inputs.keys() != base.inputs.keys():
        return f"{how}, it decides which layers are called"
    for (name, index), before in base.inputs.items():
        expected = change(before) if name in readers else before
        if distance([seen.inputs[name, index]], [expected]) > ROUNDING:
            return f"{how}, it does not reach {name} {how}" if name in readers else f"{how}, it changes {name}"
    return f"{how}, it changes what the model returns" if distance(seen.outputs, base.outputs) > ROUNDING else None


def _commutes(hollow: HollowModel, name: str, rotate: Callable[[Tensor], Tensor]) -> bool:
    """True for a norm that, without gain and bias, returns rotated what it would return of an input not rotated."""
    producer = hollow.producers[name]
    weight, bias = producer.module.weight, getattr(producer.module, "bias", None)
    assert isinstance(weight, nn.Parameter)
    neutral = torch.full_like(weight.data, 0.0 if producer.kind == "norm_plus_one" else 1.0)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TRIED_TOKENS, producer.channels, generator=generator).to(weight.device)
    with for_now() as done:
        done.append(change(weight, DATA, neutral))
        if bias is not None:
            done.append(change(bias, DATA, torch.zeros_like(bias.data)))
        return distance([producer.module(rotate(x))], [rotate(producer.module(x))]) <= ROUNDING


def _stream_norms(hollow: HollowModel, behind: Mapping[str, StreamPart]) -> tuple[StreamNorm, ...]:
    """The norms of a hidden state, with what is known of those that read them."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in behind}

    def noted(name: str, y: Tensor) -> Tensor:
        if name in outputs:
            outputs[name].append(y.clone())
        return y

    seen = hollow.forward(noted)
    result = []
    for name, after in behind.items():
        inputs = [x for (reader, _), x in seen.inputs.items() if reader in after.readers]
        exact = all(any(torch.equal(x, y) for y in outputs[name]) for x in inputs)
        offset = 1.0 if hollow.producers[name].kind == "norm_plus_one" else 0.0
        result.append(StreamNorm(name, offset, tuple(after.readers), exact))
    return tuple(result)
