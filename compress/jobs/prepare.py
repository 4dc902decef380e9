"""From what was asked for to a job that can run. What can be refused without the model is refused before it is read."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.memory import available_bytes
from compress.base.progress import Reporter, tell
from compress.base.version import VERSION
from compress.checkpoint.files import fingerprint
from compress.checkpoint.read.unplaced_tensors import AHEAD, totals
from compress.checkpoint.write import coverage
from compress.checkpoint.write.directory import Directory
from compress.checkpoint.write.record import RunRecord
from compress.checkpoint.write.writer import InMemory, Writer
from compress.data.teacher_file import checksum_of
from compress.engine.learn.trainable import check_trainable
from compress.engine.plan.batches import check_batches
from compress.engine.plan.existing_zeros import check_plan
from compress.engine.plan.experts_by_rank import why_whole
from compress.engine.plan.format_limits import caches_config, check_halved, check_storable
from compress.engine.plan.plan import Plan, planned_coverage, restructuring_of
from compress.engine.plan.task_loss import check_loss, check_predictions
from compress.engine.walk.stacks import chain
from compress.engine.walk.state import Lessons, Run
from compress.jobs.calibration_data import RunData, read_data
from compress.jobs.forecast.forecast import Outline, outline, written_layers
from compress.jobs.forecast.peak_memory import (
    looks_beyond,
    memory_modes_of,
    open_as_fits,
    token_counts,
    weights_in,
)
from compress.jobs.job import Job
from compress.jobs.model_source import (
    CHANGED,
    OpenedModel,
    find_model,
    mesh_shape,
    open_model,
    residency_of,
    widen_parameters,
)
from compress.jobs.request import Request
from compress.jobs.teachers import Teachers, check_tokens, fingerprints
from compress.jobs.whole_model import check_structural, edit_whole_model
from compress.model.disk_names import DiskNames, disk_names
from compress.model.experts import Experts
from compress.model.layers import find_stacks
from compress.model.sharing import repeated_names
from compress.model.tensors import stored_buffers
from compress.passes.protocol.recipe import describe
from compress.passes.protocol.stages import Decide, Gradients, Learn
from compress.train.inputs.samples import LABELS
from compress.weights.formats.sparse24 import TWO_OF_FOUR

TIMED = 2**26  # weights from which on the time of a run is told


def prepare(request: Request, place: Directory | None, comm: Comm, reporter: Reporter) -> Job:
    """Settle everything that a run needs; place: where its output is made. Raises InputError for what cannot work."""
    structural, _ = restructuring_of(request.passes)
    if structural:
        check_structural(request)
    if request.fsdp:
        mesh_shape(request.fsdp)
    found = find_model(request.model, request.device, request.trust_remote_code)
    data = read_data(request, found, comm.world)
    if data.rows is not None:
        data = replace(data, remarks=check_tokens(request.passes, found, data, request.trust_remote_code))
    lasting = structural or place is None or data.rows is not None or any(map(looks_beyond, request.passes))
    opened = open_model(found, request.dtype, comm, defer=not lasting)
    if structural:
        opened = edit_whole_model(request, opened, data, comm, reporter)
    with opened.undo_on_failure(request.restore):
        return _job(request, opened, data, place, comm, reporter)


def _job(
    request: Request, opened: OpenedModel, data: RunData, place: Directory | None, comm: Comm, reporter: Reporter
) -> Job:
    """The job of a model and its data. Where `fsdp` is asked for, the model is sharded now."""
    model, plan_ = opened.model, checked_plan(request, opened, data)
    record = RunRecord(notes=[*opened.notes])
    lessons = _lessons(request, opened, data, place)
    stores = widen_parameters(model) if lessons is not None and request.fsdp else {}
    keep = opened.source is None or place is None or lessons is not None
    sharded = bool(request.fsdp) and comm.active and not keep and mesh_shape(request.fsdp)[1] > 1
    why = why_whole(plan_, model, comm.world if sharded else 1)
    by_rank = sharded and why is None
    if sharded and why is not None and any(isinstance(module, Experts) for module in model.modules()):
        record.notes.append(f"every rank opens all experts of a block: {why}")
    if why is None and not keep:
        open_as_fits(model, plan_, opened.device, opened.dtype, available_bytes(opened.device))
    stacks = find_stacks(model, plan_.convolutions)
    run = Run(
        model=model,
        plan=plan_,
        batches=data.batches if by_rank else data.batches[comm.rank :: comm.world],
        residency=residency_of(opened, stacks, request.fsdp, keep, stores, comm if by_rank else None),
        sink=InMemory(request.keep_codes),
        comm=comm,
        record=record,
        reporter=reporter,
        lessons=lessons,
        phase="" if lessons is None else "before training, ",
        shares_tokens=not by_rank,
    )
    run = _chain(request, opened, data, run)
    identity = _identity(request, opened, data, run.plan, comm)
    sink, caches = sink_of(request, place, comm, opened, run.plan, identity)
    record.notes += [*remarks_on_beside(opened, place is not None), *remarks_on_stacks(model, plan_, request.one_block)]
    record.notes += remarks(request, model, run.plan, data, sink)
    for note in record.notes:
        reporter.note(note)
    if opened.cut is not None:
        record.notes += opened.cut.notes
        record.structure, record.changed = opened.cut.record, [*CHANGED]
    (mode, *leaner), remark = memory_modes_of(opened, run.plan, run.batches, request.spill is not None)
    if remark is not None:
        record.note(reporter, remark)
    run = replace(run, sink=sink, memory_mode=mode, leaner_modes=leaner)
    if isinstance(sink, Writer):
        tell(reporter, "outline", partial(_outline, request, opened, data, run.plan))
    return Job(request, opened, run, data, identity, caches, stores)


def checked_plan(request: Request, opened: OpenedModel, data: RunData, one_block: bool = False) -> Plan:
    """The passes matched with layers, all of which can work. Raises InputError otherwise. one_block: even where it was
    not asked for."""
    model = opened.model
    matched_plan = request.match(model, one_block)
    matched_plan = replace(matched_plan, earlier=opened.earlier(request.drop_zeros), beside=opened.kept)
    check_plan(matched_plan, matched_plan.earlier)
    check_trainable(model, matched_plan)
    check_batches(model, data.batches)
    for p in matched_plan.passes:
        if p.stage(Gradients):
            check_loss(model, data.batches, p.name)
        if p.asks_curvature:
            check_predictions(model, data.batches, p.name)
    if data.rows is not None:
        check_batches(model, [{name: each for name, each in data.rows.take([0]).items() if name != LABELS}])
    return matched_plan


def _chain(request: Request, opened: OpenedModel, data: RunData, run: Run) -> Run:
    """A calibrated run with its stacks as the model runs them, or the model as one block; another run as it is."""
    if not run.plan.calibrated:
        return run
    alone = any(p.stage(Gradients) or p.asks_curvature for p in run.plan.passes)

    def one_block() -> Plan:
        if not run.shares_tokens:
            raise InputError(
                "ranks cannot share out the experts of a model whose blocks are no chain: give --one-block"
            )
        return checked_plan(request, opened, data, one_block=True)

    return chain(run, alone, one_block, run.record.notes.append)


def _outline(request: Request, opened: OpenedModel, data: RunData, plan_: Plan) -> Outline:
    """The outline of the run. Of little work the time is not told, which takes a measurement; nor the memory of tensors
    that lie in files."""
    timed, tokens = sum(map(weights_in, plan_.layers.values())) >= TIMED, token_counts(data.batches)
    of_model = opened.model, plan_, written_layers(plan_, request.store)
    told = outline(opened.source, opened.device, *of_model, request, tokens, timed=timed)
    return told if request.spill is None else replace(told, memory=None)


def _lessons(request: Request, opened: OpenedModel, data: RunData, place: Directory | None) -> Lessons | None:
    """The model's training data and teachers; None where it is not trained."""
    if data.rows is None:
        return None
    teachers = Teachers(
        opened.source, opened.model, opened.device, bool(request.fsdp), request.trust_remote_code, data.cached
    )
    folder = None if place is None else place.training
    return Lessons(data.rows, request.batch_size, teachers.named, folder, request.resume)


def _identity(request: Request, opened: OpenedModel, data: RunData, plan_: Plan, comm: Comm) -> dict[str, Any]:
    """The facts that a run must share with the one that it resumes."""
    identity = {
        "version": VERSION,
        "model": opened.fingerprint(comm),
        "recipe": describe(plan_.recipe),
        "ignore": list(request.ignore),
        "calibration": data.fingerprint(),
        "batch_size": request.batch_size,
        "compute_dtype": str(opened.dtype),
        "one_block": request.one_block,
        "convolutions": plan_.convolutions,
        **({"drop_zeros": True} if request.drop_zeros else {}),
        **({"experts": True} if request.experts else {}),
        **({} if request.store is None else {"store": request.store}),
        **({} if request.shard_bytes is None else {"shard_bytes": request.shard_bytes}),
    }
    if opened.cut is not None:
        identity["structure"] = opened.cut.fingerprint
    if data.rows is not None:
        identity["training"] = checksum_of(data.rows)
        if teachers := fingerprints(plan_.passes, request.trust_remote_code, comm):
            identity["teachers"] = teachers
    return identity


def sink_of(
    request: Request,
    place: Directory | None,
    comm: Comm,
    opened: OpenedModel,
    plan_: Plan,
    identity: Mapping[str, Any],
) -> tuple[Writer | InMemory, dict[str, Any]]:
    """The sink for finished blocks, and what the configuration says about key-value caches."""
    if place is None:
        return InMemory(request.keep_codes), {}
    check_storable(plan_)
    caches = caches_config(plan_, model := opened.model)
    halved = plan_.treated if request.store == TWO_OF_FOUR else plan_.halved
    check_halved(plan_, halved)
    blocks = [(table.name, table.module) for table in plan_.tables]
    blocks += [block for stack in plan_.stacks for block in stack.blocks]
    how: dict[str, Any] = {"resume": request.resume, "overwrite": request.overwrite, "halved": halved}
    how |= {"buffers": [name for name, _ in stored_buffers(model)], "repeated": repeated_names(model, blocks)}
    how |= {"names": names_of(opened), "unchanged": opened.check_unchanged}
    return Writer(place, fingerprint(identity), comm, **how), caches


def names_of(opened: OpenedModel) -> DiskNames:
    """The names of a mixture's tensors in files; engines look experts up by those of the hub. Other models are written
    under their own names."""
    if not any(isinstance(module, Experts) for module in opened.model.modules()):
        return DiskNames()
    return disk_names(opened.model, None if opened.source is None else opened.source.headers)


def remarks(request: Request, model: nn.Module, plan_: Plan, data: RunData, sink: Writer | InMemory) -> list[str]:
    """Remarks for the user before the work begins."""
    notes = []
    trains = any(p.stage(Learn) for p in plan_.passes)
    read = any(p.calibrated for p in request.passes) or (trains and request.training is None)
    if request.training is not None and not trains:
        notes.append("no pass trains: what is given to train on stays unread")
    needing = next((p.name for p in request.passes if p.calibrated), None)
    if trains and request.calibration is None and needing is not None:
        notes.append(f"no calibration data is given: {needing} is shown samples of the training data instead")
    if request.calibration is not None and not read:
        notes.append("no pass uses calibration data: what is given stays unread")
    notes += [*plan_.notes, *data.notes]
    if request.resume and isinstance(sink, Writer):
        notes.append(_found(sink, sum(len(stack.blocks) for stack in plan_.stacks) + len(plan_.tables)))
    if plan_.passes and not any(p.stage(Decide) for p in plan_.passes):
        notes.append(
            "no pass rounds the layers: they are prepared, not compressed; add one, or leave out rounding=none"
        )
    elif (plan_.passes and not plan_.only_trains) and (
        little := coverage.remark(
            planned_coverage(model, plan_, isinstance(sink, Writer), sink.halved if isinstance(sink, Writer) else ())
        )
    ):
        notes.append(little)
    return notes


def remarks_on_beside(opened: OpenedModel, written: bool) -> list[str]:
    """Remarks for the user on tensors that the model has no place for. written: whether there is an output."""
    if opened.cut is None:
        found = [f"kept dense: {words}" for words in totals(opened.beside)]
    else:
        found = [f"not written: {words}: the recipe edits the model as a whole" for words in totals(opened.beside)]
    if written and opened.headless:
        found.append(f"the configuration of the output counts no {AHEAD}: none is written")
    return found


def remarks_on_stacks(model: nn.Module, plan_: Plan, one_block: bool) -> list[str]:
    """A remark on a model that runs as one block without having been asked to."""
    joined = plan_.stacks[0].container is None and not one_block
    if joined and len(find_stacks(model, plan_.convolutions)) > 1:
        return ["the model has several stacks of blocks (an encoder and a decoder, say); it is run as one block"]
    return []


def _found(sink: Writer, total: int) -> str:
    """A remark on what an earlier run has left to go on with."""
    if sink.blocks:
        return f"going on with an earlier run of {sink.output.name}: {len(sink.blocks)} of {total} steps are done"
    if sink.place.trained():
        return f"going on with the training of an earlier run of {sink.output.name}"
    return f"no finished block of an earlier run for {sink.output.name}: started from the beginning"
