"""Folding scales in a block before anything in it is rounded: what SmoothQuant and AWQ do first.

One suspended forward collects a pass's statistics without changing a weight; then each fold of the block (`graph`)
gets the scale that the pass finds for it, and is applied. The function of the block stays what it was.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from compress.calibration.collect import collected
from compress.comm import Comm
from compress.model.calls import Arrival, Call
from compress.model.discovery import Discovery, Finder
from compress.model.folds import Fold, Folded, FoldRecord, apply, usable_scales
from compress.model.layers import Layer
from compress.model.opened import Opened
from compress.passes.base import FoldSite, Pass, Reader


def agreed(comm: Comm, found: Discovery) -> Discovery:
    """What every rank's tokens have shown: the folds that all of them found."""
    everywhere = comm.gather_objects(found.folds)
    folds = tuple(fold for fold in found.folds if all(fold in others for others in everywhere))
    lost = [f"{f.producer}: other ranks found no such fold" for f in found.folds if f not in folds]
    return Discovery(folds, (*found.rejected, *lost), found.forwards, found.probes)


class Rescaler:
    """Folds scales, block after block. `shared`: identities of parameters that several modules use."""

    def __init__(self, comm: Comm, shared: set[int]) -> None:
        self.comm, self.shared = comm, shared
        self.finder = Finder()

    def find(self, block: nn.Module, call: Call) -> Discovery:
        """The folds of a block, the same on every rank."""
        return agreed(self.comm, self.finder.find(block, call, self.shared))

    def rescale(
        self,
        p: Pass,
        prefix: str,
        opened: Opened,
        layers: Mapping[str, Layer],
        wanted: set[str],
        decided: set[str],
        found: Discovery,
        statistics: Mapping[str, Mapping[str, Any]],
    ) -> tuple[list[Folded], list[FoldRecord]]:
        """Ask the pass for the scale of each fold that serves its layers, and apply it.

        wanted: the layers of the pass; decided: layers whose codes are fixed, which no fold may touch; statistics: by
        layer, of its input. Layer names are full, `prefix` is what they have before the names inside the block.
        """
        done: list[Folded] = []
        records: list[FoldRecord] = []
        for fold in found.folds:
            members = {prefix + fold.producer, *(prefix + c.name for c in fold.consumers)}
            readers = self._readers(fold, prefix, opened, layers, wanted, statistics)
            if members & decided or not readers:
                continue
            fitted = p.fitted({reader.weight.shape[1] for reader in readers.values()})
            scaling = fitted.scaling(FoldSite(readers, fold.channels, self.comm))
            scale_C = usable_scales(scaling.scale_C.float())
            apply(opened.block, fold, scale_C, opened.dtypes)
            done.append(Folded(fold, scale_C.cpu()))
            consumers = [prefix + c.name for c in fold.consumers]
            records.append(FoldRecord(prefix + fold.producer, consumers, p.name, dict(scaling.figures)))
        return done, records

    @staticmethod
    def _readers(
        fold: Fold,
        prefix: str,
        opened: Opened,
        layers: Mapping[str, Layer],
        wanted: set[str],
        statistics: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Reader]:
        readers = {}
        for consumer in fold.consumers:
            name = prefix + consumer.name
            if name in wanted and name in statistics:
                layer = layers[name]
                map_K = consumer.channel_of_K.to(layer.weight.device)
                readers[name] = Reader(layer.weight, statistics[name], map_K, opened.dtype_of(layer.parameter))
        return readers


def repeat(opened: Opened, folded: Sequence[Folded]) -> None:
    """Apply again, to the original block, the folds of an earlier run: the same scales give the same bits."""
    for each in folded:
        apply(opened.block, each.fold, each.scale_C, opened.dtypes)


def collecting(
    p: Pass,
    sites: Sequence[Sequence[str]],
    layers: Mapping[str, Layer],
    comm: Comm,
) -> tuple[Callable[[int, Iterable[Arrival | None]], None], dict[str, dict[str, Any]]]:
    """(a visitor of suspended forwards that changes nothing, the statistics by layer that it fills)."""
    found: dict[str, dict[str, Any]] = {}

    def visit(index: int, arrivals: Iterable[Arrival | None]) -> None:
        names = sites[index]
        results = collected(p.fold_needs(), layers[names[0]], arrivals, comm)
        if results is not None:
            found.update(dict.fromkeys(names, results[0]))

    return visit, found
