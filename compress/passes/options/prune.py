"""The common part of passes that prune: a pattern or a share of zeros, and decisions from scores or survivors.

Shapes: N outputs, K inputs; of a convolution K is the patch, channel by channel. Weights that an earlier pass has
pruned are worth nothing and stay zero: a pass adds to a mask. `weights.masks` has the counting.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from compress.base.errors import InputError, check_least, one_of
from compress.passes.options.layer_pairs import check_names, layer_pairs
from compress.passes.protocol.base import Aspect, Pass
from compress.passes.protocol.round_to_nearest import weight_error
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Reorder, Stage, Survey
from compress.solvers.permutation import better_order, kept_of
from compress.solvers.scores import wanda
from compress.solvers.statistics.input_statistics import ChannelNorm
from compress.weights.decision import Decision
from compress.weights.formats.sparse24 import TWO_OF_FOUR
from compress.weights.masks import Choice, Pattern, parse_pattern
from compress.weights.survivors import Survivors, survivors

Per = Literal["row", "layer"]
HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class Prune(Pass):
    """A pass that makes weights zero for good."""

    writes: ClassVar[Aspect] = "mask"
    keeps_zeros: ClassVar[bool] = True

    pattern: str = ""
    """N:M, like 2:4, or nothing: keep N of every M weights in a row; without it, `sparsity` decides."""

    sparsity: float | None = None
    """above 0, below 1: share of weights set to zero; none: as `pattern` says, or half."""

    permute: int = 0
    """0 or more: rounds of permuting input channels, so that an N:M pattern keeps larger scores, where the layer before
    can be permuted too; 0: no permutation."""

    per: Per = "row"
    """Scope of `sparsity`: each row (one output), or the whole layer."""

    sparsities: tuple[tuple[str, float], ...] = ()
    """[layer, share] pairs: the sparsity of single layers, by full name, instead of `sparsity`."""

    store: str = ""
    """2:4 or nothing: store layers pruned to 2:4 without their zeros, readable by `compress.load` only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.store not in ("", TWO_OF_FOUR):
            raise InputError(f"store {self.store!r}; allowed: {TWO_OF_FOUR}, or nothing")
        if self.store and self.pattern != TWO_OF_FOUR:
            raise InputError(f"store {self.store} is of layers that are pruned so; give pattern {TWO_OF_FOUR} with it")
        if self.sparsity is not None and not 0 < self.sparsity < 1:
            raise InputError(
                f"sparsity {self.sparsity}; allowed: above 0, below 1 (0.5 makes half of the weights zero)"
            )
        one_of("per", self.per, get_args(Per))
        object.__setattr__(self, "sparsities", layer_pairs("sparsities", self.sparsities, _as_share, "share", 0.6))
        default_sparsity = HALF if self.of_each is None else self.of_each.sparsity
        if self.of_each is not None:
            if self.sparsity not in (None, default_sparsity):
                raise InputError(
                    f"pattern {self.pattern} makes {default_sparsity:.4g} of weights zero, not sparsity "
                    f"{self.sparsity}; give one"
                )
            if self.per != "row":
                raise InputError(f"per {self.per} has no say in pattern {self.pattern}; leave one out")
            if self.sparsities:
                raise InputError(f"sparsities have no say in pattern {self.pattern}; leave one out")
        check_least(self, 0, "permute", unit=" rounds")
        if self.permute and self.of_each is None:
            raise InputError("permute moves inputs between the groups of a pattern, and there is none; give N:M")
        object.__setattr__(self, "sparsity", default_sparsity if self.sparsity is None else self.sparsity)

    @property
    def zeros(self) -> float:
        """The share of weights that become zero."""
        assert self.sparsity is not None  # settled when the pass is made
        return self.sparsity

    @property
    def of_each(self) -> Pattern | None:
        """The pattern, if there is one."""
        return parse_pattern(self.pattern) if self.pattern else None

    @property
    def survey(self) -> tuple[Survey, ...]:
        """The stage that finds out how many weights each layer has to lose; none where all lose the same share."""
        return ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        return *self.survey, *self.reorder, self.decide_stage

    @property
    def reorder(self) -> tuple[Reorder, ...]:
        """The stage that finds inputs other groups of the pattern; none where they stay. Its data shows which rows make
        them, too."""
        if not self.permute or self.of_each is None:
            return ()
        order = partial(better_order, pattern=self.of_each, rounds=self.permute)
        kept = partial(kept_of, pattern=self.of_each)
        return (Reorder({"norm": ChannelNorm}, self.worth, order, kept, self.of_each.length),)

    def worth(self, site: Site, name: str) -> Tensor:
        """[N, K] the scores of a layer's weights, given the norms of its inputs."""
        return wanda(site.weights[name], site.stats["norm"])

    @property
    def halves(self) -> bool:
        return bool(self.store)

    @property
    def scattered(self) -> bool:
        return not self.pattern

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        super().check(shapes)
        check_names("sparsities", self.sparsities, shapes)
        for name, (_, columns) in shapes.items():
            if self.of_each is not None and columns % self.of_each.length:
                raise InputError(
                    f"pattern {self.pattern} needs inputs in multiples of {self.of_each.length}; {name} has {columns}: "
                    "ignore it, leave it to another pass (`but`) or prune a share (sparsity)"
                )

    def choice(self, layer: str) -> Choice:
        """The rule for the weights of a layer that stay."""
        share = dict(self.sparsities).get(layer, self.zeros)
        return Choice(self.of_each, share, together=self.per != "row")

    def by_score(self, site: Site, name: str, score_NK: Tensor) -> Survivors:
        """A layer's weight as it is now, of which the best stay, unchanged."""
        kept = self.choice(name).kept(score_NK, site.kept(name))
        return survivors(site.weights[name], kept, site.scale_dtypes[name])


@dataclass(frozen=True, kw_only=True)
class Ranked(Prune):
    """A pass that prunes by one score of each weight."""

    def score(self, site: Site, name: str) -> Tensor:
        """[N, K] the scores of a layer's weights, never negative."""
        raise NotImplementedError

    def apply(self, site: Site) -> dict[str, Decision]:
        decisions = {}
        for name, weight in site.weights.items():
            found = self.by_score(site, name, self.score(site, name))
            decisions[name] = found.decision({"weight_error": weight_error(weight, found)})
        return decisions


def _as_share(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    return float(value) if known else None
