"""THE loop. For every block: open it, let each pass see its statistics and decide, install, write, go on.

    survey -> original calls -> tables -> for stack: capture -> for block: run_block -> remarks

What a pass has to know about all layers beforehand, it finds out in a walk over the original model
(`engine.walk.survey`). The token embedding, if a pass is about it, is rounded before the capture. State is what flows
from block to block (`Streams`) and the layers decided so far. All of it can be recomputed from what is on disk, which
is how a run resumes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from compress.base.errors import CompressError
from compress.base.progress import tell_tokens
from compress.engine.learn.training import Collected, decided, trained
from compress.engine.plan.batches import ChainBrokenError, tokens_of
from compress.engine.plan.existing_zeros import told
from compress.engine.residency import Residency
from compress.engine.walk.block import run_block
from compress.engine.walk.capture import Passed, capture, output_shape
from compress.engine.walk.remarks import few_tokens, held_back, permuted
from compress.engine.walk.stacks import in_order
from compress.engine.walk.state import Run, Streams
from compress.engine.walk.survey import surveyed
from compress.engine.walk.token_tables import round_tables
from compress.model.calls import Call, without_cache
from compress.model.layers import Stack

T = TypeVar("T")


def run(this: Run) -> None:
    """Carry out a plan. Raises ChainBrokenError, before anything is changed, for a model that must run as one block."""
    started = time.monotonic()
    this.steps.begin()
    with without_cache(this.model):
        left = trained(this, _walk)
        try:
            _walk(left)
        except ChainBrokenError as why:
            if left is this:
                raise
            raise CompressError(
                f"the blocks are not a simple chain ({why}), which shows only now that the model is trained; run it as "
                "a whole: --one-block"
            ) from None
    _remark(this)
    this.record.seconds = time.monotonic() - started


def decide(this: Run) -> Collected:
    """The decisions of a plan's passes about layers, for a caller's own training. Raises ChainBrokenError as `run`
    does."""
    this.steps.begin()
    with without_cache(this.model):
        return decided(this, _walk, this.plan.passes)


def walked(this: Run, how: Callable[[Run], T], joined: Callable[[ChainBrokenError], Run]) -> T:
    """The result of a walk. Where blocks turn out to hand no hidden state on, the walk is repeated through the run from
    `joined`, of the model as one block."""
    try:
        return how(this)
    except ChainBrokenError as why:  # with nothing changed
        if this.plan.stacks[0].container is None:
            raise
        broken = why
    return how(joined(broken))


def _walk(this: Run) -> None:
    """Through all blocks with passes that train nothing."""
    if this.plan.calibrated and len(this.plan.stacks) > 1:
        with this.spending.on("forward"):
            stacks = in_order(this, captured)
        this = replace(this, plan=replace(this.plan, stacks=stacks))
    this = replace(this, plan=surveyed(this, partial(captured, this)))
    _name_left_alone(this)
    embedded = this.compares and this.plan.tables  # otherwise the original's calls are ours
    originals = [captured(this, stack)[0] if embedded else None for stack in this.plan.stacks]
    round_tables(this)
    passed: list[Passed] = []
    others: list[Passed] = []
    for stack, original in zip(this.plan.stacks, originals, strict=True):
        streams = _run_stack(this, stack, original, passed, others)
        passed.append(Passed(stack, streams.outputs))
        others.append(Passed(stack, streams.others))


def _name_left_alone(run: Run) -> None:
    """Enter into the record what the plan leaves alone, and why."""
    if not run.plan.decides:
        return
    run.record.left_alone.update(run.plan.left_alone(run.model))


def _run_stack(
    run: Run, stack: Stack, original: list[Call] | None, passed: Sequence[Passed], others: Sequence[Passed]
) -> Streams:
    """Compress the blocks of a stack, one after the other; returns what comes out of the last. passed, others: the
    stacks before, in the compressed and in the original model."""
    calls: list[list[Call]] = [[] for _ in stack.blocks]
    if run.plan.calibrated:
        calls = captured(run, stack, passed)
    originals = captured(run, stack, others) if passed and run.compares else list(calls)
    tell_tokens(run.reporter, tokens_of(run.batches) * run.comm.world if run.plan.calibrated else 0)
    run.steps.begin()
    streams = Streams(calls[0], (original or originals[0]) if run.compares else [])
    for name, block in stack.blocks:
        # The calls of blocks that are done take no memory.
        streams = streams.called_as(calls.pop(0), originals.pop(0))
        streams = run_block(run, name, block, streams)
    tell_tokens(run.reporter, 0)
    return streams


def captured(run: Run, stack: Stack, passed: Sequence[Passed] = ()) -> list[list[Call]]:
    """The calls of every block of a stack, one for each micro-batch. passed: the stacks before it."""
    behind = {each.stack.name for each in passed}
    later = [other for other in run.plan.stacks if other is not stack and other.name not in behind]
    first = partial(_first_output, run.residency, stack)
    with run.spending.on("forward"):
        return capture(run.model, stack, run.batches, run.residency, first, passed, later)


def _first_output(residency: Residency, stack: Stack, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with residency.open(stack.blocks[0][1]) as opened:
        return output_shape(opened.block, args, kwargs)


def _remark(run: Run) -> None:
    """Note what the layers' figures say about the calibration data, and about the order of their inputs."""
    layers = run.record.layers
    for remark in (told(layers), few_tokens(layers), held_back(layers), permuted(layers)):
        if remark is not None:
            run.record.note(run.reporter, remark)
