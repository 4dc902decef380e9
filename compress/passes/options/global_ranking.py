"""The common part of masks whose scores compare between layers: one ranking of the weights of a whole model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, get_args

from torch import Tensor

from compress.base.errors import InputError
from compress.passes.options.prune import Prune
from compress.passes.protocol.round_to_nearest import weight_error
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Finding, Settled, Survey
from compress.weights.decision import Decision
from compress.weights.masks import pruned_before, share_of
from compress.weights.ranking import Boundary, ScoreHistogram, added, histogram, lowest

PerModel = Literal["row", "layer", "model"]


@dataclass(frozen=True, kw_only=True)
class Ranked(Prune):
    """A pass that prunes by one score of each weight."""

    rankings: ClassVar[tuple[str, ...]] = get_args(PerModel)

    per: PerModel = "row"  # type: ignore[assignment]
    """Scope of `sparsity`: each row (one output), the whole layer, or the whole model, whose scores are ranked first in
    a pass over the original."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per == "model" and self.sparsities:
            raise InputError("per model finds out how many zeros each layer has, and sparsities say it; give one")

    def score(self, site: Site, name: str) -> Tensor:
        """[N, K] the scores of a layer's weights, never negative."""
        raise NotImplementedError

    def apply(self, site: Site) -> dict[str, Decision]:
        decisions = {}
        for name, weight in site.weights.items():
            found = self.by_score(site, name, self.score(site, name))
            decisions[name] = found.decision({"weight_error": weight_error(weight, found)})
        return decisions

    @property
    def survey(self) -> tuple[Survey, ...]:
        if self.per != "model":
            return super().survey
        return (Survey(self.needs(), self.look_at_scores, self.settle_by_rank),)

    def look_at_scores(self, site: Site) -> dict[str, ScoreHistogram]:
        """{layer: the histogram of its scores, in units that all layers share}, of which each rank counts its rows."""
        comm = site.comm
        return {
            name: histogram(self.score(site, name)[comm.rows_of(len(weight))], comm)
            for name, weight in site.weights.items()
        }

    def settle_by_rank(self, found: Mapping[str, Finding]) -> Settled:
        """The pass with a share of zeros for each layer."""
        return self.ranked_as_one({name: added(finding.parts) for name, finding in found.items()})

    def ranked_as_one(self, layers: Mapping[str, ScoreHistogram]) -> Settled:
        """The pass that makes the lowest scores of all layers zero, layer by layer."""
        sizes = {name: layer.size for name, layer in layers.items()}
        pruned = pruned_before(sum(sizes.values()), self.zeros)
        if not pruned:
            return Settled(self.with_shares(dict.fromkeys(sizes, 0.0)))
        counts, boundary = lowest(layers, pruned)
        shares = {name: share_of(counts[name], size) for name, size in sizes.items()}
        return Settled(self.with_shares(shares), notes=(_told(boundary, pruned, len(layers)), *told(self.name, shares)))

    def with_shares(self, shares: Mapping[str, float]) -> Self:
        """The pass with these shares of zeros, in each layer of its best."""
        return replace(self, per="layer", sparsities=tuple(shares.items()))


def _told(boundary: Boundary, pruned: int, layers: int) -> str:
    return (
        f"{pruned} weights of {layers} layers are ranked as one: scores below {boundary.low:.4g} become zero, and "
        f"{boundary.pruned} of the {boundary.inside} from there to {boundary.high:.4g}, of which each layer gives the "
        "same part"
    )


def told(method: str, shares: Mapping[str, float]) -> tuple[str, ...]:
    """Sentences of the report about shares of zeros that differ between layers."""
    least, most = min(shares, key=lambda n: shares[n]), max(shares, key=lambda n: shares[n])
    lines = [f"{method} makes {shares[least]:.1%} ({least}) to {shares[most]:.1%} ({most}) of a layer zero"]
    nothing = [name for name, share in shares.items() if share == 1]
    if nothing:
        others = f" and {len(nothing) - 1} more" if len(nothing) > 1 else ""
        lines.append(f"{method} leaves nothing of {nothing[0]}{others}: all of its weights become zero")
    return tuple(lines)
