"""What is settled before any work: from what was asked for to a job that can run.

What can be refused without the model is refused before it is loaded.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from compress.api.job import Job
from compress.api.request import Calibration, Request
from compress.api.teachers import Teachers
from compress.api.verify import probe_of
from compress.checkpoint.files import checksum, fingerprint
from compress.checkpoint.read.pretrained import load_dense, main_input, model_fingerprint, read_config, tokenizer_of
from compress.checkpoint.read.source import Source, check_dense, find_source
from compress.checkpoint.saving import bytes_before
from compress.checkpoint.write import coverage
from compress.checkpoint.write.directory import Directory
from compress.checkpoint.write.record import RunRecord
from compress.checkpoint.write.writer import Discard, Writer
from compress.data.teacher_file import checksum_of, read_cached
from compress.data.text import TOKEN_FORMATS, Tokens, batches_of, load_tokens
from compress.errors import InputError
from compress.model.buffers import stored_buffers
from compress.model.calls import Batch
from compress.model.finite import check_finite
from compress.model.layers import check_tensors, find_stacks
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import describe
from compress.passes.protocol.stages import Decide, Gradients, Learn
from compress.passes.structure import Structure
from compress.run.plan.batches import check_batches
from compress.run.plan.loss import check_loss
from compress.run.plan.matching import Ignored, check_untouched
from compress.run.plan.plan import Plan, plan, planned, structural_of
from compress.run.plan.storable import cache_entry_of, check_halved, check_storable
from compress.run.plan.zeros import check_plan, check_structure, recorded
from compress.run.residency import Local, Residency, Sharded, is_narrow, shard
from compress.run.restore import naming, undone
from compress.run.shrink.restructure import Restructured, Restructuring
from compress.run.walk.state import Lessons
from compress.runtime.layers.embedding import QuantEmbedding
from compress.runtime.layers.linear import QuantLinear
from compress.system.comm import Comm
from compress.system.device import find_device
from compress.system.progress import Reporter
from compress.system.version import VERSION
from compress.train.inputs.offline import TopKRows
from compress.train.inputs.rows import LABELS, Rows, rows_of
from compress.train.losses.options import ORIGINAL
from compress.weights.formats.sparse24 import TWO_OF_FOUR
from compress.weights.masks import Earlier

WINDOWS = 128  # of calibration text, where nobody says how many


TOKENS = "input_ids"


@dataclass(frozen=True)
class _Data:
    """What the model is shown: calibration tokens, where it is text or token ids, the batches of all ranks, and what it
    is trained on; cached: what files hold of teachers, and the checksums of these, by their names."""

    tokens: Tokens | None
    batches: list[Batch]
    rows: Rows | None
    cached: Mapping[str, tuple[TopKRows, str]]


def prepare(request: Request, place: Directory | None, comm: Comm, reporter: Reporter) -> Job:
    """Settle everything that a run needs; place: where its output is made. Raises InputError for what cannot work."""
    source = _source(request)
    structural, rest = structural_of(request.passes)
    if not rest and request.delivery.store is not None:
        raise InputError(f"store {request.delivery.store} is of layers that a pass prunes, and none does; leave it out")
    if request.work.fsdp:
        check_group()
    device = find_device(request.work.device) if source is not None or request.work.device is not None else None
    config = read_config(source) if source is not None else getattr(request.model, "config", None)
    tokens, batches = _calibration(request, config, source)
    learning = [stage.options for p in request.passes if (stage := p.stage(Learn)) is not None]
    if structural and source is None and any(options.teacher == ORIGINAL for options in learning):
        raise InputError(
            "train learns from the original, which a model in memory is no longer once structure has cut it; give the "
            "model by name, or train with teacher=none, or the directory of another model"
        )
    rows = training_rows(request, config, source) if learning else None
    cached = {} if rows is None else _cached(request, rows)
    if len(batches) < comm.world and any(p.calibrated for p in request.passes):
        raise InputError(
            f"{len(batches)} micro-batches for {comm.world} ranks; give more samples or a smaller batch size"
        )
    # What follows needs the model.
    record = RunRecord()
    model = load_dense(source, notes=record.notes) if source is not None else request.model
    assert isinstance(model, nn.Module)
    _check_no_codes(model)
    check_finite(model, comm)
    before = bytes_before(source, model)
    device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = _compute_dtype(model, device, request.work.dtype)
    earlier = earlier_of(request, source)
    with ExitStack() as undoing:
        restructured = None
        for p in structural:
            restructured = _restructured(request, p, model, batches, Local(device, dtype), (comm, reporter), earlier)
            record.structure, record.changed = restructured.record, ["its structure"]
            undoing.enter_context(undone(restructured.undo) if request.work.restore else naming(record.changed))
        data = _Data(tokens, batches, rows, cached)
        job = _job(request, source, model, restructured, data, (device, dtype), place, record, comm, reporter)
        return replace(job, before=before)


def _job(
    request: Request,
    source: Source | None,
    model: nn.Module,
    restructured: Restructured | None,
    data: _Data,
    work: tuple[torch.device, torch.dtype | None],
    place: Directory | None,
    record: RunRecord,
    comm: Comm,
    reporter: Reporter,
) -> Job:
    """The rest of `prepare`, with the model as it is from here on."""
    extent, tokens, batches, rows = request.extent, data.tokens, data.batches, data.rows
    device, dtype = work
    plan_ = plan(model, request.passes, extent.ignore, extent.one_block, extent.convolutions)
    plan_ = replace(plan_, earlier=earlier_of(request, source))
    check_plan(plan_, plan_.earlier)
    check_batches(model, batches)
    for p in plan_.passes:
        if p.stage(Gradients):
            check_loss(model, batches, p.name)
    identity = _identity(request, source, model, plan_, _fingerprint_of(tokens, batches), dtype)
    if restructured is not None:
        identity["structure"] = restructured.fingerprint
    if rows is not None:
        check_batches(model, [{name: tensor for name, tensor in rows.take([0]).items() if name != LABELS}])
        identity["training"] = checksum_of(rows)
    if data.cached:
        identity["teachers"] = {name: checksum for name, (_, checksum) in data.cached.items()}
    sink, cache = sink_of(request, place, comm, model, plan_, identity)
    record.notes += _remarks(request, model, plan_, tokens, sink)
    for note in record.notes:
        reporter.note(note)
    record.notes += [] if restructured is None else restructured.notes
    teacher = Teachers(request, source, model, device, {name: said for name, (said, _) in data.cached.items()})
    stores = _widened(model) if rows is not None and request.work.fsdp and source is not None else {}
    keep = source is None or place is None or rows is not None
    lessons = None
    if rows is not None:
        kept = None if place is None else place.training
        lessons = Lessons(rows, request.data.batch_size, teacher.named, kept, request.delivery.resume)
    return Job(
        request=request,
        source=source,
        model=model,
        plan=plan_,
        batches=batches[comm.rank :: comm.world],
        tokens=tokens,
        identity=identity,
        residency=_residency(request, model, plan_, device, dtype, keep, stores),
        sink=sink,
        cache=cache,
        comm=comm,
        record=record,
        reporter=reporter,
        restructured=restructured,
        lessons=lessons,
        stores=stores,
    )


def earlier_of(request: Request, source: Source | None) -> Earlier:
    """The pruning that the model comes with."""
    kept = not request.extent.drop_zeros
    return Earlier(kept, recorded(source) if kept else {})


def _restructured(
    request: Request,
    p: Pass,
    model: nn.Module,
    batches: Sequence[Batch],
    residency: Local,
    who: tuple[Comm, Reporter],
    earlier: Earlier,
) -> Restructured:
    """Remove what a pass says from a model, which every rank holds as a whole until then."""
    assert isinstance(p, Structure)
    if isinstance(model, FSDPModule):
        raise InputError(
            "structure changes the shapes of parameters, which shards cannot; give the model before fully_shard, or by "
            "name with fsdp=True"
        )
    check_tensors(model)
    check_untouched(model)
    check_structure(model, p, earlier)
    check_batches(model, batches)
    comm, reporter = who
    extent = request.extent

    def check(foreseen: nn.Module) -> None:
        plan(foreseen, request.passes, extent.ignore, extent.one_block, extent.convolutions, valued=False)

    work = Restructuring(
        model,
        p,
        batches=batches[comm.rank :: comm.world],
        probe=batches[0] if batches else _probe(model),
        residency=residency,
        ignored=Ignored(extent.ignore),
        check=check,
        comm=comm,
        reporter=reporter,
    )
    return work.run(extent.one_block)


def _probe(model: nn.Module) -> Batch:
    """What a model is shown to see what hangs together in it, where there is no calibration data."""
    config = getattr(model, "config", None)
    shown = None if config is None else probe_of(config.to_dict())
    if shown is None:
        raise InputError(
            f"{type(model).__name__} does not say what it takes (vocab_size or num_channels), to see what hangs "
            "together in it; give calibration data and an importance that uses it"
        )
    if shown.is_floating_point():
        return {"pixel_values": shown.to(next(model.parameters()).dtype)}
    decoder = {"decoder_input_ids": shown} if getattr(config, "is_encoder_decoder", False) else {}
    return {"input_ids": shown, **decoder}


def _source(request: Request) -> Source | None:
    """Where the model is read from, None for one in memory."""
    model: Any = request.model
    if isinstance(model, nn.Module):
        if request.delivery.verify and not hasattr(model, "config"):
            raise InputError(
                "verify reloads the output by its configuration, which this model has none of; leave it out"
            )
        check_untouched(model)
        return None
    if not isinstance(model, str | Path):
        raise InputError(f"model: {model!r} is no model; give a directory, a hub id, 'demo' or a torch.nn.Module")
    source = find_source(str(model), request.trust_remote_code)
    check_dense(source)
    return source


def check_group() -> None:
    """Refuse a sharded run where there is no process group, or a torch that has none of this kind."""
    if not torch.distributed.is_initialized():
        raise InputError("a sharded run needs a process group; start it with torchrun")
    Sharded.require()


def _calibration(request: Request, config: Any, source: Source | None) -> tuple[Tokens | None, list[Batch]]:
    """The tokens, where what was given is text or token ids, and the batches of all ranks."""
    data = request.data
    calibration, windowed = data.calibration, data.samples is not None or data.length is not None
    needing = next((p for p in request.passes if p.calibrated), None)
    if needing is None:
        trains = any(p.stage(Learn) for p in request.passes)
        if trains and data.samples is not None:
            raise InputError("samples are of calibration data, which no pass uses; all that is given is trained on")
        if windowed and not trains and calibration is None:
            raise InputError("samples and length are of calibration data, which no pass uses; leave them out")
        return None, []
    if calibration is None and data.training is not None and any(p.stage(Learn) for p in request.passes):
        return _first_of_training(request, config, source, data.training)  # `_remarks` says so
    if calibration is None:
        raise InputError(f"{needing.name} needs calibration data; {_what_to_show(request, source)}")
    rows = isinstance(calibration, Tensor) or str(calibration).endswith(TOKEN_FORMATS)  # all of them, unless told
    samples = WINDOWS if data.samples is None and not rows else data.samples
    return _shown(request, config, source, calibration, samples)


def _first_of_training(
    request: Request, config: Any, source: Source | None, training: Calibration
) -> tuple[Tokens | None, list[Batch]]:
    """As many samples of the training data as calibration takes by default, or is told to."""
    samples = WINDOWS if request.data.samples is None else request.data.samples
    if isinstance(training, str | Path | Tensor):
        return _shown(request, config, source, training, samples)
    tokens, batches = _shown(request, config, source, training, None)
    return tokens, batches[: -(-samples // request.data.batch_size)]


def training_rows(request: Request, config: Any, source: Source | None) -> Rows:
    """What the model is trained on: all of what was given for that, or else of the calibration data."""
    data = request.data
    given = data.calibration if data.training is None else data.training
    if given is None:
        raise InputError(f"train needs data to train on (training, or calibration); {_what_to_show(request, source)}")
    _, batches = _shown(request, config, source, given, None)
    return rows_of(batches)


def _cached(request: Request, rows: Rows) -> dict[str, tuple[TopKRows, str]]:
    """What files hold of teachers."""
    learning = [stage.options for p in request.passes if (stage := p.stage(Learn)) is not None]
    return {each.teacher: read_cached(each.teacher, rows, each) for each in learning if each.offline}


def _shown(
    request: Request, config: Any, source: Source | None, given: Calibration, samples: int | None
) -> tuple[Tokens | None, list[Batch]]:
    """The tokens, where what is given is text or token ids, and the batches of all ranks."""
    data = request.data
    if not isinstance(given, str | Path | Tensor):
        if data.samples is not None or data.length is not None:
            raise InputError("samples and length do not apply to ready-made batches; leave them out")
        return None, batches_of(given, data.batch_size, getattr(config, "vocab_size", None))
    if _taken(request, source) != TOKENS:
        said = "a tensor" if isinstance(given, Tensor) else repr(str(given))
        raise InputError(f"{said} holds no inputs of this model; {_what_to_show(request, source)}")
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            "an encoder-decoder is calibrated on pairs; give batches with input_ids and decoder_input_ids (Python)"
        )

    tokenizer = partial(tokenizer_of, source)
    text = given if isinstance(given, Tensor) else str(given)
    tokens = load_tokens(text, tokenizer, config, what="calibration", length=data.length, samples=samples)
    return tokens, batches_of(tokens.ids, data.batch_size)


def _taken(request: Request, source: Source | None) -> str:
    """The name of what the model is given: token ids, unless transformers says otherwise."""
    model = request.model if isinstance(request.model, nn.Module) else None
    return main_input(source, model) or TOKENS


def _what_to_show(request: Request, source: Source | None) -> str:
    """Advice where data is missing, or of another kind than the model takes."""
    taken = _taken(request, source)
    if taken == TOKENS:
        return "give text, token ids or 'demo'"
    return (
        f"the model takes {taken}: give batches in Python (compress.quantize(..., calibration=[{{'{taken}': tensor}}, "
        "...])), or use a method that needs no data, like rtn"
    )


def _fingerprint_of(tokens: Tokens | None, batches: Sequence[Batch]) -> str:
    """Of the calibration data."""
    if tokens is not None:
        return tokens.fingerprint()
    return fingerprint(
        {str(i): {k: checksum(v) for k, v in b.items() if isinstance(v, Tensor)} for i, b in enumerate(batches)}
    )


def _check_no_codes(model: nn.Module) -> None:
    """Refuse a model that runs compressed already."""
    coded = next((n for n, m in model.named_modules() if isinstance(m, QuantLinear | QuantEmbedding)), None)
    if coded is not None:
        raise InputError(f"{coded} computes on codes already; give the original model, or load it with dequantize=True")


def _compute_dtype(model: nn.Module, device: torch.device, wanted: torch.dtype | None) -> torch.dtype | None:
    """What blocks are worked on in; None for the dtype of each parameter."""
    if wanted is not None or device.type != "cpu":
        return wanted
    return None if any(p.dtype == torch.float64 for p in model.parameters()) else torch.float32


def _identity(
    request: Request, source: Source | None, model: nn.Module, plan_: Plan, calibration: str, dtype: torch.dtype | None
) -> dict[str, Any]:
    """What a run must have in common with the one that it resumes."""
    return {
        "version": VERSION,
        "model": source.fingerprint() if source is not None else model_fingerprint(model),
        "recipe": describe(plan_.recipe),
        "ignore": list(request.extent.ignore),
        "calibration": calibration,
        "batch_size": request.data.batch_size,
        "compute_dtype": str(dtype),
        "one_block": request.extent.one_block,
        "convolutions": plan_.convolutions,
        **({"drop_zeros": True} if request.extent.drop_zeros else {}),
        **({} if request.delivery.store is None else {"store": request.delivery.store}),
    }


def sink_of(
    request: Request,
    place: Directory | None,
    comm: Comm,
    model: nn.Module,
    plan_: Plan,
    identity: Mapping[str, Any],
) -> tuple[Writer | Discard, dict[str, Any] | None]:
    """What takes the finished blocks, and what the configuration will say about key-value caches."""
    if place is None:
        return Discard(), None
    check_storable(plan_)
    cache = cache_entry_of(plan_, model)
    delivery = request.delivery
    halved = plan_.treated if delivery.store == TWO_OF_FOUR else plan_.halved
    check_halved(plan_, halved)
    how = {"resume": delivery.resume, "overwrite": delivery.overwrite}
    buffers = [name for name, _ in stored_buffers(model)]
    return Writer(place, fingerprint(identity), comm, **how, halved=halved, buffers=buffers), cache


def _found(sink: Writer, total: int) -> str:
    """A remark on what an earlier run has left to go on with."""
    if sink.blocks:
        return f"going on with an earlier run of {sink.output.name}: {len(sink.blocks)} of {total} steps are done"
    if sink.place.trained():
        return f"going on with the training of an earlier run of {sink.output.name}"
    return f"no finished block of an earlier run for {sink.output.name}: started from the beginning"


def _remarks(
    request: Request, model: nn.Module, plan_: Plan, tokens: Tokens | None, sink: Writer | Discard
) -> list[str]:
    """What a person should know before the work begins."""
    notes = []
    trains = any(p.stage(Learn) for p in plan_.passes)
    read = any(p.calibrated for p in request.passes) or (trains and request.data.training is None)
    if request.data.training is not None and not trains:
        notes.append("no pass trains: what is given to train on stays unread")
    needing = next((p.name for p in request.passes if p.calibrated), None)
    if trains and request.data.calibration is None and needing is not None:
        notes.append(f"no calibration data is given: {needing} is shown samples of the training data instead")
    if request.data.calibration is not None and not read:
        notes.append("no pass uses calibration data: what is given stays unread")
    notes += [*plan_.notes, *(tokens.notes if tokens is not None else ())]
    several = plan_.stacks[0].container is None and not request.extent.one_block
    if several and len(find_stacks(model, plan_.convolutions)) > 1:
        notes.append("the model has several stacks of blocks (an encoder and a decoder, say); it is run as one block")
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


def _residency(
    request: Request,
    model: nn.Module,
    plan_: Plan,
    device: torch.device,
    dtype: torch.dtype | None,
    keep: bool,
    stores: Mapping[str, torch.dtype],
) -> Residency:
    """Where the weights live meanwhile. keep: whether the model itself is changed. stores: of parameters that have been
    widened, the dtype before."""
    if isinstance(model, FSDPModule):
        return Sharded(model, device, dtype)
    if not request.work.fsdp:
        return Local(device, dtype, keep)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    return Sharded(shard(model, find_stacks(model, plan_.convolutions), mesh), device, dtype, stores)


def _widened(model: nn.Module) -> dict[str, torch.dtype]:
    """Give parameters of 16 bits 32, to be trained once they are sharded; {name: the dtype before}."""
    stores = {name: p.dtype for name, p in model.named_parameters() if is_narrow(p)}
    for name, p in model.named_parameters():
        if name in stores:
            p.data = p.data.float()
    return stores
