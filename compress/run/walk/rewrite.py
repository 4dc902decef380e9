"""Folding scales in a block before anything in it is rounded: what SmoothQuant and AWQ do first.

One suspended forward collects a pass's statistics without changing a weight; then each fold of the block gets the scale
that the pass finds for it, and is applied. The function of the block stays what it was.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.model.calls import Call
from compress.model.edits.folds import Fold, FoldRecord, Scale, usable_scales
from compress.model.known_edits import Edit
from compress.model.layers import Layer
from compress.model.opened import Opened
from compress.model.structure.discovery import Discovery, Finder
from compress.passes.protocol.base import Pass
from compress.passes.protocol.sites import FoldSite, Reader
from compress.passes.protocol.stages import Rewrite
from compress.system.comm import Comm


def agreed(comm: Comm, discovery: Discovery) -> Discovery:
    """What every rank's tokens have shown: the folds that all of them found."""
    everywhere = comm.gather_objects(discovery.folds)
    folds = tuple(fold for fold in discovery.folds if all(fold in others for others in everywhere))
    lost = [f"{f.producer}: other ranks found no such fold" for f in discovery.folds if f not in folds]
    return Discovery(folds, (*discovery.rejected, *lost), discovery.forwards, discovery.probes)


# What was collected for a layer: the layer, and the finished statistics of its input.
Observed = tuple[Layer, Mapping[str, Any]]


@dataclass(frozen=True)
class BlockFolds:
    """The folds of an open block. prefix: what names inside it have before them in the model. rejected: producers into
    which no scale can go, and why."""

    opened: Opened
    prefix: str
    folds: tuple[Fold, ...]
    rejected: tuple[str, ...]
    comm: Comm

    def _consumers(self, fold: Fold) -> list[str]:
        return [self.prefix + consumer.name for consumer in fold.consumers]

    @property
    def served(self) -> set[str]:
        """The layers whose inputs some fold scales."""
        return {name for fold in self.folds for name in self._consumers(fold)}

    def rescale(
        self, p: Pass, observed: Mapping[str, Observed], decided: Collection[str]
    ) -> tuple[list[Edit], list[FoldRecord]]:
        """Ask the pass for the scale of each fold that serves its layers (`observed`), and apply it.

        decided: layers whose codes are fixed, which no fold may touch.
        """
        done: list[Edit] = []
        records: list[FoldRecord] = []
        for fold in self.folds:
            producer, consumers = self.prefix + fold.producer, self._consumers(fold)
            readers = self._readers(fold, observed)
            if not readers or not {producer, *consumers}.isdisjoint(decided):
                continue
            rewrite = p.fitted({reader.weight.shape[1] for reader in readers.values()}).stage(Rewrite)
            assert rewrite is not None
            scaling = rewrite.scaling(FoldSite(readers, fold.channels, self.comm))
            scale_C = usable_scales(scaling.scale_C.float())
            scale = Scale(fold, scale_C)
            scale.apply(self.opened.block, self.opened.dtypes)
            done.append(Scale(fold, scale_C.cpu()))
            records.append(FoldRecord(producer, consumers, p.name, dict(scaling.figures)))
        return done, records

    def _readers(self, fold: Fold, observed: Mapping[str, Observed]) -> dict[str, Reader]:
        readers = {}
        for consumer in fold.consumers:
            name = self.prefix + consumer.name
            if name in observed:
                layer, statistics = observed[name]
                map_K = consumer.channel_of_K.to(layer.weight.device)
                readers[name] = Reader(layer.weight, statistics, map_K, self.opened.dtype_of(layer.parameter))
        return readers


class FoldFinder:
    """Finds the folds of block after block. `shared`: identities of parameters that several modules use."""

    def __init__(self, comm: Comm, shared: set[int]) -> None:
        self.comm, self.shared = comm, shared
        self.finder = Finder()

    def find(self, opened: Opened, block_name: str, call: Call) -> BlockFolds:
        """The folds of a block, the same on every rank."""
        discovery = agreed(self.comm, self.finder.find(opened.block, call, self.shared))
        prefix = f"{block_name}." if block_name else ""
        return BlockFolds(opened, prefix, discovery.folds, discovery.rejected, self.comm)


def repeat(opened: Opened, edits: Sequence[Edit]) -> None:
    """Apply again, to the original block, the edits of an earlier run, which gives the same bits."""
    for edit in edits:
        edit.apply(opened.block, opened.dtypes)
