"""Measurements of `fit` before recipes are run: of a rotation by one scheme, of every layer under every scheme, and of
the token embedding under each of its schemes. The model is opened once for all of them."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress.base.errors import InputError
from compress.base.progress import Reporter, tell
from compress.checkpoint.sensitivity import Sensitivity
from compress.data.text import batches_of
from compress.engine.restore import hooks_and_buffers, values
from compress.engine.walk.held_out_kl import divergence_between
from compress.jobs.quantize import quantize
from compress.model.calls import evaluating
from compress.passes.embeddings import Embeddings
from compress.passes.whole_model.rotate import Rotation
from compress.search.candidate import Candidate
from compress.search.fitting.choose import AS_IT_IS, TableOption, as_run, with_sizes
from compress.search.fitting.recipe_space import RecipeSpace
from compress.search.fitting.request import FitRequest
from compress.search.sensitivity import Study, open_study

PROBE = "w3"  # the scheme by which a rotation is judged: trellis codes, where there are such
ENOUGH = 0.8  # of the KL without a rotation
# {method: options with which layers are measured}. Trellis codes of 2^10 states take a quarter of the time of those of
# 2^12 that are run. Of normal numbers they have 5, 8 and 12 % more error for 2, 3 and 4 bits (tests/kernels/layouts).
SWEEP_ALONE = {"refit": 0, "sweeps": 0, "objective": "layer"}
FAST = {"gptq": SWEEP_ALONE, "k-quants": SWEEP_ALONE, "trellis": {**SWEEP_ALONE, "state_bits": 10}}


@dataclass(frozen=True)
class Measured:
    """The basis of every choice. layers: losses of every layer under every scheme, which are the schemes of recipes as
    they are run. tables: schemes of the embedding, as it is first. rotation: the first pass of every recipe, or none.
    notes: on the rotation."""

    layers: Sensitivity
    tables: Sequence[TableOption]
    rotation: tuple[Rotation, ...]
    notes: Sequence[str]


def as_measured(schemes: Sequence[Candidate]) -> list[Candidate]:
    """Candidates as layers are measured with them."""
    return [Candidate(c.name, tuple(replace(p, **dict[str, Any](FAST[p.name])) for p in c.passes)) for c in schemes]


def measure(request: FitRequest, space: RecipeSpace, reporter: Reporter) -> Measured:
    """Measure every layer under every scheme, of the model as it is best rotated or not, and the embedding."""
    tell(reporter, "phase", "measure", "unknown")
    data, how = request.data, dict[str, Any](ignore=request.asked.ignore, batch_size=request.asked.batch_size)
    study = open_study(request.found, data.read, data.rows, reporter=reporter, **how)
    tables = table_options(study.model, data.rows, space.tables, reporter)
    study, notes = with_or_without_rotation(study, space)
    layers = study.measure(as_measured(space.schemes))
    layers = replace(layers, candidates=as_run(layers.candidates, space.schemes, FAST))
    for c in space.schemes:
        if any("state_bits" in FAST[p.name] for p in c.passes):  # what is measured is smaller than what is run
            sizes = {layer.name: layer.bytes for layer in request.plan(c.passes).layers}
            layers = with_sizes(layers, c.name, sizes)
    return Measured(layers, tables, space.rotation if study.first else (), notes)


def with_or_without_rotation(study: Study, space: RecipeSpace) -> tuple[Study, list[str]]:
    """The study of the rotated model, where the model takes a rotation that lowers the KL of 3 bits by a fifth, as it
    costs time whenever the model runs; else the same study. With notes on what was measured."""
    if not space.rotation:
        return study, []
    probe = next(c for c in as_measured(space.schemes) if c.name.startswith(PROBE))
    try:
        with as_before(study.model):
            rotated = study.edited(space.rotation).measure([probe])
    except InputError as error:
        return study, [f"the model is not rotated: {error}"]
    plain = study.measure([probe])
    kl, without = (each.uniform_kl[probe.name] for each in (rotated, plain))
    told = f"{probe.name} has KL {kl:.3g} with a rotation and {without:.3g} without"
    if not kl <= ENOUGH * without:
        return study, [f"the model is not rotated: {told}"]
    notes = [f"the model is rotated: {told}", *(note for note in rotated.notes if note.startswith("rotate:"))]
    return study.edited(space.rotation), notes


class _Altered(nn.Module):
    """A model with other values of some parameters, by their names."""

    def __init__(self, model: nn.Module, others: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model, self.others = model, dict(others)

    def forward(self, **inputs: Any) -> Any:
        return functional_call(self.model, self.others, kwargs=inputs)


def table_options(
    model: nn.Module, rows: Tensor, possible: Sequence[tuple[Embeddings, int]], reporter: Reporter
) -> list[TableOption]:
    """All schemes of the embedding with their KL on held-out rows, the embedding as it is first."""
    options = [AS_IT_IS]
    if possible:
        original = copy.deepcopy(model).float() if any(p.dtype != torch.float32 for p in model.parameters()) else model
    for scheme, saved in possible:
        reporter.note(f"measuring the embedding in {scheme.scheme}")
        altered = _Altered(original, {name: t.float() for name, t in _changed_by(model, scheme).items()})
        with evaluating(original):
            kl = divergence_between(original, altered, batches_of(rows, 1))
        options.append(TableOption(scheme.scheme, (scheme,), saved, kl))
    return options


def _changed_by(model: nn.Module, scheme: Embeddings) -> dict[str, Tensor]:
    """The parameters that a scheme changes, as it leaves them; the model stays as it is."""
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with as_before(model):
        quantize(model, scheme, dtype=torch.float32)
        return {name: p.data for name, p in model.named_parameters() if p.data_ptr() != before[name]}


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Puts values and hooks of the model back behind the body."""
    undo = (values(model), hooks_and_buffers(model))
    try:
        yield
    finally:
        for each in undo:
            each()
