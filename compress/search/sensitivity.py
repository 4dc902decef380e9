"""A study of a model: the loss of each of its layers under each candidate, cached.

The cache directory is $COMPRESS_CACHE_DIR/sensitivity. The key is a hash of the model, both texts, the candidates and
everything else that the result depends on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.progress import Reporter, Silent
from compress.base.version import VERSION
from compress.checkpoint.files import fingerprint
from compress.checkpoint.portable_names import portable
from compress.checkpoint.sensitivity import (
    FORMAT,
    Sensitivity,
    Unit,
    cache_sensitivity,
    cached_sensitivity,
    folder,
    header_bytes,
)
from compress.checkpoint.write.coverage import remark, run_coverage
from compress.checkpoint.write.record import RunRecord
from compress.checkpoint.write.writer import InMemory
from compress.data.text import load_tokens
from compress.data.tokens import Tokens
from compress.engine.plan.batches import check_batches
from compress.engine.plan.candidate_layers import treatable
from compress.engine.plan.plan import Plan
from compress.engine.walk.stacks import chain
from compress.engine.walk.state import Run
from compress.jobs.calibration_data import RunData
from compress.jobs.model_source import FoundModel, OpenedModel, open_model, residency_of
from compress.jobs.prepare import remarks_on_stacks
from compress.jobs.quantize import quantize
from compress.model.calls import evaluating
from compress.model.online_rotation import input_rotation
from compress.model.tensors import stored_buffers
from compress.model.untreated_layers import untreated_weights
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import describe
from compress.search.candidate import Candidate
from compress.search.layer_costs import LayerCosts, measure_layers

HELD_OUT = 16  # windows
# Bytes of a weight file besides its tensors and their header entries: header length, metadata and padding.
HEADER = 64


@dataclass(frozen=True)
class Study:
    """A model to measure, opened, and its data. data: for calibration. rows: held out. first: passes that have edited
    the model."""

    opened: OpenedModel
    data: RunData
    rows: Tokens
    ignore: Sequence[str]
    batch_size: int
    reporter: Reporter
    first: Sequence[Pass] = ()

    @property
    def model(self) -> nn.Module:
        return self.opened.model

    def edited(self, first: Sequence[Pass]) -> "Study":
        """The study of the model after passes like `rotate`, which edit it in place. Raises InputError, with the model
        as it was, where they cannot."""
        made = quantize(self.model, first, ignore=self.ignore, device=self.opened.device)
        return replace(self, opened=replace(self.opened, notes=[*self.opened.notes, *made.record.notes]), first=first)

    @torch.inference_mode(False)
    def measure(self, candidates: Sequence[Candidate]) -> Sensitivity:
        """Apply every candidate to every layer, and estimate the KL (nats per token) of a model with that layer alone
        replaced, by the error of its output and one backward pass (`search.fisher`). The KL of uniform models is
        measured. An earlier result of equal inputs is taken from the cache.

        Raises InputError for candidates that suit no layer.
        """
        comm = Comm()
        if comm.active:
            raise InputError("sensitivities are measured by one process; start it without torchrun")
        plan = treatable(self.model, self.ignore)
        check_batches(self.model, self.data.batches)
        candidates, words = _fitted(candidates, plan)
        edits = describe(self.first)["passes"] if self.first else []
        identity = {
            "model": self.opened.fingerprint(),
            "calibration": self.data.fingerprint(),
            "held_out": self.rows.fingerprint(),
            "settings": [FORMAT, self.batch_size, list(self.ignore), str(self.opened.dtype), VERSION],
            "passes": [edits, words],
        }
        path = folder() / f"{fingerprint(identity)}.json"
        if (sensitivity := cached_sensitivity(path)) is not None:
            self.reporter.note(f"sensitivities as measured before ({path})")
            return sensitivity
        run = self._run(plan, comm)
        one_block = partial(treatable, self.model, self.ignore, one_block=True)
        run = chain(run, True, one_block, partial(run.record.note, run.reporter))
        with evaluating(self.model):
            costs = measure_layers(run, candidates, self.rows.batches(self.batch_size))
        _check_treated(self.model, costs)
        edited = self.opened.fingerprint()
        sensitivity = Sensitivity(
            model={
                "name": self._name(),
                "fingerprint": fingerprint({"model": edited, "first": edits}) if self.first else edited,
            },
            calibration=self.data.described() or {},
            held_out=self.rows.described(),
            candidates=words,
            units=costs.units,
            uniform_kl=costs.uniform_kl,
            other_bytes=_other_bytes(self.model, costs.units),
            left_out=costs.left_out,
            notes=run.record.notes,
        )
        cache_sensitivity(path, sensitivity)
        return sensitivity

    def _name(self) -> str:
        """The model's, as a person calls it."""
        source = self.opened.source
        return type(self.model).__name__ if source is None else portable(source.name)

    def _run(self, plan: Plan, comm: Comm) -> Run:
        opened, model = self.opened, self.model
        return Run(
            model=model,
            plan=plan,
            batches=self.data.batches,
            residency=residency_of(opened, [*plan.stacks], fsdp=False, keep=True, stores={}),
            sink=InMemory(),
            comm=comm,
            record=RunRecord(notes=[*opened.notes, *self.data.notes, *_remarks_on(model, plan)]),
            reporter=self.reporter,
        )


def open_study(
    found: FoundModel,
    data: RunData,
    rows: Tensor,
    *,
    ignore: Sequence[str] = (),
    batch_size: int = 8,
    reporter: Reporter | None = None,
) -> Study:
    """Open a model to measure it. data: for calibration. rows: held-out token ids [samples, length], of which up to
    16 are used. Raises InputError for a model that predicts no next token."""
    opened = open_model(found, None, Comm())
    model, config = opened.model, getattr(opened.model, "config", None)
    if not hasattr(model, "generate") or getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{type(model).__name__} predicts no next token, so that there is no KL to measure")
    tokens = load_tokens(rows, None, config, what="held-out", samples=min(HELD_OUT, len(rows)))
    return Study(opened, data, tokens, ignore, batch_size, reporter or Silent())


def _remarks_on(model: nn.Module, plan: Plan) -> list[str]:
    """Remarks for the user about the layers of a plan."""
    names = [layer.name for layers in plan.layers.values() for layer in layers]
    reasons = {**untreated_weights(model, set(names), plan.convolutions), **plan.ignored}
    little = remark(run_coverage(model, names, (), reasons))
    return [*plan.notes, *remarks_on_stacks(model, plan, one_block=False), *([] if little is None else [little])]


def _check_treated(model: nn.Module, costs: LayerCosts) -> None:
    """Raises InputError where no candidate suits any layer, and where a layer rotates its input and takes none."""
    if not costs.units:
        why = next(iter(costs.left_out.values()), "there are none")
        raise InputError(f"no candidate suits any layer ({why}); give others")
    coded = {layer for unit in costs.units for layer in unit.layers}
    turned = [name for name, module in model.named_modules() if input_rotation(module) is not None]
    if dense := [name for name in turned if name not in coded]:
        raise InputError(f"{dense[0]} would rotate its input as the model runs, and stays dense ({len(dense)} in all)")


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
    return found, {each.name: describe(each.passes)["passes"] for each in found}


def _other_bytes(model: nn.Module, units: Sequence[Unit]) -> int:
    """Bytes of the checkpoint's weight files without the tensors of its units."""
    inside = {f"{layer}.weight" for unit in units for layer in unit.layers}
    rest = {name: p for name, p in model.named_parameters() if name not in inside} | dict(stored_buffers(model))
    headers = sum(header_bytes(name, tensor.shape) for name, tensor in rest.items())
    return HEADER + headers + sum(t.numel() * t.element_size() for t in rest.values())
