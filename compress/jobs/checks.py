"""The plan of a run, its identity, and what takes its blocks: all that is checked before work."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from compress.base.collectives import Comm
from compress.base.version import VERSION
from compress.checkpoint.files import fingerprint
from compress.checkpoint.read.unplaced_tensors import AHEAD, totals
from compress.checkpoint.write import coverage
from compress.checkpoint.write.directory import Directory
from compress.checkpoint.write.writer import Discard, Writer
from compress.data.teacher_file import checksum_of
from compress.engine.plan.batches import check_batches
from compress.engine.plan.existing_zeros import check_plan
from compress.engine.plan.format_limits import caches_said, check_halved, check_storable
from compress.engine.plan.plan import Plan, plan, planned
from compress.engine.plan.task_loss import check_loss
from compress.jobs.calibration_data import Shown
from compress.jobs.model_source import OpenedModel
from compress.jobs.request import Request
from compress.jobs.teachers import fingerprints
from compress.model.buffers import stored_buffers
from compress.model.disk_names import DiskNames, disk_names
from compress.model.experts import Experts
from compress.model.layers import find_stacks
from compress.model.sharing import repeated_names
from compress.passes.protocol.recipe import describe
from compress.passes.protocol.stages import Decide, Gradients, Learn
from compress.train.inputs.samples import LABELS
from compress.weights.formats.sparse24 import TWO_OF_FOUR


@dataclass(frozen=True)
class Planned:
    """A run, checked, of which nothing is done yet.

    identity: what a run that resumes it must have in common with it.
    sink: takes the finished blocks.
    caches: what the configuration will say about key-value caches.
    notes: what a person should know before the work begins.
    """

    plan: Plan
    identity: dict[str, Any]
    sink: Writer | Discard
    caches: dict[str, Any]
    notes: list[str]


def planned_work(request: Request, opened: OpenedModel, shown: Shown, place: Directory | None, comm: Comm) -> Planned:
    """Match passes with layers, and look whether all of it can work. Raises InputError where it cannot."""
    model, extent = opened.model, request.extent
    plan_ = plan(model, request.passes, extent.ignore, extent.one_block, extent.convolutions, experts=extent.experts)
    plan_ = replace(plan_, earlier=opened.earlier(extent.drop_zeros), beside=opened.kept)
    check_plan(plan_, plan_.earlier)
    check_batches(model, shown.batches)
    for p in plan_.passes:
        if p.stage(Gradients):
            check_loss(model, shown.batches, p.name)
    if shown.rows is not None:
        check_batches(model, [{name: each for name, each in shown.rows.take([0]).items() if name != LABELS}])
    identity = _identity(request, opened, shown, plan_, comm)
    sink, caches = sink_of(request, place, comm, opened, plan_, identity)
    notes = [*remarks_on_beside(opened, place is not None), *remarks(request, model, plan_, shown, sink)]
    return Planned(plan_, identity, sink, caches, notes)


def _identity(request: Request, opened: OpenedModel, shown: Shown, plan_: Plan, comm: Comm) -> dict[str, Any]:
    """The facts that a run must share with the one that it resumes."""
    found = {
        "version": VERSION,
        "model": opened.fingerprint(comm),
        "recipe": describe(plan_.recipe),
        "ignore": list(request.extent.ignore),
        "calibration": shown.fingerprint(),
        "batch_size": request.data.batch_size,
        "compute_dtype": str(opened.dtype),
        "one_block": request.extent.one_block,
        "convolutions": plan_.convolutions,
        **({"drop_zeros": True} if request.extent.drop_zeros else {}),
        **({"experts": True} if request.extent.experts else {}),
        **({} if request.delivery.store is None else {"store": request.delivery.store}),
    }
    if opened.cut is not None:
        found["structure"] = opened.cut.fingerprint
    if shown.rows is not None:
        found["training"] = checksum_of(shown.rows)
    if teachers := fingerprints(plan_.passes, request.trust_remote_code, comm):
        found["teachers"] = teachers
    return found


def sink_of(
    request: Request,
    place: Directory | None,
    comm: Comm,
    opened: OpenedModel,
    plan_: Plan,
    identity: Mapping[str, Any],
) -> tuple[Writer | Discard, dict[str, Any]]:
    """The sink for finished blocks, and what the configuration says about key-value caches."""
    if place is None:
        return Discard(request.delivery.keep_codes), {}
    check_storable(plan_)
    caches = caches_said(plan_, model := opened.model)
    delivery = request.delivery
    halved = plan_.treated if delivery.store == TWO_OF_FOUR else plan_.halved
    check_halved(plan_, halved)
    blocks = [(table.name, table.module) for table in plan_.tables]
    blocks += [block for stack in plan_.stacks for block in stack.blocks]
    how: dict[str, Any] = {"resume": delivery.resume, "overwrite": delivery.overwrite, "halved": halved}
    how |= {"buffers": [name for name, _ in stored_buffers(model)], "repeated": repeated_names(model, blocks)}
    how |= {"names": names_of(opened), "unchanged": opened.check_unchanged}
    return Writer(place, fingerprint(identity), comm, **how), caches


def names_of(opened: OpenedModel) -> DiskNames:
    """The names of a mixture's tensors in files; engines look experts up by those of the hub. Other models are written
    under their own names."""
    if not any(isinstance(module, Experts) for module in opened.model.modules()):
        return DiskNames()
    return disk_names(opened.model, None if opened.source is None else opened.source.headers)


def remarks(request: Request, model: nn.Module, plan_: Plan, shown: Shown, sink: Writer | Discard) -> list[str]:
    """Remarks for the user before the work begins."""
    data, notes = request.data, []
    trains = any(p.stage(Learn) for p in plan_.passes)
    read = any(p.calibrated for p in request.passes) or (trains and data.training is None)
    if data.training is not None and not trains:
        notes.append("no pass trains: what is given to train on stays unread")
    needing = next((p.name for p in request.passes if p.calibrated), None)
    if trains and data.calibration is None and needing is not None:
        notes.append(f"no calibration data is given: {needing} is shown samples of the training data instead")
    if data.calibration is not None and not read:
        notes.append("no pass uses calibration data: what is given stays unread")
    notes += [*plan_.notes, *remarks_on_data(shown), *remarks_on_stacks(model, plan_, request.extent.one_block)]
    if request.delivery.resume and isinstance(sink, Writer):
        notes.append(_found(sink, sum(len(stack.blocks) for stack in plan_.stacks) + len(plan_.tables)))
    if plan_.passes and not any(p.stage(Decide) for p in plan_.passes):
        notes.append(
            "no pass rounds the layers: they are prepared, not compressed; add one, or leave out rounding=none"
        )
    elif (plan_.passes and not plan_.only_trains) and (
        little := coverage.remark(
            planned(model, plan_, isinstance(sink, Writer), sink.halved if isinstance(sink, Writer) else ())
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


def remarks_on_data(shown: Shown) -> list[str]:
    """Remarks for the user on how calibration data was read."""
    return [*shown.notes]


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
