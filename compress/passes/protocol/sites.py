"""Sites, which a pass sees: the layers that read one tensor, or those that read one producer.

A pass sees plain tensors; whether the block lives in RAM, on disk or in FSDP shards, and how many ranks there are, it
cannot tell.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.model.edits.folds import Fold, Merge, Scale, reduce_scales, usable_scales
from compress.model.known_edits import Edit
from compress.model.structure.orders import Places
from compress.weights.decision import Decision
from compress.weights.grid import Grid


@dataclass(frozen=True)
class Site:
    """Layers that read one tensor: name -> weight [N, K] in the working dtype, and the finished statistics by name.

    scale_dtypes gives the dtype in which each layer's scales are stored. decided: what earlier passes of the run have
    decided about layers; before: what the weights of those that were pruned had been, [N, K]. largest: finds the
    largest absolute weight among all layers that share one global scale; None: they are those of the site.
    """

    weights: Mapping[str, Tensor]
    stats: Mapping[str, Any]
    scale_dtypes: Mapping[str, torch.dtype]
    comm: Comm
    decided: Mapping[str, Decision] = field(default_factory=dict)
    before: Mapping[str, Tensor] = field(default_factory=dict)
    largest: Callable[[], float] | None = None

    def reached(self, grid: Grid) -> Grid:
        """The grid with the global scale, or the one scale of floats per tensor, that all layers of the site share:
        engines make one layer of some of them (q, k and v; gate and up)."""
        if not grid.shared:
            return grid
        return grid.reaching(self._largest() if self.largest is None else self.largest())

    def _largest(self) -> float:
        return max(float(weight.abs().max()) for weight in self.weights.values())

    def kept(self, layer: str) -> Tensor | None:
        """Bool [N, K], which weights of a layer no earlier pass has pruned; None: all."""
        return self.decided[layer].kept if layer in self.decided else None

    def wanted(self, layer: str) -> Tensor:
        """The weight whose outputs a layer should return; of a pruned layer the weight before pruning."""
        return self.before.get(layer, self.weights[layer])

    def rows(self, parts: Mapping[str, slice]) -> "Site":
        """The site with some rows of some layers; those that `parts` does not name are left out."""
        decided = {n: d for n, d in self.decided.items() if n in parts}
        return replace(
            self,
            weights={n: self.weights[n][rows] for n, rows in parts.items()},
            scale_dtypes={n: self.scale_dtypes[n] for n in parts},
            decided={
                n: replace(d, weight=d.weight.rows(parts[n]), kept=None if d.kept is None else d.kept[parts[n]])
                for n, d in decided.items()
            },
            before={n: self.before[n][rows] for n, rows in parts.items() if n in self.before},
            largest=self.largest or self._largest,
        )


@dataclass(frozen=True)
class Reader:
    """A layer that reads a producer: its weight [N, K], the statistics of its input, and the producer's channel behind
    each of its inputs, channel_of_K (`compress.model.edits.folds`)."""

    weight: Tensor
    stats: Mapping[str, Any]
    channel_of_K: Tensor
    scale_dtype: torch.dtype


@dataclass(frozen=True)
class FoldSite:
    """A producer of `channels` channels and the layers of this pass that read it."""

    readers: Mapping[str, Reader]
    channels: int
    comm: Comm

    def merged(self, value: Callable[[Reader], Tensor], how: Merge) -> Tensor:
        """[C] from a value [K] of each reader, over all inputs that come from a channel; 0 where none does."""
        values = torch.cat([value(reader) for reader in self.readers.values()])
        maps = torch.cat([reader.channel_of_K for reader in self.readers.values()])
        return reduce_scales(values, maps, self.channels, how, empty=0.0)


@dataclass(frozen=True)
class Between:
    """A producer and the layers of a block that read it, and the changes there that the block does not see.

    fold: names them, and the producer's channel behind each of their inputs; scales pass in any case.
    site: those of the layers that the pass is about.
    widest: the size of the largest orthogonal matrices that pass; None where none do. Tried out as it is asked for.
    places: channels that may change places with each other, that the producer makes. Found as it is asked for.
    """

    fold: Fold
    site: FoldSite
    widest: Callable[[], int | None]
    places: Callable[[], Sequence[Places]]


@dataclass(frozen=True)
class Rewritten:
    """Edits around one producer, in the order in which they are made, and figures for the report."""

    edits: Sequence[Edit]
    figures: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scaling:
    """By how much each channel of a producer is divided, [C], positive and finite, and figures for the report."""

    scale_C: Tensor
    figures: Mapping[str, float | int | str] = field(default_factory=dict)

    def of(self, fold: Fold) -> Rewritten:
        """The edit that scales a fold so."""
        return Rewritten((Scale(fold, usable_scales(self.scale_C.float())),), self.figures)
