"""The plan of a removal: what it will take and leave, before any weight is touched.

The couplings of every block are found (or, for a block like one that was looked at, confirmed) on one micro-batch; then
a copy of the model without values is cut as the model will be, which says whether a configuration can express that, and
how many parameters and bytes it will have.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from compress.base.errors import InputError
from compress.engine.shrink.blocks import CouplingFinder, WholeModel, blocks_of
from compress.engine.shrink.cuts import NAMES, Cut, part_of
from compress.engine.walk.sites import structure_of
from compress.model.calls import Call
from compress.model.edits.configuration_search import Configure, Fields, unread_of
from compress.model.edits.drop_blocks import Drop
from compress.model.edits.keep_channels import Coupling, Keep
from compress.model.edits.width import Width, narrow, taken_by, width_of
from compress.model.layers import Layer, Stack, find_stacks
from compress.model.tensors import without_values
from compress.passes.protocol.removal import RemovalOptions

CLEARLY = 0.1  # of the share that was asked for
TRIED = 16  # numbers of heads, where the one that was asked for does not work


class RemovalPlan:
    """The cuts of one pass. p: extended by the parts that must go with those it names. couplings: of every block, where
    channels or heads go. width: the places of the hidden state's channels, where some of these go. cuts: of each block,
    in the order in which it computes. copy: the model as it will be, without values. Raises InputError for what cannot
    be cut, or what no configuration expresses."""

    def __init__(self, whole: WholeModel, p: RemovalOptions) -> None:
        self.whole, self.p, self.finder = whole, p, CouplingFinder(whole)
        self.stacks, calls = whole.probed
        check_droppable(whole.model, self.stacks, p.layers)
        self.blocks = blocks_of(self.stacks)
        self.remarks: list[str] = []
        self.without: dict[str, str] = {}  # blocks in which there is nothing of a kind to cut, and why
        block_couplings = {block: self.finder.of(name, block) for name, block in self.blocks if p.shares or p.hidden}
        self.couplings = {block: couplings for block, (couplings, _) in block_couplings.items()}
        self.width: Width | None = None
        if p.hidden:
            self.add_width()
        self.cuts: dict[nn.Module, tuple[Cut, ...]] = {}
        for name, block in self.blocks if self.p.shares else ():
            self.cuts[block] = tuple(self.cuts_of(name, block, calls[block], block_couplings[block][1]))
        for part in self.p.shares:
            if not any(c.part == part for c in self.all_cuts):
                why = (why for name, why in self.without.items() if name.endswith(f" ({part})"))
                raise InputError(
                    f"{type(whole.model).__name__} has no {part} that can be cut: "
                    f"{next(why, 'no layers are blocks')}; leave {part} out"
                )
        self.copy = self.cut_copy(self.cuts)

    @property
    def all_cuts(self) -> list[Cut]:
        """The cuts of all blocks."""
        return [cut for cuts in self.cuts.values() for cut in cuts]

    def notes(self, sizes: str) -> list[str]:
        """Lines about what is left, of these sizes, about parts of which clearly less goes than the share that was
        asked for, and about blocks without anything to cut."""
        blocks = f"{len(self.blocks) - self.p.layers} of {len(self.blocks)} blocks"
        counts = (f"{c.staying} of {c.coupling.groups} {NAMES[c.part]}" for c in self.all_cuts)
        what = [*([blocks] if self.p.layers else []), *dict.fromkeys(counts)]
        if self.width is not None:
            what.append(f"{self.staying} of {self.width.size} channels of the hidden state")
        less: dict[str, None] = {}
        for c in self.all_cuts:
            share, groups = getattr(self.p, c.part), c.coupling.groups
            gone = groups - c.staying
            if gone < (1 - CLEARLY) * share * groups:
                less[f"{c.part} {share:.3g} is less than {gone + 1} of {groups} {NAMES[c.part]}: removed {gone}"] = None
        nothing = (f"nothing to cut in {name}: {why}" for name, why in self.without.items())
        return [f"{', '.join(what)} will stay: {sizes}", *self.remarks, *less, *nothing]

    def cuts_of(self, name: str, block: nn.Module, call: Call, rejected: Sequence[str]) -> Iterator[Cut]:
        """The cuts of a block, in the order in which it computes. rejected: why layers have no coupling."""
        usable = list(self.finder.usable(name, self.couplings[block]))
        layers = [Layer(m.name, block.get_submodule(m.name)) for c in usable for m in c.consumers]
        with self.whole.residency.open(block, keep=False) as opened:
            order = [n for site in structure_of(opened.block, [call], layers).sites for n in site] if layers else []
        places = {consumer: i for i, consumer in enumerate(order)}
        for coupling in usable:
            if lost := [m.name for m in coupling.consumers if m.name not in places]:
                raise InputError(f"{name}.{lost[0]} is called several times in one forward pass; leave its kind out")
        usable.sort(key=lambda c: min(places[m.name] for m in c.consumers))
        for part in self.p.shares:
            if not any(part_of(c) == part for c in usable):
                there = any(part_of(c) == part for c in self.couplings[block])
                why = "its layers are to be left alone" if there else "; ".join(rejected)
                self.without[f"{name or 'the model'} ({part})"] = why
        for coupling in usable:
            part = part_of(coupling)
            if part in self.p.shares:
                yield Cut(part, coupling, self.p.staying(part, coupling.groups))

    # --- channels of the hidden state

    @property
    def staying(self) -> int:
        """The number of channels of the hidden state that stay."""
        assert self.width is not None
        return self.p.staying("hidden", self.width.size)

    def width_in(self, stacks: Sequence[Stack]) -> Width:
        """The places of the hidden channels in the model as it is now. stacks: its blocks."""
        blocks = blocks_of(stacks)
        taken = {place for name, block in blocks for c in self.couplings[block] for place in taken_by(name, block, c)}
        return width_of(self.whole.model, taken, [name for name, _ in blocks if name])

    def add_width(self) -> None:
        """Find the places of the hidden channels. Adds heads to the pass where no configuration leaves them as they
        are."""
        self.width = self.width_in(self.stacks)
        layers = (name.rpartition(".")[0] for name in self.width.axes)
        if asked := next((name for name in layers if self.whole.ignored.asked_for(name)), None):
            raise InputError(f"hidden takes channels of {asked}, too, which is to be left alone; leave one of them out")
        if not self.p.heads:
            try:
                self.cut_copy({})
            except InputError as error:
                self.p = self.with_heads(self.width, error)

    def with_heads(self, width: Width, error: InputError) -> RemovalOptions:
        """The pass for a configuration that has no size of heads: as many heads go as channels of the hidden state.
        Raises the error where that is not what is wrong."""
        staying, text = self.p.staying("hidden", width.size), self.whole.model.config.get_text_config()  # type: ignore[operator,union-attr]
        groups = {c.groups for each in self.couplings.values() for c in each if part_of(c) == "heads"}
        if len(groups) != 1 or hasattr(text, "head_dim"):
            raise error
        (count,) = groups
        if count * staying % width.size:
            fits = width.size // math.gcd(width.size, count)
            raise InputError(
                f"hidden: {staying} of {width.size} channels; {type(text).__name__} has no size of heads, so heads go "
                f"with them: allowed are multiples of {fits}"
            )
        self.remarks.append(
            f"{type(text).__name__} has no size of heads, so heads go with the channels of the hidden state"
        )
        return replace(self.p, heads=1 - staying / width.size, compensate=self.p.compensate and self.p.uses_data)

    # --- the model that is left

    def unread(self, stacks: Sequence[Stack]) -> list[tuple[str, str]]:
        """`Coupling.unread` of all blocks of these stacks whose channels or heads go."""
        offers: Mapping[nn.Module, Sequence[Coupling]] = self.couplings
        if self.width is None:
            offers = {block: [cut.coupling for cut in cuts] for block, cuts in self.cuts.items()}
        return [each for name, block in blocks_of(stacks) for c in offers.get(block, ()) for each in unread_of(name, c)]

    def configuration(self, stacks: Sequence[Stack]) -> Configure:
        """The edit of the configuration of a model whose blocks are cut."""
        if self.width is None:
            return Configure(self.unread(stacks), like=self.copy)
        counts = {(c.coupling.groups, c.staying) for c in self.all_cuts}
        return Configure(self.unread(stacks), counts, self.width.configured(self.staying), self.copy)

    def cut_copy(self, cuts: Mapping[nn.Module, Sequence[Cut]]) -> nn.Module:
        """The model as it will be, without values."""
        twin = without_values(self.whole.model)
        unread: list[tuple[str, str]] = []
        known: Fields = ()
        if self.width is not None:
            narrow(twin, self.width, torch.arange(self.staying))
            known = self.width.configured(self.staying)
            unread += self.unread(self.stacks)
        for together in self.p.parts:
            now = [(name, c) for name, block in self.blocks for c in cuts.get(block, ()) if c.part in together]
            for name, cut in now:
                Keep(cut.coupling, torch.arange(cut.staying)).apply(twin.get_submodule(name))
                unread += unread_of(name, cut.coupling)
            counts = {(cut.coupling.groups, cut.staying) for _, cut in now}
            try:
                Configure(unread, counts if known else (), known).apply(twin)
            except InputError as error:
                words = " and ".join(f"{part} {getattr(self.p, part):.3g}" for part in together)
                working = self.working_shares(now) if together == ["heads"] else ""
                raise InputError(f"{words}: {error}{working}; or leave {' and '.join(together)} out") from None
            known = ()
        if self.p.layers:
            (stack,) = self.stacks
            count = len(stack.blocks)
            Drop(stack.name, tuple(range(count - self.p.layers, count))).apply(twin)
        return twin

    def working_shares(self, heads: Sequence[tuple[str, Cut]]) -> str:
        """The shares of heads that some configuration can express, in words; the `TRIED` next to what was asked for."""
        if len({(cut.coupling.groups, cut.staying) for _, cut in heads}) != 1:
            return ""
        groups, asked = heads[0][1].coupling.groups, heads[0][1].staying
        others = sorted(set(range(1, groups)) - {asked}, key=lambda count: abs(count - asked))[:TRIED]
        counts = sorted((count for count in others if self.has_configuration(heads, count)), reverse=True)
        shares = ", ".join(f"{1 - count / groups:.3g}" for count in counts)
        return f"; shares of heads that work: {shares}" if shares else ""

    def has_configuration(self, heads: Sequence[tuple[str, Cut]], staying: int) -> bool:
        """True where a configuration can say that so many of the groups of heads stay."""
        twin = without_values(self.whole.model)
        for name, cut in heads:
            Keep(cut.coupling, torch.arange(staying)).apply(twin.get_submodule(name))
        try:
            Configure([each for name, cut in heads for each in unread_of(name, cut.coupling)]).apply(twin)
        except InputError:
            return False
        return True


def check_droppable(model: nn.Module, stacks: Sequence[Stack], layers: int) -> None:
    """Raises InputError for a model of which so many blocks cannot go."""
    if not layers:
        return
    if len(find_stacks(model)) > 1:
        raise InputError(f"{type(model).__name__} has several stacks of blocks; layers takes some of one: leave it out")
    (stack,) = stacks
    if stack.container is None:
        raise InputError(f"the blocks of {type(model).__name__} are no simple chain; leave layers out")
    if layers >= len(stack.blocks):
        raise InputError(f"layers {layers}; {stack.name} has {len(stack.blocks)} blocks, of which one at least stays")
    sizes = {sum(p.numel() for p in block.parameters()) for _, block in stack.blocks}
    if len(sizes) > 1:
        raise InputError(
            f"the blocks of {stack.name} have {min(sizes)} to {max(sizes)} parameters, so what is left without "
            f"{layers} of them is not known beforehand; leave layers out"
        )
