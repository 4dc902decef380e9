"""Edits of a block before anything in it is rounded: the scales of SmoothQuant and AWQ, rotations, permutations.

One suspended forward collects a pass's statistics without changing a weight; then the pass is asked about each fold of
the block, and its edits are made. The function of the block stays what it was, and so do all shapes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.model.calls import Call
from compress.model.edits.changes import undo
from compress.model.edits.folds import Fold, FoldRecord
from compress.model.known_edits import Edit, read_edit
from compress.model.layers import Layer
from compress.model.open_block import Opened
from compress.model.structure.discovery import Discovery, Finder
from compress.model.structure.orders import Orders, Places, find_orders
from compress.model.structure.rotate import widest
from compress.passes.protocol.base import Pass
from compress.passes.protocol.sites import Between, FoldSite, Reader
from compress.passes.protocol.stages import Rewrite


def same_orders(orders: Orders, comm: Comm) -> Orders:
    """The orders found on every rank, whose channels may change places."""
    offers = comm.gather_objects([_signature(places) for places in orders.found])
    found = [p for p in orders.found if all(_signature(p) in others for others in offers)]
    return Orders(tuple(found), orders.rejected)


def _signature(places: Places) -> tuple[tuple[str, str, str], ...]:
    return tuple((role, name, str(each.tolist())) for (role, name), each in places.of.items())


def agree(comm: Comm, discovery: Discovery) -> Discovery:
    """The folds found on every rank; those that another rank did not find are entered as rejected."""
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

    def rewrite(
        self, p: Pass, call: Call, shared: set[int], observed: Mapping[str, Observed], decided: Collection[str]
    ) -> tuple[list[Edit], list[FoldRecord]]:
        """Ask the pass for the edits of each fold that serves its layers (`observed`), and make them.

        call: of the block. shared: identities of parameters that several modules use. decided: layers whose codes are
        fixed, which no edit may touch. Raises CompressError for an edit that changes a shape.
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
            fold_edits = rewrite.edits(
                Between(
                    fold,
                    FoldSite(readers, fold.channels, self.comm),
                    partial(widest, self.opened.block, call, fold),
                    partial(self._places, call, shared, fold, decided),
                )
            )
            for edit in fold_edits.edits:
                self._apply(p, edit)
                done.append(read_edit(edit.entry(), edit.parts()))  # as a resumed run reads it, on the CPU
            if fold_edits.edits:
                records.append(FoldRecord(producer, consumers, p.name, dict(fold_edits.figures)))
        return done, records

    def _apply(self, p: Pass, edit: Edit) -> None:
        """Make an edit of the block. Raises CompressError for one that changes a shape; it is undone."""
        before = {name: each.shape for name, each in self.opened.block.named_parameters()}
        applied = edit.apply(self.opened.block, self.opened.dtypes)
        other = next((n for n, each in self.opened.block.named_parameters() if each.shape != before[n]), None)
        if other is not None:
            undo(applied)
            raise CompressError(
                f"{p.name} changes the shape of {self.prefix}{other}; an edit of a block inside the loop leaves all "
                "shapes as they are, since a configuration has one width for all blocks"
            )

    def _places(self, call: Call, shared: set[int], fold: Fold, decided: Collection[str]) -> list[Places]:
        """Channels of a fold's producer that may change places, about none of whose layers anything is decided."""
        found = same_orders(find_orders(self.opened.block, call, self.folds, shared), self.comm).found
        made = [places for places in found if ("producers", fold.producer) in places.of]
        return [places for places in made if {self.prefix + n for _, n in places.of}.isdisjoint(decided)]

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
        discovery = agree(self.comm, self.finder.find(opened.block, call, self.shared))
        prefix = f"{block_name}." if block_name else ""
        return BlockFolds(opened, prefix, discovery.folds, discovery.rejected, self.comm)


def repeat(opened: Opened, edits: Sequence[Edit]) -> None:
    """Apply again, to the original block, the edits of an earlier run, which gives the same bits."""
    for edit in edits:
        edit.apply(opened.block, opened.dtypes)
