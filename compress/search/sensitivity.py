"""`measure_sensitivity`: measures the loss of each layer of a model under each candidate, and caches the result.

The cache directory is $COMPRESS_CACHE_DIR/sensitivity. The key is a hash of the model, both texts, the candidates and
everything else that the result depends on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.progress import Reporter, Silent
from compress.base.version import VERSION
from compress.checkpoint.files import fingerprint
from compress.checkpoint.portable_names import shown as said_name
from compress.checkpoint.read.pretrained import tokenizer_of
from compress.checkpoint.sensitivity import (
    FORMAT,
    Sensitivity,
    Unit,
    folder,
    header_bytes,
    keep_sensitivity,
    kept_sensitivity,
)
from compress.checkpoint.write.coverage import achieved, remark
from compress.checkpoint.write.record import RunRecord
from compress.checkpoint.write.writer import InMemory
from compress.data.text import load_tokens
from compress.data.tokens import Tokens
from compress.engine.plan.batches import ChainBrokenError, check_batches
from compress.engine.plan.candidate_layers import treatable
from compress.engine.plan.plan import Plan
from compress.engine.walk.stacks import chained_stacks
from compress.engine.walk.state import Run
from compress.jobs.calibration_data import RunData, calibration_data
from compress.jobs.model_source import OpenedModel, found_model, opened_model, residency_of
from compress.jobs.prepare import remarks_on_stacks
from compress.jobs.quantize import quantize
from compress.jobs.request import Calibration, Request
from compress.model.buffers import stored_buffers
from compress.model.calls import evaluating
from compress.model.online_rotation import input_rotation
from compress.model.untreated_layers import untreated_weights
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import describe
from compress.search.candidate import Candidate, described
from compress.search.layer_costs import measured
from compress.search.texts import in_rows

HELD_OUT = 16  # windows
# Bytes of a weight file besides its tensors and their header entries: header length, metadata and padding.
HEADER = 64


@torch.inference_mode(False)
def measure_sensitivity(
    model: nn.Module | str | Path,
    candidates: Sequence[Candidate],
    *,
    calibration: Calibration,
    first: Sequence[Pass] = (),
    text: str | Tensor,
    samples: int | None = None,
    length: int | None = None,
    bos: str | None = None,
    batch_size: int = 8,
    ignore: Sequence[str] = (),
    device: str | torch.device | None = None,
    cached: bool = True,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Sensitivity:
    """Apply every candidate to every layer of the original model, and estimate the KL (nats per token) of a model with
    that layer alone replaced, by the error of its output and one backward pass (`search.fisher`). The KL of uniform
    models is measured.

    calibration, samples, length, bos, batch_size, ignore, device: as in `quantize`. first: passes like `rotate` that
    edit the whole model before; a model that is given in memory is changed. text: held-out text, or token ids
    [samples, length], of which up to 16 windows are used. cached: reuse an earlier result of equal inputs.

    Raises InputError for candidates that suit no layer, and for a model that predicts no next token.
    """
    request = Request(
        model=model,
        calibration=calibration,
        samples=samples,
        length=length,
        bos=bos,
        batch_size=batch_size,
        ignore=ignore,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    request.check()
    study = _study(request, first, text, reporter or Silent())
    candidates, words = _fitted(candidates, study.run.plan)
    identity = {
        "model": study.opened.fingerprint(),
        "calibration": study.shown.fingerprint(),
        "held_out": study.rows.fingerprint(),
        "settings": [FORMAT, batch_size, list(ignore), str(study.opened.dtype), VERSION],
        "passes": [study.edits, words],
    }
    path = folder() / f"{fingerprint(identity)}.json"
    if cached and (found := kept_sensitivity(path)) is not None:
        study.run.reporter.note(f"sensitivities as measured before ({path})")
        return found
    found = _measured(study, candidates, words)
    keep_sensitivity(path, found)
    return found


@dataclass(frozen=True)
class Study:
    """A model to measure and its data. first: passes that have edited it. shown: calibration data. rows: held out."""

    opened: OpenedModel
    first: Sequence[Pass]
    shown: RunData
    rows: Tokens
    run: Run
    ignore: Sequence[str]
    batch_size: int

    @property
    def model(self) -> nn.Module:
        return self.opened.model

    @property
    def edits(self) -> list[Any]:
        """The passes that have edited the model, as recipes hold them."""
        passes: list[Any] = describe(self.first)["passes"]
        return passes

    @property
    def fingerprint(self) -> str:
        """The model's; another one where it was edited."""
        given = self.opened.fingerprint()
        return fingerprint({"model": given, "first": self.edits}) if self.first else given

    @property
    def name(self) -> str:
        """The model's, as a person calls it."""
        source = self.opened.source
        return type(self.model).__name__ if source is None else said_name(source.name)

    def chained(self) -> Run:
        """The run; through the model as one block, where blocks hand on more than the hidden state."""
        if self.run.plan.stacks[0].container is None:
            return self.run
        try:
            chained_stacks(self.run, alone=True)
            return self.run
        except ChainBrokenError as why:
            self.run.record.note(
                self.run.reporter, f"the blocks are not a simple chain ({why}); the model is treated as one block"
            )
        return replace(self.run, plan=treatable(self.model, self.ignore, one_block=True))


def _study(request: Request, first: Sequence[Pass], text: str | Tensor, reporter: Reporter) -> Study:
    """Open the model, read the calibration data and find the layers. Raises InputError."""
    comm = Comm()
    if comm.active:
        raise InputError("sensitivities are measured by one process; start it without torchrun")
    found, ignore = found_model(request.model, request.device, request.trust_remote_code), request.ignore
    whole = calibration_data(request, found, "measuring")
    opened = opened_model(found, None, comm)
    if first:
        made = quantize(opened.model, first, ignore=ignore, device=opened.device, restore=False)
        assert made.model is not None
        opened = replace(opened, model=made.model, notes=[*opened.notes, *made.record.notes])
    plan = treatable(opened.model, ignore)
    check_batches(opened.model, whole.batches)
    rows = _held_out(opened, text, request)
    record = RunRecord(notes=[*opened.notes, *whole.notes, *_remarks_on(opened.model, plan)])
    run = Run(
        model=opened.model,
        plan=plan,
        batches=whole.batches,
        residency=residency_of(opened, [*plan.stacks], fsdp=False, keep=True, stores={}),
        sink=InMemory(),
        comm=comm,
        record=record,
        reporter=reporter,
    )
    return Study(opened, first, whole, rows, run, ignore, request.batch_size)


def _remarks_on(model: nn.Module, plan: Plan) -> list[str]:
    """Remarks for the user about the layers of a plan."""
    names = [layer.name for layers in plan.layers.values() for layer in layers]
    reasons = {**untreated_weights(model, set(names), plan.convolutions), **plan.ignored}
    little = remark(achieved(model, names, (), reasons))
    return [*plan.notes, *remarks_on_stacks(model, plan, one_block=False), *([] if little is None else [little])]


def _measured(study: Study, candidates: Sequence[Candidate], words: dict[str, list[dict[str, Any]]]) -> Sensitivity:
    """Measure all candidates in one walk over the model. words: the candidates as recipes hold them. Raises InputError
    where a layer rotates its input and takes no candidate."""
    with evaluating(study.model):
        made = measured(study.chained(), candidates, study.rows.batches(study.batch_size))
    if not made.units:
        why = next(iter(made.left_out.values()), "there are none")
        raise InputError(f"no candidate suits any layer ({why}); give others")
    coded = {layer for unit in made.units for layer in unit.layers}
    turned = [name for name, module in study.model.named_modules() if input_rotation(module) is not None]
    if dense := [name for name in turned if name not in coded]:
        raise InputError(f"{dense[0]} would rotate its input as the model runs, and stays dense ({len(dense)} in all)")
    return Sensitivity(
        model={"name": study.name, "fingerprint": study.fingerprint},
        calibration=study.shown.described() or {},
        held_out=study.rows.described(),
        candidates=words,
        units=made.units,
        uniform_kl=made.uniform_kl,
        other_bytes=_other_bytes(study.model, made.units),
        left_out=made.left_out,
        notes=study.run.record.notes,
    )


def _fitted(candidates: Sequence[Candidate], plan: Plan) -> tuple[list[Candidate], dict[str, list[dict[str, Any]]]]:
    """(Candidates with options settled for all layers together, the same as recipes hold them). Raises InputError where
    none suits any layer."""
    layers = [layer for of_block in plan.layers.values() for layer in of_block]
    widths = {layer.shape[1] for layer in layers}
    found = [Candidate(c.name, tuple(p.fitted(widths) for p in c.passes)) for c in candidates]
    whys = [c.suits(layer.name, layer.shape) for c in found for layer in layers]
    if all(whys):
        why = next(iter(whys), "there are none")
        raise InputError(f"no candidate suits any layer ({why}); give others")
    return found, described(found)


def _held_out(opened: OpenedModel, text: str | Tensor, data: Request) -> Tokens:
    """Windows of held-out text. Raises InputError, also for a model that predicts no next token."""
    config = getattr(opened.model, "config", None)
    if not hasattr(opened.model, "generate") or getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{type(opened.model).__name__} predicts no next token, so that there is no KL to measure")
    tokenizer, bos = partial(tokenizer_of, opened.source), None if in_rows(text) else data.bos
    return load_tokens(text, tokenizer, config, what="held-out", length=data.length, samples=_most(text), bos=bos)


def _most(text: str | Tensor) -> int:
    return min(HELD_OUT, len(text)) if isinstance(text, Tensor) else HELD_OUT


def _other_bytes(model: nn.Module, units: Sequence[Unit]) -> int:
    """Bytes of the checkpoint's weight files without the tensors of its units."""
    inside = {f"{layer}.weight" for unit in units for layer in unit.layers}
    rest = {name: p for name, p in model.named_parameters() if name not in inside} | dict(stored_buffers(model))
    headers = sum(header_bytes(name, tensor.shape) for name, tensor in rest.items())
    return HEADER + headers + sum(t.numel() * t.element_size() for t in rest.values())
