"""Base of passes: frozen configuration, the layers that a pass is for, and the stages of its work.

`apply` turns a *site* into decisions: the layers that read one and the same tensor (q, k and v of an attention, say),
which share their statistics. How to add a pass: CONTRIBUTING.md.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

from compress.model.patterns import compiled, matches
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Decide, Restructure, Stage
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.weights.decision import Decision
from compress.weights.grid import Grid
from compress.weights.kv_cache_codes import CacheScheme
from compress.weights.scheme import Scheme

P = TypeVar("P", bound="Pass")
S = TypeVar("S", bound=Stage)
# A weight with a mask is dense, and some of it is zero for good.
Aspect = Literal["dense weight", "mask", "quantized weight"]
# What a pass is about: the layers inside the blocks, the token embedding and the output head, or key-value caches.
Treats = Literal["layers", "embeddings", "caches"]


@dataclass(frozen=True)
class Filter:
    """Patterns (`model.patterns`), of which a layer's full name has to match one (`only`) or none (`but`)."""

    kind: Literal["only", "but"]
    patterns: tuple[str, ...]

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            compiled(pattern)

    def lets_through(self, layer: str) -> bool:
        return any(matches(layer, pattern) for pattern in self.patterns) == (self.kind == "only")

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(self.patterns)}"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Base of every pass. Subclasses are frozen dataclasses, whose fields but `where` are the pass's options.

    where: filters that a layer has to get through, all of them (`compress.only`, `compress.but`).
    """

    name: ClassVar[str]
    treats: ClassVar[Treats] = "layers"
    reads: ClassVar[Aspect] = "dense weight"
    writes: ClassVar[Aspect] = "dense weight"
    # Whether weights that an earlier pass has pruned (`Site.kept`) stay exactly zero.
    keeps_zeros: ClassVar[bool] = False
    # Whether a layer can be decided about in parts, each some of its rows: the groups of a convolution.
    by_rows: ClassVar[bool] = True

    where: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        """Refuse options that are out of range or do not go together: each group of options its own, after `super`."""

    def wants(self, layer: str) -> bool:
        """True if this pass treats the layer of this (full) name."""
        return all(each.lets_through(layer) for each in self.where)

    def needs(self) -> Mapping[str, StatisticFactory]:
        """The statistics of a layer's input that `apply` works with, by name. None: no calibration data is needed."""
        return {}

    def apply(self, site: Site) -> dict[str, Decision]:
        """Decide for every layer of the site. The same decisions on every rank."""
        raise NotImplementedError

    @property
    def decide_stage(self) -> Decide:
        """The stage in which the pass decides about layers."""
        return Decide(self.needs(), self.apply)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the pass, in order; `decide_stage` alone unless a subclass says more."""
        return (self.decide_stage,)

    def stage(self, kind: type[S]) -> S | None:
        """The stage of a kind, if the pass has one."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    @property
    def calibrated(self) -> bool:
        """True if the pass needs calibration data."""
        return any(stage.calibrated for stage in self.stages)

    @property
    def removes(self) -> bool:
        """True if the model has fewer parameters afterwards."""
        stage = self.stage(Restructure)
        return stage is not None and stage.removes

    @property
    def rounds_inputs(self) -> bool:
        """True if decisions say how a layer's input is rounded, too."""
        decide = self.stage(Decide)
        return decide is not None and decide.rounds_inputs

    @property
    def asks_curvature(self) -> bool:
        """True if decisions go by the curvature of the loss, which takes a backward pass beforehand."""
        decide = self.stage(Decide)
        return decide is not None and decide.curvature

    @property
    def halves(self) -> bool:
        """True if layers are stored without the zeros that the pass makes (2:4)."""
        return False

    @property
    def scattered(self) -> bool:
        """True if zeros that the pass makes may lie anywhere, bound by no pattern."""
        return False

    @property
    def shares_scale(self) -> bool:
        """True if a layer has one scale as a whole, so that its parts cannot have their own."""
        return False

    @property
    def code_grid(self) -> Grid | None:
        """The grid of codes that the pass rounds weights to; None where its options describe none."""
        return None

    @property
    def cache_scheme(self) -> CacheScheme | None:
        """The scheme of key-value caches; None for a pass that is not about them."""
        return None

    @property
    def treats_heads(self) -> bool:
        """True if a pass about embeddings rounds an output head with a weight of its own, too."""
        return True

    @property
    def wording(self) -> tuple[str, str]:
        """(scheme, grid) as the record of a run has them; empty where the options have no such words."""
        return "", ""

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        """The scheme in which a checkpoint will hold a layer [N, K] that this pass has rounded; None for a pass that
        leaves plain numbers. Where only the work can tell how large a term is, it is what the options ask for."""
        return None

    def without_reference(self) -> "Pass":
        """This pass for inputs of the original model, with nothing to make up for in them."""
        return self

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Refuse, before any work, layers ({name: (N, K)}) that this configuration cannot treat."""

    def placed(self, layers: Sequence[str]) -> "Pass":
        """This pass for a model whose layers have these names, with options that depend on their places filled in."""
        return self

    @property
    def usual_size(self) -> int | None:
        """The group size that this pass prefers, where its options leave that open; None where they do not."""
        return None

    def sized(self, widths: Collection[int], example: str) -> "tuple[Pass, str | None]":
        """(This pass for layers of so many inputs together, a note for the person), where the usual group size suits
        not all of them. example: a layer that it does not suit, in words."""
        return self.fitted(widths), None

    def regrouped(self, size: int) -> "Pass | None":
        """This pass with groups of another size; None where it has no groups."""
        return None

    def fitted(self, widths: Collection[int]) -> "Pass":
        """This pass for layers of so many inputs, with open options filled in."""
        return self


def only(inner: P, *patterns: str) -> P:
    """The pass on the layers that match: `only(GPTQ(scheme="w3a16"), "*.mlp.*")`."""
    return replace(inner, where=(*inner.where, Filter("only", patterns)))


def but(inner: P, *patterns: str) -> P:
    """The pass on the layers that do not match: `but(RTN(), "*.down_proj")`, or `but(RTN(), "re:.*down_proj")`."""
    return replace(inner, where=(*inner.where, Filter("but", patterns)))
