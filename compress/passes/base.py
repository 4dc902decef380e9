"""What a pass is: frozen configuration, the statistics it needs, and `apply`, which turns a site into decisions.

A *site* is a set of layers that read one and the same tensor (q, k and v of an attention, say): they share their
statistics. A pass sees plain tensors; whether the block lives in RAM, on disk or in FSDP shards, and how many ranks
there are, it cannot tell. To add a pass: one file beside this one, one line in `PASSES` in `compress/recipe.py`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from compress.calibration.stats import StatisticFactory
from compress.comm import Comm
from compress.model.folds import Merge, reduce_scales
from compress.weights.decision import Decision
from compress.weights.rounding import ActivationCodes

# A weight with a mask is dense, and some of it is zero for good.
Aspect = Literal["dense weight", "mask", "quantized weight"]
# What a pass is about: the layers inside the blocks, the token embedding and the output head, or key-value caches.
Treats = Literal["layers", "embeddings", "caches"]


@dataclass(frozen=True)
class Site:
    """Layers that read one tensor: name -> weight [N, K] in the working dtype, and the finished statistics by name.

    scale_dtypes gives the dtype in which each layer's scales are stored. decided: what earlier passes of the run have
    decided about layers; before: what the weights of those that were pruned had been, [N, K].
    """

    weights: Mapping[str, Tensor]
    stats: Mapping[str, Any]
    scale_dtypes: Mapping[str, torch.dtype]
    comm: Comm
    decided: Mapping[str, Decision] = field(default_factory=dict)
    before: Mapping[str, Tensor] = field(default_factory=dict)

    def kept(self, layer: str) -> Tensor | None:
        """Bool [N, K], which weights of a layer no earlier pass has pruned; None: all."""
        return self.decided[layer].kept if layer in self.decided else None

    def wanted(self, layer: str) -> Tensor:
        """The weight whose outputs a layer should have still: of a pruned one what it was before."""
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
        )


@dataclass(frozen=True)
class Reader:
    """A layer that reads a producer: its weight [N, K], the statistics of its input, and the producer's channel behind
    each of its inputs, channel_of_K (`compress.model.folds`)."""

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
class Scaling:
    """By how much each channel of a producer is divided, [C], positive and finite, and figures for the report."""

    scale_C: Tensor
    figures: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Filter:
    """Shell-style patterns, of which a layer's full name has to match one (`only`) or none (`but`)."""

    kind: Literal["only", "but"]
    patterns: tuple[str, ...]

    def lets_through(self, layer: str) -> bool:
        return any(fnmatchcase(layer, pattern) for pattern in self.patterns) == (self.kind == "only")

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

    where: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        """Refuse options that are out of range or do not go together: each group of options its own, after `super`."""

    def wants(self, layer: str) -> bool:
        """Whether this pass treats the layer of this (full) name."""
        return all(each.lets_through(layer) for each in self.where)

    def needs(self) -> Mapping[str, StatisticFactory]:
        """The statistics of a layer's input to collect, by name. None: the pass needs no calibration data."""
        return {}

    def fold_needs(self) -> Mapping[str, StatisticFactory]:
        """The statistics of layers' inputs from which `scaling` decides, by name. None: the pass folds no scales."""
        return {}

    def scaling(self, site: FoldSite) -> Scaling:
        """By how much to divide what the site's layers read, before this pass decides about them. The same on every
        rank."""
        raise NotImplementedError

    def output_needs(self) -> Mapping[str, StatisticFactory]:
        """The statistics to collect, by name, of what a layer returns once `apply` has decided about it, bias included.
        None: the output stays as it is."""
        return {}

    def output_codes(self, stats: Mapping[str, Any], scale_dtype: torch.dtype) -> ActivationCodes:
        """How a layer's output is rounded, from its finished statistics. The same on every rank."""
        raise NotImplementedError

    @property
    def rounds(self) -> bool:
        """Whether the pass decides about layers (`apply`), after it has folded scales or without."""
        return True

    @property
    def rounds_inputs(self) -> bool:
        """Whether decisions say how a layer's input is rounded, too."""
        return False

    @property
    def calibrated(self) -> bool:
        """Whether the pass needs calibration data."""
        return bool(self.needs() or self.fold_needs() or self.output_needs())

    @property
    def needs_reference(self) -> bool:
        """Whether statistics compare with the uncompressed model's inputs (a second forward stream)."""
        return False

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Refuse, before any work, layers ({name: (N, K)}) that this configuration cannot treat."""

    def fitted(self, widths: Collection[int]) -> "Pass":
        """This pass for layers of so many inputs: with what its options leave open settled."""
        return self

    def apply(self, site: Site) -> dict[str, Decision]:
        """Decide for every layer of the site. The same decisions on every rank."""
        raise NotImplementedError
