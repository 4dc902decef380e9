"""Capture of the arguments of every block of a model, at the cost of the embedding.

The blocks are swapped for recorders that note their arguments and hand the hidden state on; the model runs once per
micro-batch. Each block keeps its own arguments (masks and rotary tables differ between sliding and full attention). A
model that changes the hidden state between two blocks is detected: it is then run as one block. What blocks hand on
beside the hidden state (T5's position biases) is noted by its place (`Call.links`).

Stacks that the model runs before (the encoder of a decoder) return at once what they have returned (`Passed`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from compress.base.host_memory import OnHost, here
from compress.engine.plan.batches import ChainBrokenError, StopError, named_failure
from compress.engine.residency import Residency
from compress.engine.walk.state import Run
from compress.model.calls import Batch, Call, token_mask, without_data
from compress.model.layers import Stack


class Recorder(nn.Module):
    """Stands in for a block during capture. Attributes that the model reads come from the block itself."""

    def __init__(self, block: nn.Module, record: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.stands_for = block
        self.record = record

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("stands_for"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.record(args, kwargs)


@contextmanager
def swapped(container: nn.ModuleList, stand_ins: Sequence[nn.Module]) -> Iterator[None]:
    originals = list(container)
    for i, module in enumerate(stand_ins):
        container[i] = module
    try:
        yield
    finally:
        for i, module in enumerate(originals):
            container[i] = module


@contextmanager
def swapped_all(stand_ins: Mapping[Stack, Sequence[nn.Module]]) -> Iterator[None]:
    """Lets modules stand in for the blocks of several stacks in the body."""
    with ExitStack() as entered:
        for stack, modules in stand_ins.items():
            assert stack.container is not None
            entered.enter_context(swapped(stack.container, modules))
        yield


def _hidden_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str:
    if args and isinstance(args[0], Tensor):
        return 0
    for name in ("hidden_states", "x", *kwargs):
        if isinstance(kwargs.get(name), Tensor):
            return name
    raise ChainBrokenError("a block is called without a tensor")


def moved_to(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on a device."""
    # A tensor of torch.inference_mode cannot be used outside of it; a copy can.
    own = {k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for k, v in batch.items()}
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in own.items()}


@dataclass(frozen=True)
class Passed:
    """A stack that is behind, and what its last block has returned for each micro-batch."""

    stack: Stack
    outputs: Sequence[Any]


@contextmanager
def standing_in(passed: Sequence[Passed], i: int) -> Iterator[None]:
    """Lets stacks that are behind return at once, in the body, what they have returned for a micro-batch."""
    with ExitStack() as entered:
        for each in passed:
            entered.enter_context(returning(each.stack, here(each.outputs[i])))
        yield


def next_calls(calls: Sequence[Sequence[Call]], index: int, outputs: Iterable[Any]) -> list[Any]:
    """The calls of the block behind one, on what that returned; behind the last block its outputs."""
    if index + 1 == len(calls):
        return list(outputs)
    return [call.following(output) for call, output in zip(calls[index + 1], outputs, strict=True)]


def returning(stack: Stack, output: Any) -> AbstractContextManager[None]:
    """Lets the blocks of a stack return an output in the body, whatever they are given: what follows them runs."""
    assert stack.container is not None
    return swapped(stack.container, [Recorder(block, partial(instead, output)) for _, block in stack.blocks])


def instead(returned: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Stand-in for a block: `returned`, whatever the arguments."""
    return returned


def _stop(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    raise StopError


class _Capture:
    """Notes the arguments of every block while the model runs on recorders that only hand the hidden state on."""

    def __init__(self, count: int, output_of_first: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        self.calls: list[list[Call]] = [[] for _ in range(count)]
        self.output_of_first = output_of_first
        self.shape: Any = None
        self.tokens: Tensor | None = None
        self.hidden: Tensor | None = None
        self.extras: dict[int, Tensor] = {}

    def record(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for block i: keep its call, check the chain, return the hidden state as the block would."""
        call = Call(args, kwargs, _hidden_key(args, kwargs), self.tokens)
        if i > 0:
            if call.hidden is not self.hidden:
                raise ChainBrokenError("the hidden state changes between two blocks")
            call = replace(call, links=self.links(args, kwargs))
        self.calls[i].append(call)
        if i == len(self.calls) - 1:
            raise StopError
        if self.shape is None:
            self.shape = self.output_of_first(args, kwargs)
            if not _has_hidden_first(self.shape):
                raise ChainBrokenError(f"a block returns a {type(self.shape).__name__}")
            if _tells_sizes(self.shape, call.hidden):
                raise ChainBrokenError("a block returns the sizes that it has changed")
        self.hidden = call.hidden
        return self.handed_on(call.hidden)

    def links(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, int]:
        """{place among these arguments: place in what the block before returns} of what it hands on beside the hidden
        state."""
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        found = {key: at for key, value in given.items() for at, extra in self.extras.items() if value is extra}
        inside = tree_leaves([value for key, value in given.items() if key not in found])
        if any(leaf is extra for leaf in inside for extra in self.extras.values()):
            raise ChainBrokenError("a block's second output feeds the next block inside another object")
        return found

    def handed_on(self, hidden: Tensor) -> Any:
        """The hidden state in the structure that a block returns; other tensors are empty and recognisable."""
        if isinstance(self.shape, Tensor):
            return hidden
        rest = [torch.empty(0, device=hidden.device) if isinstance(o, Tensor) else o for o in self.shape[1:]]
        self.extras = {at: r for at, r in enumerate(rest, 1) if isinstance(r, Tensor)}
        return (hidden, *rest)


def check_hidden_alone(calls: Sequence[Sequence[Call]]) -> None:
    """Raise ChainBrokenError where blocks hand on more than the hidden state, for what changes or differentiates
    that."""
    if any(call.links for of_block in calls for call in of_block):
        raise ChainBrokenError("a block's second output feeds the next block")


def _has_hidden_first(output: Any) -> bool:
    """True for a tensor, and for a plain tuple or list of one and others: what a model may read by place alone."""
    by_place = type(output) in (tuple, list) and len(output) > 0
    return isinstance(output[0] if by_place else output, Tensor)


def _tells_sizes(output: Any, hidden: Tensor) -> bool:
    """True for a block that changes the shape of the hidden state and returns more than tensors beside it, as the
    stages of Swin return height and width: the other blocks' are not known before they run."""
    if isinstance(output, Tensor) or output[0].shape == hidden.shape:
        return False
    return any(o is not None and not isinstance(o, Tensor) for o in output[1:])


def capture(
    model: nn.Module,
    stack: Stack,
    batches: Sequence[Batch],
    residency: Residency,
    passed: Sequence[Passed] = (),
    later: Sequence[Stack] = (),
    offloads: bool = False,
) -> list[list[Call]]:
    """calls[block][micro-batch] of a stack. Raises ChainBrokenError where the blocks cannot be run one by one.

    passed: the stacks that the model runs before; later: those that it runs after this one. offloads: whether calls
    wait on the host.
    """
    if stack.container is None:
        return [[Call((), b, None, token_mask(b)) for b in (moved_to(b, residency.device) for b in batches)]]
    blocks = [block for _, block in stack.blocks]
    if any(isinstance(block, nn.ModuleList | nn.ModuleDict) for block in blocks):  # PVT calls what is in them
        raise ChainBrokenError("a block is a list of modules")

    def output_of_first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with residency.open(blocks[0], keep=False) as opened:
            return output_shape(opened.block, args, kwargs)

    noted = _Capture(len(blocks), output_of_first)
    stand_ins = [Recorder(block, partial(noted.record, i)) for i, block in enumerate(blocks)]
    others = {block for other in (*(each.stack for each in passed), *later) for _, block in other.blocks}
    with torch.no_grad(), residency.open(model, {*blocks, *others}):
        with swapped(stack.container, stand_ins):
            for i, batch in enumerate(batches):
                moved = moved_to(batch, residency.device)
                noted.tokens = token_mask(moved)
                try:
                    with named_failure(batch, i), standing_in(passed, i):
                        model(**moved)
                except StopError:
                    pass
                else:
                    raise ChainBrokenError("the last block of the list is never called")
                if offloads:
                    known: dict[int, OnHost] = {}  # blocks share rotary tables
                    for of_block in noted.calls:
                        of_block[-1] = of_block[-1].aside(known)
        if noted.shape is None:  # a stack of one block
            call = noted.calls[0][0].here()
            noted.shape = output_of_first(call.args, call.kwargs)
        ends = {other: [Recorder(block, _stop) for _, block in other.blocks] for other in later}
        with standing_in(passed, 0), swapped_all(ends):
            _check_called_once(model, stack, noted, moved_to(batches[0], residency.device))
    return noted.calls


def capture_stack(run: Run, stack: Stack, passed: Sequence[Passed] = (), offloads: bool = False) -> list[list[Call]]:
    """`capture` of a stack of a run. passed: the stacks before it."""
    behind = {each.stack.name for each in passed}
    later = [other for other in run.plan.stacks if other is not stack and other.name not in behind]
    with run.spending.on("forward"):
        return capture(run.model, stack, run.batches, run.residency, passed, later, offloads)


def _check_called_once(model: nn.Module, stack: Stack, noted: _Capture, batch: Batch) -> None:
    """Raise ChainBrokenError for a model that runs through its blocks more than once (ALBERT shares one block).

    Recording stops at the last block; this goes on to the end, on tensors without data, at no cost.
    """
    assert stack.container is not None
    counts = [0] * len(stack.blocks)

    def count(i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts[i] += 1
        key = _hidden_key(args, kwargs)
        return noted.handed_on(args[key] if isinstance(key, int) else kwargs[key])

    stand_ins = [Recorder(block, partial(count, i)) for i, (_, block) in enumerate(stack.blocks)]
    with swapped(stack.container, stand_ins):
        try:
            with without_data(model) as mode:
                model(**tree_map(lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, dict(batch)))
        except Exception:  # noqa: BLE001 - a head that cannot be traced says nothing about the blocks before it
            pass
    if any(n > 1 for n in counts):
        raise ChainBrokenError("a block is called several times in one forward pass")


def output_shape(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The block's output on tensors without data; of a block that cannot be traced, its real output."""
    try:
        with without_data(block) as mode:
            fake = tree_map(lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, (args, dict(kwargs)))
            return block(*fake[0], **fake[1])
    except Exception:  # noqa: BLE001 - whatever tracing cannot do, running can
        with torch.no_grad():
            return block(*args, **kwargs)
