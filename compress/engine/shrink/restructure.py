"""Removing structure, before the loop over blocks: what comes after it sees a smaller model, and nothing else.

    couplings -> what will be left (said) -> blocks by the loss without each -> for block: for coupling: statistics
              -> groups -> cut
              -> configuration -> what is left is what was said

The model is in memory as a whole, cut: under FSDP2 on every rank, before it is sharded. Statistics are summed over the
ranks, so all of them cut alike.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.base.progress import Reporter
from compress.engine.layer_versions import Versions
from compress.engine.plan.matching import Ignored
from compress.engine.residency import Local
from compress.engine.shrink.block_importance import Without
from compress.engine.shrink.blocks import calls_of, check_ignored, stacks_called
from compress.engine.shrink.compensation import Compensation
from compress.engine.shrink.cuts import Cut, Removed
from compress.engine.shrink.edit_result import Restructured, config_of
from compress.engine.shrink.groups import Reading, choose
from compress.engine.shrink.hidden_width import Narrowing
from compress.engine.shrink.preview import Foreseen, Foresight, check_droppable, hidden_width, unread_of_all
from compress.engine.walk.collect import collected
from compress.engine.walk.forward import suspended_forward
from compress.engine.walk.sites import structure_of
from compress.engine.walk.state import Streams
from compress.model.calls import Arrival, Batch, Call, evaluating, without_cache
from compress.model.edits.configuration_search import Fields, configure, unread_of
from compress.model.edits.drop_blocks import Drop
from compress.model.layers import Layer, Stack, find_stacks, whole_model
from compress.model.open_block import Opened
from compress.passes.protocol.removal import RemovalOptions


@dataclass(frozen=True)
class Restructuring:
    """One pass over one model. batches: this rank's; probe: makes one micro-batch, the same on every rank. check:
    refuses, before any work, a model (without values) of the shapes that are to be left."""

    model: nn.Module
    p: RemovalOptions
    batches: Sequence[Batch]
    probe: Callable[[], Batch]
    residency: Local
    ignored: Ignored
    check: Callable[[nn.Module], None]
    comm: Comm
    reporter: Reporter
    done: Restructured = field(default_factory=Restructured)

    def run(self, one_block: bool) -> Restructured:
        """Remove what the pass says. Raises InputError, before anything is changed, for what cannot be removed;
        whatever is raised, the model is then as it was."""
        try:
            with evaluating(self.model), without_cache(self.model):
                self.carry_out(one_block)
        except BaseException:
            self.done.undo()
            raise
        return self.done

    def carry_out(self, one_block: bool) -> None:
        """Look, say what will be left, remove, and hold it to that."""
        check_ignored(self.model, self.ignored)
        stacks, calls = stacks_called(self.model, self.probe(), self.residency, one_block)
        check_droppable(self.model, stacks, self.p.layers)
        foreseen = Foresight(self.model, self.p, self.residency, self.ignored).foreseen(stacks, calls)
        self.check(foreseen.model)
        notes = foreseen.notes(self.p.layers, sum(len(stack.blocks) for stack in stacks))
        self.done.notes += notes
        for note in notes:
            self.reporter.note(note)
        replace(self, p=foreseen.p).remove(stacks, foreseen)

    def remove(self, stacks: list[Stack], foreseen: Foreseen) -> None:
        """Remove what was said."""
        self.done.begin(foreseen.before, foreseen.after)
        config = config_of(self.model)
        if self.p.layers:
            stacks = [self.drop(*stacks)]
        unread: list[tuple[str, str]] = []
        known: Fields = ()
        if foreseen.width is not None:
            known, unread = self.narrowed(stacks, foreseen)
        if self.p.shares:
            unread += [each for stack in stacks for each in self.cut_stack(stack, foreseen.cuts)]
        if known or self.p.shares:
            counts = {(c.coupling.groups, c.staying) for each in foreseen.cuts.values() for c in each}
            changed = configure(self.model, unread, counts if known else (), known=known, like=foreseen.model)
            self.done.changes.append(changed)
        self.done.finish(self.model, config, foreseen.after)

    def captured(self, stack: Stack) -> list[list[Call]]:
        """This rank's calls of every block of a stack."""
        return calls_of(self.model, stack, self.batches, self.residency)

    # --- whole blocks

    def drop(self, stack: Stack) -> Stack:
        """Drop the blocks without which the model loses least, one after the other; returns what is left of the stack,
        in which the block behind each makes up for it."""
        captured = self.captured(stack)
        without = Without(self.model, stack, self.batches, captured, self.residency, self.comm)
        gone: list[int] = []
        losses: dict[int, float] = {}
        for turn in range(self.p.layers):
            self.reporter.step(turn, self.p.layers, "")
            found = self.comm.gather_objects(without.losses(gone))[0]
            losses = losses or found
            gone.append(min(found, key=lambda i: (found[i], i)))
            self.reporter.step(turn + 1, self.p.layers, stack.blocks[gone[-1]][0])
        self.done.record["dropped"] = [f"{stack.name}.{i}" for i in sorted(gone)]
        self.done.record["loss_without"] = {f"{stack.name}.{i}": found for i, found in losses.items()}
        if self.p.compares:
            behind = Compensation(self.model, self.p, self.residency, self.ignored, self.comm)
            for changes in behind.changes(stack, captured, set(gone)):
                self.done.changes.append(changes)
        self.done.changes.append(Drop(stack.name, tuple(sorted(gone))).apply(self.model))
        return find_stacks(self.model)[0]

    # --- through all blocks

    def narrowed(self, stacks: Sequence[Stack], foreseen: Foreseen) -> tuple[Fields, list[tuple[str, str]]]:
        """Cut the hidden state; returns what the configuration has to say, and `Coupling.unread` of all blocks."""
        width = hidden_width(self.model, stacks, foreseen.couplings)
        calls = self.captured(whole_model(self.model))[0] if self.p.uses_data else []
        count, weighed = self.p.staying("hidden", width.size), self.p.importance == "magnitude"
        work = Narrowing(self.model, width, count, calls, weighed, self.residency, self.comm)
        changes, self.done.record["hidden"] = work.run()
        self.done.changes += changes
        return width.configured(count), unread_of_all(stacks, foreseen.couplings)

    # --- inside blocks

    def cut_stack(self, stack: Stack, cuts: Mapping[nn.Module, Sequence[Cut]]) -> list[tuple[str, str]]:
        """Cut every block behind those that are cut already; returns `Coupling.unread` of all."""
        captured = self.captured(stack) if self.p.uses_data else [[] for _ in stack.blocks]
        streams = Streams(captured[0], captured[0] if self.p.compares else [])
        unread: list[tuple[str, str]] = []
        for i, (name, block) in enumerate(stack.blocks):
            self.reporter.step(i, len(stack.blocks), "")
            streams = streams.called_as(captured[i])
            captured[i] = []
            removed, streams = self.decided(name, block, cuts.get(block, ()), streams)
            for each in removed:
                self.done.changes += each.apply(block)
                self.done.record["cut"].append(each.entry(name))
                unread += unread_of(name, each.cut.coupling)
            self.reporter.step(i + 1, len(stack.blocks), name)
        return unread

    def decided(
        self, name: str, block: nn.Module, cuts: Sequence[Cut], streams: Streams
    ) -> tuple[list[Removed], Streams]:
        """The removals of a block, each coupling decided behind those before it, and the calls of the next block. Works
        on copies: the block itself stays as it was."""
        removed: list[Removed] = []
        versions = Versions()
        with self.residency.open(block, keep=False) as opened:
            for cut in cuts:
                removed.append(self.choice(name, opened, cut, streams, versions))
                removed[-1].stand_in(opened.block, versions)
            if streams.calls and not streams.end:
                with torch.no_grad():
                    outputs = [opened.block(*call.args, **call.kwargs) for call in streams.calls]
                    with versions.original():
                        others = [opened.block(*call.args, **call.kwargs) for call in streams.reference]
                streams = streams.after(outputs, others)
        return removed, streams

    def choice(self, name: str, opened: Opened, cut: Cut, streams: Streams, versions: Versions) -> Removed:
        """The choice of groups to stay of a coupling of an open block, the same on every rank."""
        layers = cut.layers(opened.block, name)
        stats = self.statistics(opened, layers, streams, versions) if streams.calls else {key: {} for key in layers}
        readings = {}
        for member in cut.coupling.consumers:
            layer = layers[member.name]
            bias = getattr(layer.module, "bias", None)
            readings[member.name] = Reading(layer.weight, bias, stats[member.name], cut.columns(layer, member))
        with torch.no_grad():
            groups = (cut.coupling.groups, cut.staying)
            chosen = choose(self.p, groups, readings, cut.written(opened.block), self.comm)
        return Removed.of(cut, chosen, opened)

    def statistics(
        self, opened: Opened, layers: Mapping[str, Layer], streams: Streams, versions: Versions
    ) -> Mapping[str, Mapping[str, Any]]:
        """{name inside the block: finished statistics of its input} of layers that read what goes. A collective."""
        structure = structure_of(opened.block, streams.calls, list(layers.values()))
        inside = {layer.name: name for name, layer in layers.items()}
        by_name = {layer.name: layer for layer in layers.values()}
        found: dict[str, Mapping[str, Any]] = {}

        def visit(site: Sequence[Layer], arrivals: Iterable[Arrival | None]) -> None:
            bias = any(getattr(layer.module, "bias", None) is not None for layer in site)
            statistics = collected(self.p.needs_of(bias), site[0], arrivals, self.comm)
            if statistics is None:
                raise CompressError(f"no calibration token reached {site[0].name}; give more calibration data")
            assert len(statistics) == 1, "a grouped convolution has no coupling"
            found.update({inside[layer.name]: statistics[0] for layer in site})

        sites = [[by_name[name] for name in names] for names in structure.sites]
        suspended_forward(opened.block, streams.calls, sites, visit, streams.reference, versions)
        return found
