"""What will go of a model's structure, and what will be left of it, before any weight is touched.

The couplings of every block are found (or, for a block like one that was looked at, confirmed) on one micro-batch; then
a copy of the model without values is cut as the model will be, which says whether a configuration can express that, and
how many parameters and bytes it will have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from compress.errors import InputError
from compress.model.calls import Call, evaluating
from compress.model.configured import configure, unread_of
from compress.model.couplings import find_couplings, why_not
from compress.model.discovery import signature_of
from compress.model.drop import Drop
from compress.model.keep import Coupling, Keep
from compress.model.layers import Layer, Stack, find_stacks, output_head
from compress.model.valueless import size_of, without_values
from compress.passes.structure import Part, Structure
from compress.run.cuts import NAMES, Cut, part_of
from compress.run.matching import Ignored, shared_weights
from compress.run.residency import Residency
from compress.run.structure import structure_of

MIB = 2**20


@dataclass(frozen=True)
class Size:
    """Parameters of a model, and the bytes that its tensors take in a checkpoint."""

    parameters: int
    bytes: int


@dataclass(frozen=True)
class Foreseen:
    """What will be cut of each block, in the order in which it computes, and the size of the model before and after.
    model: as it will be, without values. without: blocks in which there is nothing of the kind to cut, and why."""

    cuts: Mapping[nn.Module, tuple[Cut, ...]]
    before: Size
    after: Size
    model: nn.Module
    without: Mapping[str, str] = field(default_factory=dict)

    def notes(self, layers: int, blocks: int) -> list[str]:
        """What will be left, where so many of so many blocks go, and in which there is nothing to cut."""
        said = (f"{c.staying} of {c.coupling.groups} {NAMES[c.part]}" for cuts in self.cuts.values() for c in cuts)
        what = [*([f"{blocks - layers} of {blocks} blocks"] if layers else []), *dict.fromkeys(said)]
        before, after = self.before, self.after
        return [
            f"structure: {', '.join(what)} will stay: {after.parameters} of {before.parameters} parameters "
            f"({after.parameters / before.parameters:.1%}), {after.bytes / MIB:.2f} of {before.bytes / MIB:.2f} MiB",
            *(f"structure: nothing to cut in {name}: {why}" for name, why in self.without.items()),
        ]


class Foresight:
    """Looks at all blocks of a model for one pass."""

    def __init__(self, model: nn.Module, p: Structure, residency: Residency, ignored: Ignored) -> None:
        self.model, self.p, self.residency, self.ignored = model, p, residency, ignored
        self.shared, self.head = shared_weights(model), output_head(model)
        self.known: dict[tuple[object, ...], tuple[tuple[Coupling, ...], tuple[str, ...]]] = {}
        self.without: dict[str, str] = {}

    def foreseen(self, stacks: Sequence[Stack], calls: Mapping[nn.Module, Call]) -> Foreseen:
        """calls: of every block, one micro-batch. Raises InputError for what cannot be cut, or what no configuration
        expresses."""
        cuts: dict[nn.Module, tuple[Cut, ...]] = {}
        for stack in stacks if self.p.shares else ():
            for name, block in stack.blocks:
                cuts[block] = tuple(self.cuts_of(name, block, calls[block]))
        for part in self.p.shares:
            found = any(c.part == part for each in cuts.values() for c in each)
            if not found:
                raise InputError(f"{type(self.model).__name__} has no {part} that can be cut: {self._why_none(part)}")
        before = Size(*size_of(self.model))
        twin = self.cut_copy(stacks, cuts)
        return Foreseen(cuts, before, Size(*size_of(twin)), twin, self.without)

    def _why_none(self, part: Part) -> str:
        said = next((why for name, why in self.without.items() if name.endswith(f" ({part})")), "no layers are blocks")
        return f"{said}; leave {part} out"

    def cuts_of(self, name: str, block: nn.Module, call: Call) -> Iterator[Cut]:
        """What is cut of a block, in its order."""
        with self.residency.open(block, keep=False) as opened, evaluating(block):
            couplings, rejected = self.couplings_of(name, opened.block, call)
            usable = [c for c in couplings if self.usable(name, c)]
            layers = [Layer(m.name, block.get_submodule(m.name)) for c in usable for m in c.consumers]
            order = [n for site in structure_of(block, call, layers).sites for n in site] if layers else []
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

    def couplings_of(self, name: str, block: nn.Module, call: Call) -> tuple[tuple[Coupling, ...], tuple[str, ...]]:
        """(the couplings of an open block, why others are none)."""
        kind = signature_of(block)
        if kind not in self.known:
            result = find_couplings(block, call, self.shared)
            self.known[kind] = result.found, result.rejected
            return self.known[kind]
        couplings, rejected = self.known[kind]
        for coupling in couplings:
            if problems := why_not(block, call, coupling):
                raise InputError(
                    f"{', '.join(coupling.sizes)} of {name} cannot be cut as in blocks like it: {problems[0]}"
                )
        return couplings, rejected

    def usable(self, name: str, coupling: Coupling) -> bool:
        """Whether nobody wants any of its layers left alone, and it has no part in the output head."""
        prefix = f"{name}." if name else ""
        names = [prefix + member.name for _, member in coupling.members()]
        asked = [self.ignored.asked_for(full) for full in names]
        return not any(asked) and all(self.model.get_submodule(full) is not self.head for full in names)

    def cut_copy(self, stacks: Sequence[Stack], cuts: Mapping[nn.Module, Sequence[Cut]]) -> nn.Module:
        """The model as it will be, without values."""
        twin = without_values(self.model)
        blocks = [each for stack in stacks for each in stack.blocks]
        unread: list[tuple[str, str]] = []
        for part in self.p.shares:
            for name, cut in ((name, c) for name, block in blocks for c in cuts[block] if c.part == part):
                Keep(cut.coupling, torch.arange(cut.staying)).apply(twin.get_submodule(name))
                unread += unread_of(name, cut.coupling)
            try:
                configure(twin, unread)
            except InputError as error:
                raise InputError(f"{part} {self.p.shares[part]}: {error}; or leave {part} out") from None
        if self.p.layers:
            (stack,) = stacks
            count = len(stack.blocks)
            Drop(stack.name, tuple(range(count - self.p.layers, count))).apply(twin)
        return twin


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
