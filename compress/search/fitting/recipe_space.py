"""The recipes that `fit` chooses among: schemes of layers and of the embedding, and a rotation of the whole model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.base.errors import InputError, one_of
from compress.engine.plan.matching import tied_head
from compress.jobs.engines import check_engine, engine_named, pick_options
from compress.jobs.forecast.forecast import plan, shapes_of
from compress.jobs.model_source import found_model
from compress.kernels.layouts.k_quants import K_QUANTS
from compress.model.experts import Experts
from compress.model.layers import layers_of
from compress.model.patterns import ignoring, matches
from compress.passes.embeddings import Embeddings
from compress.passes.gptq import GPTQ
from compress.passes.k_quants import KQuants
from compress.passes.protocol.recipe import options_of
from compress.passes.trellis import TRELLIS_SCHEMES, Trellis
from compress.passes.whole_model.rotate import Rotation
from compress.search.candidate import Candidate
from compress.search.fitting.embedding_schemes import possible_tables

BITS = (2, 3, 4, 5, 6, 8)
METHODS = ("gptq", "k-quants")


@dataclass(frozen=True)
class Wishes:
    """The wanted method of layers, and other parts of recipes. For an engine, and for K-quants, which are llama.cpp's
    types, there are none of these."""

    method: str = "gptq"
    embeddings: bool = True
    trellis: bool = True
    rotate: bool = True


@dataclass(frozen=True)
class Offered:
    """schemes: candidates as they are run, of the fewest bits first. tables: (scheme of the embedding, bytes of tensors
    that it saves). rotation: the first pass, or none. notes: what is left out or decided, and why."""

    schemes: Sequence[Candidate]
    tables: Sequence[tuple[Embeddings, int]] = ()
    rotation: tuple[Rotation, ...] = ()
    notes: Sequence[str] = ()

    def without_trellises(self, why: str) -> "Offered":
        """The same without trellis codes."""
        left = [c for c in self.schemes if not any(isinstance(p, Trellis) for p in c.passes)]
        if len(left) == len(self.schemes):
            return self
        return replace(self, schemes=left, notes=[*self.notes, f"trellis codes are left out: {why}"])

    def without_rotation(self, why: str) -> "Offered":
        """The same without a rotation."""
        if not self.rotation:
            return self
        return replace(self, rotation=(), notes=[*self.notes, f"the model is not rotated: {why}"])


def offered(model: str, ignore: Sequence[str], engine: str | None, wishes: Wishes, trusted: bool) -> Offered:
    """The parts of recipes that there are for a model. trusted: code of its repository may run. Raises InputError for
    an unknown method, and for an engine that opens another form."""
    if one_of("method", wishes.method, METHODS) == "k-quants":
        if engine is not None:
            raise InputError(f"--for {engine} has schemes of its own; leave out either it or --method k-quants")
        return Offered([Candidate(type_, (KQuants(scheme=type_),)) for type_ in K_QUANTS])
    schemes = _schemes(engine)
    if engine is not None:
        _check_experts(model, ignore, engine, trusted)
        return Offered(schemes)
    made = Offered(schemes, possible_tables(model, trusted) if wishes.embeddings else ())
    if wishes.trellis:
        codes = [Candidate(f"{s.removesuffix('a16')}-trellis", (Trellis(scheme=s),)) for s in TRELLIS_SCHEMES]
        more = replace(made, schemes=[*codes, *schemes])
        why = _why_not(model, ignore, codes[0].passes, trusted)
        made = more if why is None else more.without_trellises(why)
    if wishes.rotate:
        # A head that is tied to the embedding would get a weight of its own.
        empty, _ = shapes_of(found_model(model, None, trusted))
        rotation = Rotation(hidden=tied_head(empty) is None, online=True)
        more = replace(made, rotation=(rotation,))
        why = _why_not(model, ignore, (rotation, *schemes[0].passes), trusted)
        made = more if why is None else more.without_rotation(why)
    return made


def _check_experts(model: str, ignore: Sequence[str], engine: str, trusted: bool) -> None:
    """Raises InputError for experts, which would get several schemes, where an engine takes one for all. Those that are
    ignored get none."""
    empty, _ = shapes_of(found_model(model, None, trusted))
    mixtures = [(name, module) for name, module in empty.named_modules() if isinstance(module, Experts)]
    experts = [layer.name for name, module in mixtures for layer in layers_of(module, name)]
    if not all(any(matches(layer, pattern) for pattern in ignore) for layer in experts):
        raise InputError(
            f"fit chooses a scheme for each expert, and {engine} takes one for all experts of a block; quantize with "
            f"one (compress quantize --for {engine}), leave --for out, or {ignoring(experts, experts)}"
        )


def _schemes(engine: str | None) -> list[Candidate]:
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
        options, _ = pick_options(engine, "gptq", {"scheme": schemes[0]}, [*options_of(GPTQ)])
        del options["scheme"]
    full = [Candidate(s.removesuffix("a16"), (GPTQ(scheme=s, **options),)) for s in schemes]
    if engine is not None:
        check_engine(engine, [p for each in full for p in each.passes])
    return full


def _why_not(model: str, ignore: Sequence[str], passes: Sequence[Any], trusted: bool) -> str | None:
    """The reason why passes do not suit a model, as trellis codes where a layer's inputs do not fill their words."""
    try:
        plan(model, passes, ignore=ignore, trust_remote_code=trusted)
    except InputError as error:
        return str(error)
    return None
