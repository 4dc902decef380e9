"""Edits of the whole model before anything else is decided: parts that go, rotations of its hidden state."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import nn
from torch.distributed.fsdp import FSDPModule

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.progress import Reporter
from compress.engine.plan.batches import check_batches
from compress.engine.plan.existing_zeros import check_restructured
from compress.engine.plan.plan import restructuring_of
from compress.engine.plan.treatable_layers import Ignored, check_untouched
from compress.engine.residency import Local
from compress.engine.restore import undone
from compress.engine.shrink.edit_result import Restructured
from compress.engine.shrink.model_edits import ModelEdits
from compress.jobs.calibration_data import RunData, training_options
from compress.jobs.model_source import OpenedModel
from compress.jobs.request import Request
from compress.jobs.verify import probe_of
from compress.model.calls import Batch
from compress.model.layers import check_tensors
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Restructure
from compress.train.losses.options import ORIGINAL


def check_structural(request: Request) -> None:
    """Refuse, before the model is read, a recipe that edits the whole model and something that does not go with
    that."""
    structural, rest = restructuring_of(request.passes)
    if not rest and request.store is not None:
        raise InputError(f"store {request.store} is of layers that a pass prunes, and none does; leave it out")
    in_memory = isinstance(request.model, nn.Module)
    if structural and in_memory and any(options.teacher == ORIGINAL for options in training_options(request.passes)):
        p = structural[0]
        raise InputError(
            f"train learns from the original, which a model in memory is no longer once {p.name} has "
            f"{'cut' if p.removes else 'changed'} it; give the model by name, or train with teacher=none, or the "
            "directory of another model"
        )


def edit_whole_model(
    request: Request, opened: OpenedModel, data: RunData, comm: Comm, reporter: Reporter
) -> OpenedModel:
    """Edit the model as the passes say that do so. Every rank holds it as a whole until then."""
    structural, _ = restructuring_of(request.passes)
    done = Restructured()
    with undone(done.undo):
        for p in structural:
            _edits(request, p, opened, data, comm, reporter, done).run()
            opened = replace(opened, cut=done)
    return opened


def _edits(
    request: Request,
    p: Pass,
    opened: OpenedModel,
    data: RunData,
    comm: Comm,
    reporter: Reporter,
    done: Restructured,
) -> ModelEdits:
    """The edits of one pass. done: of it and those before it. Raises InputError for a model that cannot be edited."""
    stage = p.stage(Restructure)
    assert stage is not None
    model, batches = opened.model, data.batches
    if isinstance(model, FSDPModule):
        raise InputError(
            f"{p.name} changes {'the shapes of parameters, which shards cannot' if p.removes else 'the whole model'}; "
            "give the model before fully_shard, or by name with fsdp=True"
        )
    check_tensors(model)
    check_untouched(model)
    check_restructured(model, p, stage, opened.earlier(request.drop_zeros))
    check_batches(model, batches)

    def check(foreseen: nn.Module) -> None:
        """Plan the rest of the run, once the last of these passes has been seen."""
        if p is restructuring_of(request.passes)[0][-1]:
            request.match(foreseen, valued=False)

    return ModelEdits(
        model,
        batches[comm.rank :: comm.world],
        partial(_probe, model, p, batches),
        Local(opened.device, opened.dtype),
        Ignored(request.ignore),
        request.one_block,
        comm,
        reporter,
        done,
        p,
        stage,
        check,
    )


def _probe(model: nn.Module, p: Pass, batches: Sequence[Batch]) -> Batch:
    """A micro-batch that shows what hangs together in a model: the first, or a made one where there are none."""
    if batches:
        return batches[0]
    config = getattr(model, "config", None)
    shown = None if config is None else probe_of(config.to_dict())
    if shown is None:
        raise InputError(
            f"{type(model).__name__} does not say what it takes (vocab_size or num_channels), to see what hangs "
            f"together in it; give calibration data, and options of {p.name} that use it"
        )
    if shown.is_floating_point():
        return {"pixel_values": shown.to(next(model.parameters()).dtype)}
    decoder = {"decoder_input_ids": shown} if getattr(config, "is_encoder_decoder", False) else {}
    return {"input_ids": shown, **decoder}
