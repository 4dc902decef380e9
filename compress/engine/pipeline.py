"""THE loop. For every block: open it, let each pass see its statistics and decide, install, write, go on.

    survey -> original calls -> tables -> for stack: capture -> for block: run_block -> remarks

What a pass has to know about all layers beforehand, it finds out in a walk over the original model
(`engine.walk.survey`). The token embedding, if a pass is about it, is rounded before the capture. State is what flows
from block to block (`Streams`) and the layers decided so far. All of it can be recomputed from what is on disk, which
is how a run resumes.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from compress.base.errors import CompressError
from compress.base.progress import tell_tokens
from compress.checkpoint.write.writer import InMemory
from compress.engine.learn.training import teachers_of, trained
from compress.engine.plan.batches import ChainBrokenError, tokens_of
from compress.engine.plan.existing_zeros import told
from compress.engine.restore import hooks_and_buffers
from compress.engine.walk.block import run_block
from compress.engine.walk.capture import Passed, capture_stack
from compress.engine.walk.remarks import few_tokens, held_back, permuted
from compress.engine.walk.state import Run, Streams
from compress.engine.walk.survey import survey
from compress.engine.walk.token_tables import round_tables
from compress.model.calls import Call, without_cache
from compress.model.layers import Stack
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Learn


def run(this: Run) -> None:
    """Carry out a plan: a walk, or one before each training and one after the last."""
    started = time.monotonic()
    this.steps.begin()
    with without_cache(this.model):
        left, teachers = this, teachers_of(this)
        while (at := next((i for i, p in enumerate(left.plan.passes) if p.stage(Learn)), None)) is not None:
            left = trained(left, at, decide(left, left.plan.passes[:at]), teachers)
        _walk(left)
    layers = this.record.layers
    for remark in (told(layers), few_tokens(layers), held_back(layers), permuted(layers)):
        if remark is not None:
            this.record.note(this.reporter, remark)
    this.record.seconds = time.monotonic() - started


def decide(this: Run, passes: tuple[Pass, ...]) -> InMemory:
    """The decisions of passes that train nothing, kept in memory. The model then has the decided values, and hooks that
    round nothing."""
    sink, record = InMemory(keep=True), this.record.apart()
    phase = this.phase or "before training, "
    plan = replace(this.plan, passes=passes)
    part = replace(this, plan=plan, sink=sink, places=sink.places, record=record, phase=phase)
    undo = hooks_and_buffers(this.model)  # quantizers round inputs and outputs instead
    with without_cache(this.model):
        if passes or plan.trained or plan.kv is not None:
            _walk(part)
        else:
            round_tables(part)
    undo()
    this.record.block_forwards = record.block_forwards
    return sink


def _walk(this: Run) -> None:
    """Through all blocks with passes that train nothing. Raises CompressError for blocks that turn out to be no chain
    after all (`engine.walk.stacks`)."""
    try:
        this = replace(this, plan=survey(this))
        if this.plan.decides:
            this.record.left_alone.update(this.plan.left_alone(this.model))
        embedded = this.plan.compares and this.plan.tables  # otherwise the original's calls are ours
        originals = [capture_stack(this, stack)[0] if embedded else None for stack in this.plan.stacks]
        round_tables(this)
        passed: list[Passed] = []
        others: list[Passed] = []
        for stack, original in zip(this.plan.stacks, originals, strict=True):
            streams = _run_stack(this, stack, original, passed, others)
            passed.append(Passed(stack, streams.outputs))
            others.append(Passed(stack, streams.others))
    except ChainBrokenError as why:
        raise CompressError(
            f"the blocks are not a simple chain ({why}), which shows only now; run the model as a whole: --one-block"
        ) from None


def _run_stack(
    run: Run, stack: Stack, original: list[Call] | None, passed: Sequence[Passed], others: Sequence[Passed]
) -> Streams:
    """Compress the blocks of a stack, one after the other; returns what comes out of the last. passed, others: the
    stacks before, in the compressed and in the original model."""
    calls: list[list[Call]] = [[] for _ in stack.blocks]
    if run.plan.calibrated:
        calls = capture_stack(run, stack, passed)
    originals = capture_stack(run, stack, others) if passed and run.plan.compares else list(calls)
    tell_tokens(run.reporter, tokens_of(run.batches) * run.comm.world if run.plan.calibrated else 0)
    run.steps.begin()
    streams = Streams(calls[0], (original or originals[0]) if run.plan.compares else [])
    for name, block in stack.blocks:
        # The calls of blocks that are done take no memory.
        streams = streams.called_as(calls.pop(0), originals.pop(0))
        streams = run_block(run, name, block, streams)
    tell_tokens(run.reporter, 0)
    return streams
