"""Removal of structure as edits of the whole model: blocks, channels of the hidden state, channels and heads of blocks.

    plan -> blocks by the loss without each -> hidden state -> for block: for coupling: statistics -> groups -> edits
         -> configuration

Each is decided behind those before it. The model is in memory as a whole, cut: under FSDP2 on every rank, before it is
sharded. Statistics are summed over the ranks, so all of them cut alike.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compress.base.errors import CompressError
from compress.base.progress import tell
from compress.engine.layer_versions import Versions
from compress.engine.shrink.block_importance import Without
from compress.engine.shrink.blocks import WholeModel
from compress.engine.shrink.compensation import Compensation
from compress.engine.shrink.cuts import Cut, Removed
from compress.engine.shrink.groups import Reading, choose
from compress.engine.shrink.hidden_width import NarrowHidden, Narrowing
from compress.engine.shrink.removal_plan import RemovalPlan
from compress.engine.walk.collect import collect
from compress.engine.walk.forward import suspended_forward
from compress.engine.walk.sites import structure_of
from compress.engine.walk.state import Streams
from compress.model.calls import Arrival
from compress.model.edits.drop_blocks import Drop
from compress.model.known_edits import Applicable
from compress.model.layers import Layer, Stack, find_stacks, whole_model
from compress.model.open_block import Opened
from compress.passes.protocol.model_view import Foreseen
from compress.passes.protocol.removal import RemovalOptions

Steps = Iterator[tuple[str, Applicable]]


def removal(whole: WholeModel, p: RemovalOptions) -> Foreseen:
    """The edits that remove shares of a model. Raises InputError for what cannot be removed."""
    plan = RemovalPlan(whole, p)
    return Foreseen(plan.copy, Removal(whole, plan).edits, plan.notes)


class Removal:
    """The decisions of one pass about one model, as it was planned."""

    def __init__(self, whole: WholeModel, plan: RemovalPlan) -> None:
        self.whole, self.plan, self.p = whole, plan, plan.p

    def edits(self) -> Steps:
        """Each edit, to be made before the next is asked for. Enters figures into the record."""
        stacks: Sequence[Stack] = self.plan.stacks
        if self.p.layers:
            yield from self.drop(*stacks)
            stacks = find_stacks(self.whole.model)
        if self.plan.width is not None:
            yield "", self.narrow(stacks)
        if self.p.shares:
            for stack in stacks:
                yield from self.cut(stack)
        if self.plan.width is not None or self.p.shares:
            yield "", self.plan.configuration(stacks)

    def drop(self, stack: Stack) -> Steps:
        """Drop the blocks without which the model loses least, one after the other; the blocks behind each make up for
        it."""
        whole, record = self.whole, self.whole.done.record
        captured = whole.calls_of(stack)
        without = Without(whole.model, stack, whole.batches, captured, whole.residency, whole.comm)
        gone: list[int] = []
        first: dict[int, float] = {}
        tell(whole.reporter, "phase", "choose blocks", "part")
        for turn in range(self.p.layers):
            whole.reporter.step(turn, self.p.layers, "")
            losses = whole.comm.gather_objects(without.losses(gone))[0]
            first = first or losses
            gone.append(min(losses, key=lambda i: (losses[i], i)))
            whole.reporter.step(turn + 1, self.p.layers, stack.blocks[gone[-1]][0])
        record["dropped"] = [f"{stack.name}.{i}" for i in sorted(gone)]
        record["loss_without"] = {f"{stack.name}.{i}": loss for i, loss in first.items()}
        if self.p.compares:
            yield from Compensation(whole, self.p).edits(stack, captured, set(gone))
        yield "", Drop(stack.name, tuple(sorted(gone)))

    def narrow(self, stacks: Sequence[Stack]) -> NarrowHidden:
        """The edit that removes channels of the hidden state."""
        model = self.whole.model
        calls = self.whole.calls_of(whole_model(model))[0] if self.p.uses_data else []
        weighed = self.p.importance == "magnitude"
        width = self.plan.width_in(stacks)
        work = Narrowing(model, width, self.plan.staying, calls, weighed, self.whole.residency, self.whole.comm)
        edit = work.edit()
        self.whole.done.record["hidden"] = edit.entry()
        return edit

    # --- inside blocks

    def cut(self, stack: Stack) -> Steps:
        """Cut every block behind those that are cut already."""
        captured = self.whole.calls_of(stack) if self.p.uses_data else [[] for _ in stack.blocks]
        streams = Streams(captured[0], captured[0] if self.p.compares else [])
        tell(self.whole.reporter, "phase", "remove", "part")
        for i, (name, block) in enumerate(stack.blocks):
            self.whole.reporter.step(i, len(stack.blocks), "")
            streams = streams.called_as(captured[i])
            captured[i] = []
            removed, streams = self.decide(name, block, self.plan.cuts.get(block, ()), streams)
            for each in removed:
                yield name, each
                self.whole.done.record["cut"].append(each.entry(name))
            self.whole.reporter.step(i + 1, len(stack.blocks), name)

    def decide(
        self, name: str, block: nn.Module, cuts: Sequence[Cut], streams: Streams
    ) -> tuple[list[Removed], Streams]:
        """The removals of a block, each coupling decided behind those before it, and the calls of the next block. Works
        on copies: the block itself stays as it was."""
        removed: list[Removed] = []
        versions = Versions()
        with self.whole.residency.open(block, keep=False) as opened:
            for cut in cuts:
                removed.append(self.choose(name, opened, cut, streams, versions))
                removed[-1].stand_in(opened.block, versions)
            if streams.calls and not streams.end:
                with torch.no_grad():
                    outputs = [opened.block(*call.args, **call.kwargs) for call in streams.calls]
                    with versions.original():
                        others = [opened.block(*call.args, **call.kwargs) for call in streams.reference]
                streams = streams.after(outputs, others)
        return removed, streams

    def choose(self, name: str, opened: Opened, cut: Cut, streams: Streams, versions: Versions) -> Removed:
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
            chosen = choose(self.p, groups, readings, cut.written(opened.block), self.whole.comm)
        return Removed.of(cut, chosen, opened)

    def statistics(
        self, opened: Opened, layers: Mapping[str, Layer], streams: Streams, versions: Versions
    ) -> Mapping[str, Mapping[str, Any]]:
        """{name inside the block: finished statistics of its input} of layers that read what goes. A collective."""
        structure = structure_of(opened.block, streams.calls, list(layers.values()))
        inside = {layer.name: name for name, layer in layers.items()}
        by_name = {layer.name: layer for layer in layers.values()}
        results: dict[str, Mapping[str, Any]] = {}

        def visit(site: Sequence[Layer], arrivals: Iterable[Arrival | None]) -> None:
            bias = any(getattr(layer.module, "bias", None) is not None for layer in site)
            statistics = collect(self.p.needs_of(bias), site[0], arrivals, self.whole.comm)
            if statistics is None:
                raise CompressError(f"no calibration token reached {site[0].name}; give more calibration data")
            assert len(statistics) == 1, "a grouped convolution has no coupling"
            results.update({inside[layer.name]: statistics[0] for layer in site})

        sites = [[by_name[name] for name in names] for names in structure.sites]
        suspended_forward(opened.block, streams.calls, sites, visit, streams.reference, versions)
        return results
