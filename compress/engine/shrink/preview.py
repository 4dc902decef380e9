"""Foresight of a structured pruning: what it will remove and leave, before any weight is touched.

The couplings of every block are found (or, for a block like one that was looked at, confirmed) on one micro-batch; then
a copy of the model without values is cut as the model will be, which says whether a configuration can express that, and
how many parameters and bytes it will have.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import nn

from compress.base.errors import InputError
from compress.engine.plan.matching import Ignored
from compress.engine.residency import Residency
from compress.engine.shrink.blocks import CouplingFinder
from compress.engine.shrink.cuts import NAMES, Cut, part_of
from compress.engine.shrink.edit_result import ModelSize
from compress.engine.walk.sites import structure_of
from compress.model.calls import Call, evaluating
from compress.model.edits.configuration_search import Fields, configure, unread_of
from compress.model.edits.drop_blocks import Drop
from compress.model.edits.keep_channels import Coupling, Keep
from compress.model.edits.width import Width, narrow, taken_by, width_of
from compress.model.layers import Layer, Stack, find_stacks
from compress.model.meta_copy import size_of, without_values
from compress.passes.protocol.removal import RemovalOptions

CLEARLY = 0.1  # of the share that was asked for
TRIED = 16  # numbers of heads, where the one that was asked for does not work


@dataclass(frozen=True)
class Foreseen:
    """Cuts of each block, in the order in which it computes, and the size of the model before and after. p: the pass,
    extended by the parts that must go with those it names. model: as it will be, without values. couplings: of every
    block, where they are known. without: blocks in which there is nothing of the kind to cut, and why."""

    p: RemovalOptions
    cuts: Mapping[nn.Module, tuple[Cut, ...]]
    before: ModelSize
    after: ModelSize
    model: nn.Module
    couplings: Mapping[nn.Module, tuple[Coupling, ...]] = field(default_factory=dict)
    width: int | None = None
    without: Mapping[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()

    def notes(self, layers: int, blocks: int) -> list[str]:
        """Lines about the parameters left, where `layers` of `blocks` go, and about blocks without anything to cut."""
        said = (f"{c.staying} of {c.coupling.groups} {NAMES[c.part]}" for cuts in self.cuts.values() for c in cuts)
        what = [*([f"{blocks - layers} of {blocks} blocks"] if layers else []), *dict.fromkeys(said)]
        if self.width is not None:
            what.append(f"{self.p.staying('hidden', self.width)} of {self.width} channels of the hidden state")
        return [
            f"structure: {', '.join(what)} will stay: {self.after.said(self.before)}",
            *(f"structure: {each}" for each in (*self.said, *self._less())),
            *(f"structure: nothing to cut in {name}: {why}" for name, why in self.without.items()),
        ]

    def _less(self) -> list[str]:
        """Lines about parts of which clearly less goes than the share that was asked for."""
        found: dict[str, None] = {}
        for c in (c for cuts in self.cuts.values() for c in cuts):
            share, gone, groups = getattr(self.p, c.part), c.coupling.groups - c.staying, c.coupling.groups
            if gone < (1 - CLEARLY) * share * groups:
                found[f"{c.part} {share:.3g} is less than {gone + 1} of {groups} {NAMES[c.part]}: removed {gone}"] = (
                    None
                )
        return [*found]


class Foresight:
    """Looks at all blocks of a model for one pass."""

    def __init__(self, model: nn.Module, p: RemovalOptions, residency: Residency, ignored: Ignored) -> None:
        self.model, self.p, self.residency, self.ignored = model, p, residency, ignored
        self.finder = CouplingFinder(model, residency, ignored)
        self.couplings: dict[nn.Module, tuple[Coupling, ...]] = {}
        self.without: dict[str, str] = {}
        self.said: list[str] = []

    def foreseen(self, stacks: Sequence[Stack], calls: Mapping[nn.Module, Call]) -> Foreseen:
        """calls: of every block, one micro-batch. Raises InputError for what cannot be cut, or what no configuration
        expresses."""
        cuts: dict[nn.Module, tuple[Cut, ...]] = {}
        width = self.width(stacks, calls) if self.p.hidden else None
        for stack in stacks if self.p.shares else ():
            for name, block in stack.blocks:
                cuts[block] = tuple(self.cuts_of(name, block, calls[block]))
        for part in self.p.shares:
            found = any(c.part == part for each in cuts.values() for c in each)
            if not found:
                why = (why for name, why in self.without.items() if name.endswith(f" ({part})"))
                raise InputError(
                    f"{type(self.model).__name__} has no {part} that can be cut: {next(why, 'no layers are blocks')}; "
                    f"leave {part} out"
                )
        before = ModelSize(*size_of(self.model))
        twin = self.cut_copy(stacks, cuts, width)
        after = ModelSize(*size_of(twin))
        size = None if width is None else width.size
        return Foreseen(self.p, cuts, before, after, twin, self.couplings, size, self.without, tuple(self.said))

    def cuts_of(self, name: str, block: nn.Module, call: Call) -> Iterator[Cut]:
        """The cuts of a block, in the order in which it computes."""
        with self.residency.open(block, keep=False) as opened, evaluating(block):
            couplings, rejected = self.finder.couplings_of(name, opened.block, call)
            self.couplings[block] = couplings
            usable = [c for c in couplings if self.finder.usable(name, c)]
            layers = [Layer(m.name, block.get_submodule(m.name)) for c in usable for m in c.consumers]
            order = [n for site in structure_of(block, [call], layers).sites for n in site] if layers else []
        places = {consumer: i for i, consumer in enumerate(order)}
        for coupling in usable:
            if lost := [m.name for m in coupling.consumers if m.name not in places]:
                raise InputError(f"{name}.{lost[0]} is called several times in one forward pass; leave its kind out")
        usable.sort(key=lambda c: min(places[m.name] for m in c.consumers))
        for part in self.p.shares:
            if not any(part_of(c) == part for c in usable):
                there = any(part_of(c) == part for c in couplings)
                why = "its layers are to be left alone" if there else "; ".join(rejected)
                self.without[f"{name or 'the model'} ({part})"] = why
        for coupling in usable:
            part = part_of(coupling)
            if part in self.p.shares:
                yield Cut(part, coupling, self.p.staying(part, coupling.groups))

    # --- channels of the hidden state

    def width(self, stacks: Sequence[Stack], calls: Mapping[nn.Module, Call]) -> Width:
        """The places of the hidden channels. Adds heads to the pass where no configuration leaves them as they are."""
        for name, block in chain.from_iterable(stack.blocks for stack in stacks):
            with self.residency.open(block, keep=False) as opened, evaluating(block):
                self.couplings[block], _ = self.finder.couplings_of(name, opened.block, calls[block])
        width = hidden_width(self.model, stacks, self.couplings)
        ignored = (name.rpartition(".")[0] for name in width.axes)
        if asked := next((name for name in ignored if self.ignored.asked_for(name)), None):
            raise InputError(f"hidden takes channels of {asked}, too, which is to be left alone; leave one of them out")
        if not self.p.heads:
            try:
                self.cut_copy(stacks, {}, width)
            except InputError as error:
                self.p = self.with_heads(width, error)
        return width

    def with_heads(self, width: Width, error: InputError) -> RemovalOptions:
        """The pass for a configuration that has no size of heads: as many heads go as channels of the hidden state.
        Raises the error where that is not what is wrong."""
        staying, text = self.p.staying("hidden", width.size), self.model.config.get_text_config()  # type: ignore[operator,union-attr]
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
        self.said.append(
            f"{type(text).__name__} has no size of heads, so heads go with the channels of the hidden state"
        )
        return replace(self.p, heads=1 - staying / width.size, compensate=self.p.compensate and self.p.uses_data)

    def cut_copy(
        self, stacks: Sequence[Stack], cuts: Mapping[nn.Module, Sequence[Cut]], width: Width | None
    ) -> nn.Module:
        """The model as it will be, without values."""
        twin = without_values(self.model)
        blocks = [each for stack in stacks for each in stack.blocks]
        unread: list[tuple[str, str]] = []
        known: Fields = ()
        if width is not None:
            staying = self.p.staying("hidden", width.size)
            narrow(twin, width, torch.arange(staying))
            known = width.configured(staying)
            unread += unread_of_all(stacks, self.couplings)
        for together in self.p.parts:
            for name, cut in ((name, c) for name, block in blocks for c in cuts.get(block, ()) if c.part in together):
                Keep(cut.coupling, torch.arange(cut.staying)).apply(twin.get_submodule(name))
                unread += unread_of(name, cut.coupling)
            counts = {(c.coupling.groups, c.staying) for each in cuts.values() for c in each if c.part in together}
            try:
                configure(twin, unread, counts if known else (), known=known)
            except InputError as error:
                said = " and ".join(f"{part} {getattr(self.p, part):.3g}" for part in together)
                working = self.working(stacks, cuts) if together == ["heads"] else ""
                raise InputError(f"{said}: {error}{working}; or leave {' and '.join(together)} out") from None
            known = ()
        if self.p.layers:
            (stack,) = stacks
            count = len(stack.blocks)
            Drop(stack.name, tuple(range(count - self.p.layers, count))).apply(twin)
        return twin

    def working(self, stacks: Sequence[Stack], cuts: Mapping[nn.Module, Sequence[Cut]]) -> str:
        """The shares of heads that some configuration can express, in words; the `TRIED` next to what was asked for."""
        heads = [(name, c) for stack in stacks for name, block in stack.blocks for c in cuts.get(block, ())]
        heads = [(name, c) for name, c in heads if c.part == "heads"]
        if len({(c.coupling.groups, c.staying) for _, c in heads}) != 1:
            return ""
        groups, asked = heads[0][1].coupling.groups, heads[0][1].staying
        others = sorted(set(range(1, groups)) - {asked}, key=lambda count: abs(count - asked))[:TRIED]
        counts = sorted((count for count in others if self.has_configuration(heads, count)), reverse=True)
        shares = ", ".join(f"{1 - count / groups:.3g}" for count in counts)
        return f"; shares of heads that work: {shares}" if shares else ""

    def has_configuration(self, heads: Sequence[tuple[str, Cut]], staying: int) -> bool:
        """True where a configuration can say that so many of the groups of heads stay."""
        twin = without_values(self.model)
        for name, cut in heads:
            Keep(cut.coupling, torch.arange(staying)).apply(twin.get_submodule(name))
        try:
            configure(twin, [each for name, cut in heads for each in unread_of(name, cut.coupling)])
        except InputError:
            return False
        return True


def hidden_width(model: nn.Module, stacks: Sequence[Stack], couplings: Mapping[nn.Module, Sequence[Coupling]]) -> Width:
    """The places of a model's hidden channels. Raises InputError where they cannot be told."""
    blocks = [each for stack in stacks for each in stack.blocks]
    taken = {place for name, block in blocks for c in couplings[block] for place in taken_by(name, block, c)}
    return width_of(model, taken, [name for name, _ in blocks if name])


def unread_of_all(stacks: Sequence[Stack], couplings: Mapping[nn.Module, Sequence[Coupling]]) -> list[tuple[str, str]]:
    """`Coupling.unread` of all blocks."""
    blocks = (each for stack in stacks for each in stack.blocks)
    return [each for name, block in blocks for c in couplings[block] for each in unread_of(name, c)]


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
