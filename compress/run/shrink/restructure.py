"""Removing structure, before the loop over blocks: what comes after it sees a smaller model, and nothing else.

    couplings -> what will be left (said) -> blocks by the loss without each -> for block: for coupling: statistics
              -> groups -> cut
              -> configuration -> what is left is what was said

The model is in memory as a whole, cut: under FSDP2 on every rank, before it is sharded. Statistics are summed over the
ranks, so all of them cut alike.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from compress.calibration.collect import collected
from compress.errors import CompressError
from compress.model.calls import Arrival, Batch, Call, evaluating, without_cache
from compress.model.edits.changes import Applied, undo
from compress.model.edits.configured import Fields, configure, unread_of
from compress.model.edits.drop import Drop
from compress.model.layers import Layer, Stack, find_stacks, layers_of, whole_model
from compress.model.opened import Opened
from compress.model.valueless import size_of
from compress.passes.structure import Structure
from compress.run.installed import Versions
from compress.run.plan.batches import ChainBrokenError
from compress.run.plan.matching import Ignored
from compress.run.residency import Local
from compress.run.shrink.compensation import Compensation
from compress.run.shrink.cuts import Cut, Removed
from compress.run.shrink.foresight import Foreseen, Foresight, ModelSize, check_droppable, hidden_width, unread_of_all
from compress.run.shrink.groups import Reading, choose
from compress.run.shrink.narrowing import Narrowing
from compress.run.shrink.without import Without
from compress.run.walk.capture import capture, output_shape
from compress.run.walk.forward import suspended_forward
from compress.run.walk.sites import structure_of
from compress.run.walk.state import Streams
from compress.system.comm import Comm
from compress.system.progress import Reporter


@dataclass
class Restructured:
    """A finished restructuring: the entry of compress.json, notes for the user, and changes to undo."""

    record: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    changes: list[Applied] = field(default_factory=list)

    def undo(self) -> None:
        """Make the model what it was, bit for bit."""
        while self.changes:
            undo(self.changes.pop())

    @property
    def fingerprint(self) -> str:
        """The fingerprint of what was removed; a resumed run must have removed the same."""
        went = [self.record["dropped"], [(cut["block"], cut["cut"], cut["removed"]) for cut in self.record["cut"]]]
        if "hidden" in self.record:
            went.append(self.record["hidden"]["removed"])
        return hashlib.sha256(json.dumps(went).encode()).hexdigest()


def config_of(model: nn.Module) -> dict[str, Any]:
    """A model's configuration as it is now; nothing for a model without one."""
    config = getattr(model, "config", None)
    return json.loads(config.to_json_string(use_diff=False)) if isinstance(config, PretrainedConfig) else {}


@dataclass(frozen=True)
class Restructuring:
    """One pass over one model. batches: this rank's; probe: one micro-batch, the same on every rank. check: refuses,
    before any work, a model (without values) of the shapes that are to be left."""

    model: nn.Module
    p: Structure
    batches: Sequence[Batch]
    probe: Batch
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
        stacks, calls = self.stacks(one_block)
        check_droppable(self.model, stacks, self.p.layers)
        foreseen = Foresight(self.model, self.p, self.residency, self.ignored).foreseen(stacks, calls)
        self.check(foreseen.model)
        self.done.notes += foreseen.notes(self.p.layers, sum(len(stack.blocks) for stack in stacks))
        for note in self.done.notes:
            self.reporter.note(note)
        replace(self, p=foreseen.p).remove(stacks, foreseen)

    def remove(self, stacks: list[Stack], foreseen: Foreseen) -> None:
        """Remove what was said."""
        record = self.done.record
        record |= {"before": vars(foreseen.before), "after": vars(foreseen.after), "dropped": [], "cut": []}
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
        found = ModelSize(*size_of(self.model))
        if found != foreseen.after:
            raise CompressError(f"what is left is {found}; foreseen was {foreseen.after}")
        now = config_of(self.model)
        record["config"] = {key: [config.get(key), new] for key, new in now.items() if config.get(key) != new}

    # --- which blocks there are, and what they are called with

    def stacks(self, one_block: bool) -> tuple[list[Stack], dict[nn.Module, Call]]:
        """The stacks of the model and the probe's call of every block; the model as one block where that is asked for,
        or where its blocks are no chain."""
        stacks = find_stacks(self.model)
        if one_block or len(stacks) > 1:
            stacks = [whole_model(self.model)]
        try:
            return stacks, self.probed(stacks)
        except ChainBrokenError:
            stacks = [whole_model(self.model)]
            return stacks, self.probed(stacks)

    def probed(self, stacks: Sequence[Stack]) -> dict[nn.Module, Call]:
        calls: dict[nn.Module, Call] = {}
        for stack in stacks:
            captured = self.captured(stack, [self.probe])
            calls |= {block: of[0] for (_, block), of in zip(stack.blocks, captured, strict=True)}
        return calls

    def captured(self, stack: Stack, batches: Sequence[Batch]) -> list[list[Call]]:
        """The calls of every block of a stack."""

        def first_output(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            with self.residency.open(stack.blocks[0][1], keep=False) as opened:
                return output_shape(opened.block, args, kwargs)

        return capture(self.model, stack, batches, self.residency, first_output)

    # --- whole blocks

    def drop(self, stack: Stack) -> Stack:
        """Drop the blocks without which the model loses least, one after the other; returns what is left of the stack,
        in which the block behind each makes up for it."""
        captured = self.captured(stack, self.batches)
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
        calls = self.captured(whole_model(self.model), self.batches)[0] if self.p.calibrated else []
        count, weighed = self.p.staying("hidden", width.size), self.p.importance == "magnitude"
        work = Narrowing(self.model, width, count, calls, weighed, self.residency, self.comm)
        changes, self.done.record["hidden"] = work.run()
        self.done.changes += changes
        return width.configured(count), unread_of_all(stacks, foreseen.couplings)

    # --- inside blocks

    def cut_stack(self, stack: Stack, cuts: Mapping[nn.Module, Sequence[Cut]]) -> list[tuple[str, str]]:
        """Cut every block behind those that are cut already; returns `Coupling.unread` of all."""
        captured = self.captured(stack, self.batches) if self.p.calibrated else [[] for _ in stack.blocks]
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


def check_ignored(model: nn.Module, ignored: Ignored) -> None:
    """Raises InputError for a pattern that names no layer."""
    blocks = [each for stack in find_stacks(model) for each in stack.blocks]
    names = [layer.name for name, block in blocks for layer in layers_of(block, name, convolutions=True)]
    for name in names:
        ignored.asked_for(name)
    ignored.check_matched(example=names[0])
