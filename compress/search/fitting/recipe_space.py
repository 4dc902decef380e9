"""The recipes that `fit` chooses among: schemes of layers and of the embedding, and a rotation of the whole model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from compress.base.errors import InputError, one_of
from compress.checkpoint.sensitivity import header_bytes
from compress.engine.plan.treatable_layers import tied_head
from compress.jobs.forecast.forecast import shapes_of
from compress.jobs.target_engines import check_engine, engine_named, pick_options
from compress.kernels.layouts.k_quants import K_QUANTS
from compress.model.experts import Experts
from compress.model.layers import layers_of
from compress.model.patterns import ignoring, matches
from compress.passes.embeddings import Embeddings
from compress.passes.gptq import GPTQ
from compress.passes.k_quants import KQuants
from compress.passes.options.loss_aware import Objective
from compress.passes.protocol.recipe import options_of
from compress.passes.trellis import TRELLIS_SCHEMES, Trellis
from compress.passes.whole_model.rotate import Rotation
from compress.search.candidate import Candidate
from compress.search.fitting.request import FitRequest

BITS = (2, 3, 4, 5, 6, 8)
METHODS = ("gptq", "k-quants")
EFFORTS: Mapping[str, Objective] = {"default": "layer", "best": "loss"}
WIDTHS = (8, 6, 4)  # of the embedding
PARTS = 4  # tensors of a table's codes, at most, whose header entries take a place of their own
# A name longer than those of tables of embeddings, for an upper bound of their header entries.
LONG = "model.decoder.embed_tokens.weight_packed.and.more"


@dataclass(frozen=True)
class Wishes:
    """The wanted method of layers, and other parts of recipes. For an engine, and for K-quants, which are llama.cpp's
    types, there are none of the parts. effort: as of `compress quantize`."""

    engine: str | None = None
    method: str = "gptq"
    effort: str = "default"
    embeddings: bool = True
    trellis: bool = True
    rotate: bool = True


@dataclass(frozen=True)
class RecipeSpace:
    """schemes: candidates as they are run, of the fewest bits first. tables: (scheme of the embedding, bytes of tensors
    that it saves). rotation: the first pass, or none. notes: what is left out or decided, and why."""

    schemes: Sequence[Candidate]
    tables: Sequence[tuple[Embeddings, int]] = ()
    rotation: tuple[Rotation, ...] = ()
    notes: Sequence[str] = ()

    def without_trellises(self, why: str) -> "RecipeSpace":
        """The same without trellis codes."""
        left = [c for c in self.schemes if not any(isinstance(p, Trellis) for p in c.passes)]
        if len(left) == len(self.schemes):
            return self
        return replace(self, schemes=left, notes=[*self.notes, f"trellis codes are left out: {why}"])

    def without_rotation(self, why: str) -> "RecipeSpace":
        """The same without a rotation."""
        if not self.rotation:
            return self
        return replace(self, rotation=(), notes=[*self.notes, f"the model is not rotated: {why}"])


def recipe_space(request: FitRequest, wishes: Wishes) -> RecipeSpace:
    """The parts of recipes that there are for a model. Raises InputError for an unknown method, and for an
    engine that opens another form."""
    engine, objective = wishes.engine, EFFORTS[one_of("effort", wishes.effort, EFFORTS)]
    if one_of("method", wishes.method, METHODS) == "k-quants":
        if engine is not None:
            raise InputError(f"--for {engine} has schemes of its own; leave out either it or --method k-quants")
        types = sorted(K_QUANTS, key=lambda type_: K_QUANTS[type_].size)
        return RecipeSpace([Candidate(type_, (KQuants(scheme=type_, objective=objective),)) for type_ in types])
    schemes = _schemes(engine, objective)
    if engine is None and not (wishes.embeddings or wishes.trellis or wishes.rotate):
        return RecipeSpace(schemes)
    empty, _ = shapes_of(request.found)
    if engine is not None:
        _check_experts(empty, request.asked.ignore, engine)
        return RecipeSpace(schemes)
    # A head that is tied to the embedding would get a weight of its own.
    rotation = (Rotation(hidden=tied_head(empty) is None, online=True),) if wishes.rotate else ()
    space = RecipeSpace(schemes, _tables(request) if wishes.embeddings else (), rotation)
    if not wishes.trellis:
        return space
    codes = [(f"{s.removesuffix('a16')}-trellis", Trellis(scheme=s, objective=objective)) for s in TRELLIS_SCHEMES]
    return replace(space, schemes=[*(Candidate(name, (p,)) for name, p in codes), *schemes])


def check_reach(request: FitRequest, space: RecipeSpace) -> None:
    """Raises InputError for a size or bits below those of the smallest recipe."""
    budget = request.target.budget
    if budget is None:
        return
    tables = [] if budget.bytes is None else space.tables
    least = request.plan([*space.schemes[0].passes, *(table for table, _ in tables[-1:])])
    if budget.bytes is not None and least.saving.after > budget.bytes:
        raise InputError(f"size {budget}; the smallest recipe takes {least.saving.after:,} bytes: give that or more")
    if budget.bits_per_weight is not None and (least.bits_per_weight or 0.0) > budget.bits_per_weight:
        raise InputError(
            f"bits {budget.bits_per_weight:g}; the smallest recipe has {least.bits_per_weight:.4g}: give that or more"
        )


def _tables(request: FitRequest) -> list[tuple[Embeddings, int]]:
    """(A scheme of the embedding, bytes of tensors that it saves), of those that save any; from headers alone."""
    headers = PARTS * header_bytes(LONG, (10**6, 10**6))
    schemes = [Embeddings(scheme=f"w{bits}a16") for bits in WIDTHS]
    try:
        savings = [request.plan(scheme).saving for scheme in schemes]
    except InputError:  # no table that codes could stand for
        return []
    saved = [saving.before - saving.after - headers for saving in savings]
    return [(scheme, size) for scheme, size in zip(schemes, saved, strict=True) if size > 0]


def _check_experts(empty: nn.Module, ignore: Sequence[str], engine: str) -> None:
    """Raises InputError for experts, which would get several schemes, where an engine takes one for all. Those that are
    ignored get none."""
    mixtures = [(name, module) for name, module in empty.named_modules() if isinstance(module, Experts)]
    experts = [layer.name for name, module in mixtures for layer in layers_of(module, name)]
    if not all(any(matches(layer, pattern) for pattern in ignore) for layer in experts):
        raise InputError(
            f"fit chooses a scheme for each expert, and {engine} takes one for all experts of a block; quantize with "
            f"one (compress quantize --for {engine}), leave --for out, or {ignoring(experts, experts)}"
        )


def _schemes(engine: str | None, objective: Objective) -> list[Candidate]:
    """Grids of 2 to 8 bits, or those of them that an engine runs."""
    schemes = [f"w{bits}a16" for bits in BITS]
    options: dict[str, Any] = {}
    if engine is not None:
        if engine_named(engine).to is not None:
            raise InputError(
                f"--for {engine} opens another form than the checkpoint whose size is fitted; allowed: vllm, "
                f"transformers (for {engine}: compress quantize --for {engine}; K-quants: --method k-quants)"
            )
        schemes = [scheme for scheme in schemes if scheme in engine_named(engine).schemes]
        options = pick_options(engine, "gptq", {"scheme": schemes[0]}, [*options_of(GPTQ)]).options
        del options["scheme"]
    full = [Candidate(s.removesuffix("a16"), (GPTQ(scheme=s, objective=objective, **options),)) for s in schemes]
    if engine is not None:
        check_engine(engine, [p for each in full for p in each.passes])
    return full
