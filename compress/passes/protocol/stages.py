"""Stages of a pass: values, each of which says what it needs to know and what it does with that.

    Restructure  edits of the whole model, before anything else is planned: parts that go, rotations of the hidden state
    Survey    what has to be known about all layers before the first of them is decided: how a budget is shared out
    Gradients how the loss of the model changes with each weight, before the first layer is decided
    Reorder   in which order the channels between layers come, where that is free: groups of N:M that keep more
    Learn     training of the whole model as the passes before have left it
    Rewrite   edits of a block before anything in it is rounded: scales (SmoothQuant, AWQ), rotations, permutations
    Decide    what becomes of the layers of a site                   every method that rounds or prunes
    Reconstruction  training of a block, towards what the original block returns
    Fix       how what a layer returns, or a cache keeps, is rounded: ranges that are found once the layer is decided

A pass is a tuple of them (`Pass.stages`). The loop asks for no more: what is new is a stage, not another question.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from compress.base.collectives import RowShard
from compress.model.known_edits import Edit
from compress.passes.protocol.model_view import Foreseen, Whole
from compress.passes.protocol.sites import Between, FoldSite, Rewritten, Scaling, Site
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.train.options import TrainingOptions
from compress.train.rounding.sparsity_options import SparsityOptions
from compress.weights.decision import Decision

Needs = Mapping[str, StatisticFactory]


@dataclass(frozen=True)
class Stage:
    """A stage's answers about itself. beyond_block: it looks at the whole model, or trains it. of_calls: it treats
    layers whose product is a module's call. runs_block: it needs the block's inputs, whatever statistics it takes."""

    beyond_block: ClassVar[bool] = False
    of_calls: ClassVar[bool] = False
    runs_block: ClassVar[bool] = False

    @property
    def calibrated(self) -> bool:
        """True if calibration data is needed."""
        return self.runs_block or bool(getattr(self, "needs", ()))

    @property
    def compares(self) -> bool:
        """True if hidden states of the original model are needed."""
        return False


@dataclass(frozen=True)
class Restructure(Stage):
    """Edits of the whole model, the only stage of its pass.

    edits: (name of a module, "" for the model; an edit of it), in order, the same on every rank. They are first applied
    to a copy without values (on the meta device), for which the rest of the run is planned, then to the model. Where
    each depends on those before it: `Foreseen`. shares: whether as much goes of every block, which a recipe can ask for
    once. calibrated: whether calibration data is needed. removes: whether the model gets smaller; otherwise all shapes
    stay. unties: whether it may get larger by an output head that is tied no more. keeps_zeros: whether weights that an
    earlier command has pruned stay zero. otherwise: what to do about it where they do not.
    """

    edits: Callable[[Whole], Iterable[tuple[str, Edit]] | Foreseen]
    shares: bool = False
    calibrated: bool = False
    removes: bool = True
    unties: bool = False
    keeps_zeros: bool = False
    otherwise: str = "leave that pass out"


@dataclass(frozen=True)
class Finding:
    """Findings of a survey about a layer: its block, its shape (N, K), and the results of `look`, one for each of its
    groups. damage: 0 or more, how far the model's predictions move where this layer alone is as `changed` has it
    (`engine.walk.layer_damage`); 0 where nothing was changed."""

    block: str
    shape: tuple[int, int]
    parts: tuple[Any, ...]
    damage: float = 0.0


@dataclass(frozen=True)
class Settled:
    """The result of a survey: the configured pass, {layer: reason} for those that it skips, notes for the report."""

    made: Any
    alone: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Survey(Stage):
    """needs: statistics of layers' inputs, by name, in the uncompressed model; none where no calibration data is
    needed. look: what is found out about each layer of a site, the same on every rank; of a grouped convolution group
    by group. settle: what comes of that. changed: [N, K] what each layer of a site becomes by itself, the same on every
    rank, to measure the damage; none where that is not asked."""

    beyond_block = True

    needs: Needs
    look: Callable[[Site], Mapping[str, Any]]
    settle: Callable[[Mapping[str, Finding]], Settled]
    changed: Callable[[Site], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class Gradients(Stage):
    """score: [N, K] of a layer's weight and the gradient of the loss of one micro-batch by it, [N, K] both, summed in
    float64 over micro-batches and ranks. settle: what comes of the sums, of which each rank has its rows. A layer that
    no gradient reached is not among them, and left alone."""

    beyond_block = True
    needs: ClassVar[tuple[str, ...]] = ("gradient",)

    score: Callable[[Tensor, Tensor], Tensor]
    settle: Callable[[Mapping[str, RowShard]], Settled]


@dataclass(frozen=True)
class LossCurvature:
    """Weights of a layer's tokens and outputs in the KL to the original. of_tokens: for each of this rank's
    micro-batches, of mean 1 over the tokens of all ranks, [M]. of_outputs [N, S]: H_O in runs of outputs
    (`solvers.output_feedback`), of mean diagonal 1, the same on every rank."""

    of_tokens: Mapping[int, Tensor]
    of_outputs: Tensor


@dataclass(frozen=True)
class Learn(Stage):
    """options: how the whole model is trained, once all earlier passes have decided about all layers. sparsity: what
    becomes zero meanwhile."""

    beyond_block = True
    of_calls = True

    options: TrainingOptions
    sparsity: SparsityOptions


@dataclass(frozen=True)
class Reconstruction(Stage):
    """Training of a block once earlier passes have decided about its layers (`passes.reconstruct`). rate, in steps of a
    layer's grid (0: codes stay), and scale_rate: Adam's, at the beginning. rows: samples per step. checks: the number
    of evaluations on all calibration data, to keep the best."""

    of_calls = True
    runs_block = True

    steps: int
    rows: int
    rate: float
    scale_rate: float
    checks: int
    seed: int

    @property
    def compares(self) -> bool:
        return True


@dataclass(frozen=True)
class Rewrite(Stage):
    """needs: statistics of layers' inputs, by name. edits: made around a producer of a block, the same on every rank;
    they leave what the block computes and all shapes as they are (`Scale`, `Rotate`, `Permute`)."""

    runs_block = True

    needs: Needs
    edits: Callable[[Between], Rewritten]

    @classmethod
    def by_scales(cls, needs: Needs, scaling: Callable[[FoldSite], Scaling]) -> "Rewrite":
        """The stage of a pass that only scales. scaling: by how much to divide what the layers of a fold read."""
        return cls(needs, lambda between: scaling(between.site).of(between.fold))


@dataclass(frozen=True)
class Reorder(Stage):
    """needs: statistics of layers' inputs, by name. order: [U] which of the channels comes to each place, of scores
    [R, U] of all rows that read them. score: [N, K] of a layer of a site. group: so many inputs in a row belong
    together, and a place counts by its group alone. kept: what is kept of scores [R, U]."""

    runs_block = True

    needs: Needs
    score: Callable[[Site, str], Tensor]
    order: Callable[[Tensor], Tensor]
    kept: Callable[[Tensor], float]
    group: int


@dataclass(frozen=True)
class Decide(Stage):
    """needs: statistics of a layer's input, by name; none where no calibration data is needed. apply: a decision for
    every layer of a site, the same on every rank. rounds_inputs: whether decisions say how inputs are rounded, too.
    reference: whether statistics compare with the inputs of the uncompressed model, which a second stream computes.
    curvature: whether that of the loss by the layers' outputs is asked for, before the first block: tokens then count
    by it, and `Site.stats` has {layer: `LossCurvature`} by that name."""

    needs: Needs
    apply: Callable[[Site], dict[str, Decision]]
    rounds_inputs: bool = False
    reference: bool = False
    curvature: bool = False

    @property
    def compares(self) -> bool:
        return self.reference


@dataclass(frozen=True)
class Fix(Stage):
    """needs: statistics, by name, of what a layer returns once it is decided about, bias included, or of what a cache
    is given. codes: how that is rounded, from the finished statistics and the dtype of scales."""

    of_calls = True

    needs: Needs
    codes: Callable[..., Any]
