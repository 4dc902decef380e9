"""THE loop. For every block: open it, let each pass see its statistics and decide, install, write, go on.

    survey -> original calls -> tables -> for stack: capture -> for block: run_block -> remarks

What a pass has to know about all layers beforehand, it finds out in a walk over the original model
(`engine.walk.survey`). The token embedding, if a pass is about it, is rounded before the capture. State is what flows
from block to block (`Streams`) and the layers decided so far. All of it can be recomputed from what is on disk, which
is how a run resumes.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from compress.base.errors import CompressError
from compress.base.progress import tell
from compress.checkpoint.write.record import Finished
from compress.checkpoint.write.writer import InMemory
from compress.engine.layer_versions import Versions
from compress.engine.learn.training import teachers_of, train_model
from compress.engine.plan.batches import ChainBrokenError, tokens_of
from compress.engine.plan.existing_zeros import remark_on_zeros
from compress.engine.restore import hooks_and_buffers
from compress.engine.walk.block import run_block
from compress.engine.walk.capture import Passed, capture_stack
from compress.engine.walk.curvature import curvature_of
from compress.engine.walk.decide import decide as decide_site
from compress.engine.walk.remarks import (
    layer_record,
    remark_on_few_tokens,
    remark_on_less,
    remark_on_objective,
    remark_on_order,
)
from compress.engine.walk.state import Run, Streams, split_batches
from compress.engine.walk.survey import survey
from compress.model.calls import Call, without_cache
from compress.model.layers import Stack, Table
from compress.model.open_block import Opened
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Gradients, Learn, Survey
from compress.train.rounding.latents import places_of


def run(this: Run) -> None:
    """Carry out a plan: a walk, or one before each training and one after the last."""
    started = time.monotonic()
    tell(this.reporter, "phase", "")
    if this.lessons is not None:
        tell(this.reporter, "phase", "quantize", "unknown")
    this.steps.begin()
    with without_cache(this.model):
        _walk_within(this if this.lessons is None else _train(this))
    for about in (remark_on_zeros, remark_on_few_tokens, remark_on_less, remark_on_objective, remark_on_order):
        remark = about(this.record.layers)
        if remark is not None:
            this.record.note(this.reporter, remark)
    this.record.seconds = time.monotonic() - started


def _train(this: Run) -> Run:
    """The run that is left behind the last training."""
    left, teachers = this, teachers_of(this)
    while (at := next((i for i, p in enumerate(left.plan.passes) if p.stage(Learn)), None)) is not None:
        left = train_model(left, at, decide(left, left.plan.passes[:at]), teachers)
        tell(this.reporter, "phase", "write")
    return left


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
            _round_tables(part)
    undo()
    this.record.block_forwards = record.block_forwards
    return sink


def _walk_within(this: Run) -> None:
    """The walk, and once more in a leaner mode where a GPU's memory runs out before anything has changed."""
    try:
        _walk(this)
        return
    except torch.OutOfMemoryError:
        if not this.leaner_modes or this.record.changed:
            raise
    mode, *others = this.leaner_modes
    this.record.note(this.reporter, f"memory: {this.residency.device} has too little after all: {mode}")
    gc.collect()  # forwards that were waiting
    torch.cuda.empty_cache()
    _walk_within(replace(this, memory_mode=mode, leaner_modes=others))


def _walk(this: Run) -> None:
    """Through all blocks with passes that train nothing. Raises CompressError for blocks that turn out to be no chain
    after all (`engine.walk.stacks`)."""
    this = split_batches(this)
    try:
        if any(p.stage(Survey) or p.stage(Gradients) for p in this.plan.passes):
            this = replace(this, plan=survey(this))
        this = replace(this, curvature=curvature_of(this))
        if this.plan.decides:
            this.record.left_alone.update(this.plan.left_alone(this.model))
        embedded = this.plan.compares and this.plan.tables  # otherwise the original's calls are ours
        first = partial(capture_stack, this, offloads=this.memory_mode.offloads)
        originals = [first(stack)[0] if embedded else None for stack in this.plan.stacks]
        _round_tables(this)
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


def _round_tables(run: Run) -> None:
    """Round the tables of a plan: before the blocks run, so that they are calibrated on what they will be given."""
    plan, p = run.plan, run.plan.embeddings
    if p is None:
        return
    # The blocks' calibration reads it again, so the edits have to stay.
    keep = run.residency.keep or plan.calibrated
    with run.residency.open(run.model, plan.blocks - {run.model}, keep) as opened:
        for table in plan.tables:
            _round_table(run, p, table, opened.inside(table.module))
    run.record.changed += [table.name for table in plan.tables]


def _round_table(run: Run, p: Pass, table: Table, opened: Opened) -> None:
    """One table, by what an earlier run or training has decided about it, or else by what the pass does."""
    finished, decision_of = run.sink.finished(table.name), run.plan.trained.get(table.name)
    if finished is not None:
        Versions().install(table, finished.decided[table.name])
    else:
        decision = decision_of or decide_site(p, [table], opened, run.comm)[table.name]
        if decision.scheme(table=True).codes is None:
            raise CompressError(
                f"{p.name} decides something else than codes for {table.name}; a token embedding is looked up in codes"
            )
        if run.places is not None:
            places = places_of(decision, table.weight)
            run.places.update({} if places is None else {table.name: places.cpu()})
        Versions().install(table, decision)
        described = layer_record(table, decision, None if decision_of else p)
        if table.shared:
            described.figures["shared_with"] = ", ".join(table.shared)
        finished = Finished({table.name: decision}, [described], {})
        run.sink.write(table.name, opened, {table.name: table}, finished)
    run.record.take(finished)
    run.steps.finish(table.name, usual=False)  # tables take less time than blocks


def _run_stack(
    run: Run, stack: Stack, original: list[Call] | None, passed: Sequence[Passed], others: Sequence[Passed]
) -> Streams:
    """Compress the blocks of a stack, one after the other; returns what comes out of the last. passed, others: the
    stacks before, in the compressed and in the original model."""
    calls: list[list[Call]] = [[] for _ in stack.blocks]
    captured = partial(capture_stack, run, stack, offloads=run.memory_mode.offloads)
    if run.plan.calibrated:
        calls = captured(passed)
    originals = captured(others) if passed and run.plan.compares else list(calls)
    tell(run.reporter, "tokens", tokens_of(run.batches) * run.token_comm.world if run.plan.calibrated else 0)
    run.steps.begin()
    streams = Streams(calls[0], (original or originals[0]) if run.plan.compares else [])
    for name, block in stack.blocks:
        # The calls of blocks that are done take no memory.
        streams = streams.called_as(calls.pop(0), originals.pop(0))
        streams = run_block(run, name, block, streams)
    tell(run.reporter, "tokens", 0)
    return streams
