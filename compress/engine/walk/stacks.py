"""Models of several stacks, like an encoder and a decoder: the order in which they run, and what passes between them.

One micro-batch runs through the original model, with one block open at a time. Then every stack but the first is
captured with those before it standing in (`engine.walk.capture`): its blocks must be called as the model called them. A
model that reads a stack in another way than from its end (features of several depths) is so found out, and is run as
one block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compress.base.errors import InputError
from compress.engine.plan.batches import ChainBrokenError, named_failure
from compress.engine.plan.plan import Plan
from compress.engine.restore import buffers
from compress.engine.walk.capture import Passed, Recorder, capture_stack, check_hidden_alone, moved_to, swapped_all
from compress.engine.walk.state import Run
from compress.model.calls import Call, evaluating, without_cache
from compress.model.layers import Stack

# Of the largest value: what a device that adds in no fixed order may change.
ROUNDING = 1e-3


@dataclass
class _Called:
    """The arguments of each block of a stack in the order of calls, and what the last one returned."""

    blocks: list[int]
    tensors: list[list[Tensor]]
    output: Any = None


def chain(run: Run, alone: bool, one_block: Callable[[], Plan], remark: Callable[[str], object]) -> Run:
    """The run with its stacks as the model runs them. Where blocks are no chain, it has the plan that `one_block`
    returns, and `remark` is called with the reason. alone: of `chained_stacks`."""
    if run.plan.stacks[0].container is None:
        return run
    try:
        return replace(run, plan=replace(run.plan, stacks=chained_stacks(run, alone)))
    except ChainBrokenError as why:
        remark(f"the blocks are not a simple chain ({why}); the model is treated as one block")
    return replace(run, plan=one_block())


def chained_stacks(run: Run, alone: bool = False) -> tuple[Stack, ...]:
    """The stacks of a run in the order in which the model runs them. Raises ChainBrokenError, on every rank and with
    nothing changed, where their blocks cannot run one after the other, each on what the one before hands on, or where a
    stack is called with something else than the ends of those before it make.

    alone: blocks have to hand on the hidden state and nothing else. Looks at one micro-batch of each kind.
    """
    kinds = {frozenset(batch): batch for batch in reversed(run.batches)}
    trial = replace(run, batches=[*kinds.values()][::-1])
    stacks, problem, undo = run.plan.stacks, None, buffers(run.model)  # some forwards count in them
    try:
        with evaluating(run.model), without_cache(run.model):
            if len(stacks) > 1:
                stacks = _in_order(replace(run, batches=run.batches[:1]))
            else:
                calls = capture_stack(trial, stacks[0])
                if alone:
                    check_hidden_alone(calls)
    except ChainBrokenError as error:
        problem = str(error)
    finally:
        undo()
    found = run.comm.gather_objects((problem, [stack.name for stack in stacks]))
    broken = next((why for why, _ in found if why is not None), None)
    if broken is None and any(names != found[0][1] for _, names in found):
        broken = "ranks run the stacks in another order"
    if broken is not None:
        raise ChainBrokenError(broken)
    return stacks


def _in_order(run: Run) -> tuple[Stack, ...]:
    """Several stacks in the order in which the model runs them, by its first micro-batch."""
    called = _note_calls(run)
    stacks = _sort(run.plan.stacks, called)
    passed: list[Passed] = []
    for stack in stacks:
        if passed:
            try:
                calls = capture_stack(run, stack, passed)
            except InputError as error:  # the model has run on this batch as a whole
                raise ChainBrokenError(f"{stack.name} does not run without the stacks before it: {error}") from error
            _check_same(stack, called[stack.name], calls)
        passed.append(Passed(stack, [called[stack.name].output]))
    return stacks


def _note_calls(run: Run) -> dict[str, _Called]:
    """The calls of all blocks for the first micro-batch, by the name of their stack, in the order of the stacks' first
    calls. A block is open only while it runs."""
    calls: dict[str, _Called] = {}

    def note(stack: Stack, i: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        noted = calls.setdefault(stack.name, _Called([], []))
        noted.blocks.append(i)
        noted.tensors.append(_tensors(args, kwargs))
        if list(calls)[-1] != stack.name:
            raise ChainBrokenError("stacks of blocks run in turns")
        with run.residency.open(stack.blocks[i][1], keep=False) as opened:
            noted.output = opened.block(*args, **kwargs)
        return noted.output

    batch = moved_to(run.batches[0], run.residency.device)
    stand_ins = {
        stack: [Recorder(block, partial(note, stack, i)) for i, (_, block) in enumerate(stack.blocks)]
        for stack in run.plan.stacks
    }
    outside = run.residency.open(run.model, run.plan.blocks, keep=False)
    with torch.no_grad(), outside, swapped_all(stand_ins), named_failure(batch, 0):
        run.model(**batch)
    return calls


def _sort(stacks: Sequence[Stack], called: Mapping[str, _Called]) -> tuple[Stack, ...]:
    """The stacks in the order of their calls. Raises ChainBrokenError for one that is not called block by block."""
    for stack in stacks:
        if stack.name not in called:
            raise ChainBrokenError(f"the blocks of {stack.name} are not called")
        if called[stack.name].blocks != list(range(len(stack.blocks))):
            raise ChainBrokenError(f"the blocks of {stack.name} are not called in their order, once each")
    order = [*called]
    return tuple(sorted(stacks, key=lambda stack: order.index(stack.name)))


def _check_same(stack: Stack, called: _Called, captured: Sequence[Sequence[Call]]) -> None:
    """Raises ChainBrokenError where a capture has other arguments than the model has given: of the first block all, of
    the others all but what blocks hand on."""
    for i, (expected, (call,)) in enumerate(zip(called.tensors, captured, strict=True)):
        found = _tensors(call.args, call.kwargs)
        handed = {id(call.hidden)} | {id(call.args[k] if isinstance(k, int) else call.kwargs[k]) for k in call.links}
        if len(found) != len(expected):
            raise ChainBrokenError(f"{stack.name} is called in another way when the stacks before it are behind")
        for one, other in zip(expected, found, strict=True):
            if (i == 0 or id(other) not in handed) and not _alike(one, other):
                raise ChainBrokenError(f"{stack.name} reads more than what the last block of a stack before it returns")


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() or not one.numel():
        return False
    largest = one[one.isfinite()].abs().max() if bool(one.isfinite().any()) else one.new_zeros(())
    return torch.allclose(one, other, rtol=0, atol=ROUNDING * float(largest), equal_nan=True)
