"""Gradients of the loss by each weight of the uncompressed model: forward and backward, one block in memory at a time.

    calls of all blocks -> for a part of the micro-batches:
        forward:  block by block, the inputs of each are kept
        the end:  what follows the last block, and the loss; its gradient by what the last block returned
        backward: from the last block to the first, each run once more, with a graph: the gradients of its weights are
                  scored and summed at once, that of its input goes to the block before

Every micro-batch has its own gradient, on the rank that has the micro-batch: nothing is averaged over ranks before it
is scored, so that many ranks sum what one process sums, in float64. Of the sums each rank keeps its rows, 8 bytes a
weight over the number of ranks. What is kept of the forwards takes no more than the weights, or one micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import RowShard
from compress.base.errors import CompressError
from compress.engine.plan.batches import named_failure
from compress.engine.plan.task_loss import check_finite, task_loss
from compress.engine.walk.capture import capture_stack, check_hidden_alone, returning
from compress.engine.walk.state import Run
from compress.model.calls import Batch, Call, hidden_of
from compress.model.layers import Layer, Stack
from compress.model.open_block import Opened
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Gradients, Settled

# A tensor to differentiate, and the gradient by it (None: of a number, 1).
Differentiated = tuple[Tensor, Tensor | None]
UNREACHED = "no gradient of the loss reached it"


@dataclass(frozen=True)
class MicroBatches:
    """Some of this rank's micro-batches: what they are, and what each block is called with."""

    batches: Sequence[Batch]
    calls: Sequence[Sequence[Call]]


class Sums:
    """The sums of a pass, by layer: this rank's rows, float64, on the CPU."""

    def __init__(self, stage: Gradients) -> None:
        self.stage = stage
        self.shards: dict[str, RowShard] = {}
        self.reached: set[str] = set()

    def add(self, run: Run, layer: Layer, sum_NK: Tensor, reached: bool) -> None:
        """Add what the micro-batches of a part have given, on all ranks. A collective."""
        count = run.comm.all_reduce(torch.tensor(int(reached), device=sum_NK.device), "max")
        mine = run.comm.all_reduce(sum_NK)[run.comm.rows_of(len(sum_NK))].cpu()
        before = self.shards.get(layer.name)
        self.shards[layer.name] = RowShard(mine if before is None else before.part + mine, len(sum_NK), run.comm)
        if int(count):
            self.reached.add(layer.name)

    def settled(self) -> Settled:
        """The pass's settlement of the sums; layers that no gradient reached are left alone."""
        found = self.stage.settle({name: shard for name, shard in self.shards.items() if name in self.reached})
        alone = {name: UNREACHED for name in self.shards if name not in self.reached}
        return replace(found, alone={**found.alone, **alone})


def with_gradients(run: Run) -> dict[Pass, Settled]:
    """The passes that ask for gradients, with what they make of them."""
    sums = {p: Sums(stage) for p in run.plan.passes if (stage := p.stage(Gradients)) is not None}
    if not sums:
        return {}
    (stack,) = run.plan.stacks  # what is calibrated and has several is one block
    calls = capture_stack(run, stack)
    check_hidden_alone(calls)
    for part in in_memory(run, stack, MicroBatches(run.batches, calls)):
        _pass_through(run, stack, part, sums)
    return {p: each.settled() for p, each in sums.items()}


def in_memory(run: Run, stack: Stack, whole: MicroBatches) -> Iterator[MicroBatches]:
    """The micro-batches in parts whose hidden states take no more than the blocks' weights; as many on every rank."""
    weights = sum(p.numel() * p.element_size() for _, block in stack.blocks for p in block.parameters())
    first = whole.calls[0][0]
    each = 1 if first.key is None else first.hidden.nbytes * len(stack.blocks)
    length = max(1, weights // max(1, each))
    most = torch.tensor([-length, len(whole.calls[0])], device=run.residency.device)
    length, longest = (abs(int(n)) for n in run.comm.all_reduce(most, "max"))
    for start in range(0, longest, length):
        some = slice(start, start + length)
        yield MicroBatches(whole.batches[some], [of_block[some] for of_block in whole.calls])


def _pass_through(run: Run, stack: Stack, part: MicroBatches, sums: Mapping[Pass, Sums]) -> None:
    """Forward and backward for a part of the micro-batches."""
    if stack.container is None:
        ((name, block),) = stack.blocks
        with run.residency.open(block, keep=False) as opened:
            _backward(run, opened, name, part.calls[0], [partial(task_loss, batch=b) for b in part.batches], sums)
        return
    kept, outputs = forwards(run, stack, part)
    gradients = of_the_end(run, stack, part.batches, outputs, _of_the_loss)
    for name, block in reversed(stack.blocks):
        with run.residency.open(block, keep=False) as opened:
            ends = [partial(_along, gradient=g) for g in gradients]
            gradients = _backward(run, opened, name, kept.pop(), ends, sums)


def forwards(run: Run, stack: Stack, part: MicroBatches) -> tuple[list[list[Call]], list[Any]]:
    """(the calls of every block on what goes into it, what the last block returned)."""
    block_calls: list[list[Call]] = []
    outputs: list[Any] = []
    for (_, block), calls in zip(stack.blocks, part.calls, strict=True):
        hidden = [hidden_of(output) for output in outputs] or [call.hidden for call in calls]
        block_calls.append([call.with_hidden(h) for call, h in zip(calls, hidden, strict=True)])
        with run.residency.open(block, keep=False), torch.no_grad():
            outputs = [block(*call.args, **call.kwargs) for call in block_calls[-1]]
        run.record.block_forwards += len(calls)
    return block_calls, outputs


def of_the_end(
    run: Run,
    stack: Stack,
    batches: Sequence[Batch],
    outputs: Sequence[Any],
    differentiated: Callable[[Any, Batch], Differentiated],
) -> list[Tensor]:
    """The gradient by what the last block returned, for each micro-batch, through what follows it. differentiated: of
    what the model returns."""
    gradients, problem = [], None
    with run.residency.open(run.model, {block for _, block in stack.blocks}, keep=False), torch.enable_grad():
        for i, (batch, output) in enumerate(zip(batches, outputs, strict=True)):
            leaf = hidden_of(output).detach().requires_grad_()
            returned = leaf if isinstance(output, Tensor) else (leaf, *output[1:])
            moved = {k: v.to(leaf.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            with returning(stack, returned), named_failure(batch, i):
                value, gradient = differentiated(run.model(**moved), moved)
                problem = problem or _problem(value)
                gradients.append(torch.autograd.grad(value, [leaf], gradient)[0])
    run.comm.fail_together(problem)
    return gradients


def _of_the_loss(output: Any, batch: Batch) -> Differentiated:
    return task_loss(output, batch), None


def _along(output: Any, gradient: Tensor) -> Tensor:
    """A number whose gradient, by what went in, is the loss's."""
    return (hidden_of(output) * gradient).sum()


def _backward(
    run: Run,
    opened: Opened,
    name: str,
    calls: Sequence[Call],
    ends: Sequence[Callable[[Any], Tensor]],
    sums: Mapping[Pass, Sums],
) -> list[Tensor]:
    """Run a block with a graph, score the gradients of its weights, and return those of what went in. ends: what is
    differentiated, of what the block returns for each micro-batch."""
    layers = [layer for layer in run.plan.layers[name] if any(p.wants(layer.name) for p in sums)]
    totals = {p: {la.name: torch.zeros_like(la.weight, dtype=torch.float64) for la in layers} for p in sums}
    reached: set[str] = set()
    of_inputs: list[Tensor] = []
    problem = None
    with _differentiable([layer.parameter for layer in layers]), torch.enable_grad():
        for call, end in zip(calls, ends, strict=True):
            leaf = None if call.key is None else call.hidden.detach().requires_grad_()
            # A copy goes in, which a block may change in place.
            call = call if leaf is None else call.with_hidden(leaf.clone())
            loss = end(opened.block(*call.args, **call.kwargs))
            problem = problem or _problem(loss)
            wanted: list[Tensor] = [layer.parameter for layer in layers]
            wanted += [] if leaf is None else [leaf]
            gradients = list(torch.autograd.grad(loss, wanted, allow_unused=True))
            if leaf is not None:
                before = gradients.pop()
                of_inputs.append(torch.zeros_like(leaf) if before is None else before)
            for layer, gradient in zip(layers, gradients, strict=True):
                if gradient is not None and (layer.index is None or bool(layer.part(gradient).any())):
                    reached.add(layer.name)
                    for p, each in sums.items():
                        totals[p][layer.name] += each.stage.score(layer.weight, layer.matrix(gradient))
    run.comm.fail_together(problem)
    run.record.block_forwards += len(calls)
    for p, each in sums.items():
        for layer in layers:
            if p.wants(layer.name):
                each.add(run, layer, totals[p][layer.name], layer.name in reached)
    return of_inputs


def _problem(loss: Tensor) -> str | None:
    try:
        check_finite(loss)
    except CompressError as error:
        return str(error)
    return None


@contextmanager
def _differentiable(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Makes parameters require gradients inside the context, frozen ones included; restores them after it."""
    before = [p.requires_grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, was in zip(parameters, before, strict=True):
            parameter.requires_grad_(was)
