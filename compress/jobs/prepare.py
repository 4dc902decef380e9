"""From what was asked for to a job that can run. What can be refused without the model is refused before it is read."""

from dataclasses import replace
from functools import partial

from compress.base.collectives import Comm
from compress.base.progress import Reporter, tell_outline
from compress.checkpoint.write.directory import Directory
from compress.checkpoint.write.record import RunRecord
from compress.checkpoint.write.writer import Discard, Writer
from compress.engine.walk.rewrite import FoldFinder
from compress.engine.walk.state import Lessons, Run, Steps, phase_of
from compress.jobs.calibration_data import Shown, shown_data
from compress.jobs.checks import Planned, planned_work
from compress.jobs.forecast.forecast import Outline, outline
from compress.jobs.forecast.forward_memory import counts_of, lack_of_memory
from compress.jobs.forecast.memory import TokenCounts, weights_in
from compress.jobs.job import Job
from compress.jobs.model_source import (
    FoundModel,
    OpenedModel,
    check_group,
    found_model,
    opened_model,
    residency_of,
    widened,
)
from compress.jobs.request import Request
from compress.jobs.teachers import Teachers, check_tokens
from compress.jobs.whole_model import CHANGED, check_structural, shrunk, undoing
from compress.model.layers import find_stacks
from compress.model.sharing import shared_parameters

TIMED = 2**26  # weights from which on the time of a run is told


def prepare(request: Request, place: Directory | None, comm: Comm, reporter: Reporter) -> Job:
    """Settle everything that a run needs; place: where its output is made. Raises InputError for what cannot work."""
    found = _found(request)
    shown = shown_data(request.data, request.passes, found, comm.world)
    shown = replace(shown, remarks=check_tokens(request.passes, found, shown, request.trust_remote_code))
    opened = shrunk(request, opened_model(found, request.work.dtype, comm), shown, comm, reporter)
    with undoing(opened, request.work.restore):
        planned = planned_work(request, opened, shown, place, comm)
        return _job(request, opened, shown, planned, comm, reporter)


def _found(request: Request) -> FoundModel:
    """The model, not read yet. Raises InputError for passes that do not go with it whatever its weights are."""
    check_structural(request)
    if request.work.fsdp:
        check_group()
    return found_model(request.model, request.work.device, request.trust_remote_code)


def _job(request: Request, opened: OpenedModel, shown: Shown, planned: Planned, comm: Comm, reporter: Reporter) -> Job:
    """All that was settled, in one value, and its remarks said. Where `fsdp` is asked for, the model is sharded now."""
    model, plan, fsdp = opened.model, planned.plan, request.work.fsdp
    record = _record(opened, planned, reporter)
    lessons = _lessons(request, opened, shown, planned)
    stores = widened(model) if lessons is not None and fsdp and opened.source is not None else {}
    batches = shown.batches[comm.rank :: comm.world]
    lack = lack_of_memory(opened, plan, batches, request.work.spill is not None)
    if lack is not None:
        record.note(reporter, lack)
    if isinstance(planned.sink, Writer):
        tell_outline(reporter, partial(_outline, request, opened, planned, counts_of(shown.batches)))
    keep = opened.source is None or isinstance(planned.sink, Discard) or lessons is not None
    run = Run(
        model,
        plan,
        batches,
        residency_of(opened, find_stacks(model, plan.convolutions), fsdp, keep, stores),
        planned.sink,
        comm,
        record,
        reporter,
        FoldFinder(comm, shared_parameters(model)),
        Steps.of(reporter, plan, phase_of(lessons)),
        lessons,
        repeats=lack is not None,
    )
    return Job(request, opened, run, shown, planned.identity, planned.caches, stores)


def _outline(request: Request, opened: OpenedModel, planned: Planned, tokens: TokenCounts | None) -> Outline:
    """The outline of the run. tokens: those that go through blocks. Of little work the time is not told, which takes a
    measurement; nor the memory of tensors that lie in files."""
    plan, timed = planned.plan, sum(map(weights_in, planned.plan.layers.values())) >= TIMED
    told = outline(opened.source, opened.device, opened.model, plan, request.delivery, tokens, timed=timed)
    return told if request.work.spill is None else replace(told, memory=None)


def _record(opened: OpenedModel, planned: Planned, reporter: Reporter) -> RunRecord:
    """The run's record before any work; reports the remarks that have not been reported yet."""
    record = RunRecord(notes=[*opened.notes, *planned.notes])
    for note in record.notes:
        reporter.note(note)
    if opened.cut is not None:
        record.notes += opened.cut.notes
        record.structure, record.changed = opened.cut.record, [*CHANGED]
    return record


def _lessons(request: Request, opened: OpenedModel, shown: Shown, planned: Planned) -> Lessons | None:
    """The model's training data and teachers; None where it is not trained."""
    if shown.rows is None:
        return None
    teachers = Teachers(
        opened.source, opened.model, opened.device, request.work.fsdp, request.trust_remote_code, shown.cached
    )
    place = planned.sink.place.training if isinstance(planned.sink, Writer) else None
    return Lessons(shown.rows, request.data.batch_size, teachers.named, place, request.delivery.resume)
