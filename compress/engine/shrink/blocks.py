"""A whole model before the plan is made: how its blocks are called, and what can go of each together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.progress import Reporter, tell
from compress.engine.plan.batches import ChainBrokenError
from compress.engine.plan.treatable_layers import Ignored, remarks_on_patterns
from compress.engine.residency import Local, Residency
from compress.engine.shrink.edit_result import Restructured
from compress.engine.walk.capture import capture, check_hidden_alone
from compress.engine.walk.state import Streams
from compress.model.calls import Batch, Call, evaluating
from compress.model.edits.folds import Fold
from compress.model.edits.keep_channels import Coupling
from compress.model.layers import Stack, find_stacks, layers_of, output_head, whole_model
from compress.model.sharing import shared_parameters
from compress.model.structure.couplings import find_couplings, why_not
from compress.model.structure.discovery import Finder, signature_of
from compress.model.structure.rotate import why_not as unpassable
from compress.model.structure.rotate import widest
from compress.model.structure.streams import FoundStreams, find_streams
from compress.passes.protocol.model_view import WatchBlock


@dataclass(frozen=True)
class WholeModel:
    """A model in memory as a whole, on every rank, which one pass edits.

    batches: this rank's. probe: makes one micro-batch, the same on every rank. ignored: layers to be left alone.
    one_block: whether the model is one block. done: what this pass and those before it have edited.
    """

    model: nn.Module
    batches: Sequence[Batch]
    probe: Callable[[], Batch]
    residency: Local
    ignored: Ignored
    one_block: bool
    comm: Comm
    reporter: Reporter
    done: Restructured

    @cached_property
    def probed(self) -> tuple[list[Stack], dict[nn.Module, Call]]:
        """The stacks before any edit, and the probe's call of every block; the model as one block where that is asked
        for, or where its blocks are no chain."""
        stacks = find_stacks(self.model)
        if self.one_block or len(stacks) > 1:
            stacks = [whole_model(self.model)]
        try:
            return stacks, self._probed(stacks)
        except ChainBrokenError:
            stacks = [whole_model(self.model)]
            return stacks, self._probed(stacks)

    def _probed(self, stacks: Sequence[Stack]) -> dict[nn.Module, Call]:
        calls: dict[nn.Module, Call] = {}
        for stack in stacks:
            captured = self.calls_of(stack, [self.probe()])
            calls |= {block: of[0] for (_, block), of in zip(stack.blocks, captured, strict=True)}
        return calls

    def calls_of(self, stack: Stack, batches: Sequence[Batch] | None = None) -> list[list[Call]]:
        """The calls of every block of a stack. batches: this rank's, unless given."""
        calls = capture(self.model, stack, self.batches if batches is None else batches, self.residency)
        check_hidden_alone(calls)
        return calls

    def streams(self) -> FoundStreams:
        """The hidden states that take a rotation."""
        return find_streams(self.model, self.probe())

    def matrix_folds(self) -> dict[str, tuple[tuple[Fold, int], ...]]:
        """{block: its folds along which a matrix passes, with the largest size of one}."""
        return dict(MatrixFinder(self.model, self.residency).of_all(*self.probed))

    def couplings(self) -> dict[str, tuple[Coupling, ...]]:
        """{block: its couplings of which no layer is to be left alone}."""
        finder, (stacks, _) = CouplingFinder(self), self.probed
        return {name: finder.usable(name, finder.of(name, block)[0]) for name, block in blocks_of(stacks)}

    def through(self, watch: WatchBlock) -> None:
        """Run this rank's micro-batches through all blocks, each call inside the context that `watch` makes."""
        tell(self.reporter, "phase", "measure", "part")
        for stack in self.probed[0]:
            captured = self.calls_of(stack)
            streams = Streams(captured[0], [])
            for i, (name, block) in enumerate(stack.blocks):
                self.reporter.step(i, len(stack.blocks), "")
                streams, captured[i] = streams.called_as(captured[i]), []
                outputs = []
                with self.residency.open(block, keep=False) as opened, torch.no_grad():
                    for call in streams.calls:
                        with watch(opened.block, call):
                            outputs.append(opened.block(*call.args, **call.kwargs))
                streams = streams.after(outputs, [])
                self.reporter.step(i + 1, len(stack.blocks), name)

    def check_ignored(self) -> None:
        """Raises InputError for a pattern that matches nothing of the model."""
        blocks = blocks_of(find_stacks(self.model))
        layers = [layer for name, block in blocks for layer in layers_of(block, name, convolutions=True)]
        for layer in layers:
            self.ignored.asked_for(layer.name)
        remarks_on_patterns(self.model, (), layers, self.ignored, convolutions=True)

    def note(self, message: str) -> None:
        """Tell the person something, and enter it into the record."""
        self.done.notes.append(message)
        self.reporter.note(message)


def blocks_of(stacks: Sequence[Stack]) -> list[tuple[str, nn.Module]]:
    """(Name, block) of all stacks."""
    return [each for stack in stacks for each in stack.blocks]


class MatrixFinder:
    """Finds the folds of blocks along which a matrix passes; of a block like one that was looked at, it confirms
    them."""

    def __init__(self, model: nn.Module, residency: Residency) -> None:
        self.residency, self.shared = residency, shared_parameters(model)
        self.finder = Finder()
        self.known: dict[tuple[object, ...], dict[str, int]] = {}

    @torch.enable_grad()  # the finder follows gradients
    def of_all(
        self, stacks: Sequence[Stack], calls: Mapping[nn.Module, Call]
    ) -> Iterator[tuple[str, tuple[tuple[Fold, int], ...]]]:
        """(A block's name, its folds with the largest size of a matrix) of all blocks."""
        for name, block in blocks_of(stacks):
            with self.residency.open(block, keep=False) as opened, evaluating(block):
                folds = self.finder.find(opened.block, calls[block], self.shared).folds
                sizes = [(fold, self.size_of(opened.block, calls[block], fold)) for fold in folds]
            yield name, tuple((fold, size) for fold, size in sizes if size is not None)

    def size_of(self, block: nn.Module, call: Call, fold: Fold) -> int | None:
        """The largest size of a matrix for a fold of a block."""
        known = self.known.setdefault(signature_of(block), {})
        likely = known.get(fold.producer)
        if likely is not None and not unpassable(block, call, fold, likely):
            return likely
        size = widest(block, call, fold)
        if size is not None:
            known[fold.producer] = size
        return size


class CouplingFinder:
    """Finds the couplings of blocks; of a block like one that was looked at, it confirms them."""

    def __init__(self, whole: WholeModel) -> None:
        self.whole, (_, self.calls) = whole, whole.probed
        self.shared, self.head = shared_parameters(whole.model), output_head(whole.model)
        self.known: dict[tuple[object, ...], tuple[tuple[Coupling, ...], tuple[str, ...]]] = {}

    @torch.enable_grad()  # the search follows gradients
    def of(self, name: str, block: nn.Module) -> tuple[tuple[Coupling, ...], tuple[str, ...]]:
        """(The couplings of a block, why others are none.) Raises InputError for one that cannot be cut like the blocks
        of its kind."""
        kind, call = signature_of(block), self.calls[block]
        with self.whole.residency.open(block, keep=False) as opened, evaluating(block):
            if kind not in self.known:
                result = find_couplings(opened.block, call, self.shared)
                self.known[kind] = result.found, result.rejected
                return self.known[kind]
            for coupling in self.known[kind][0]:
                if problems := why_not(opened.block, call, coupling):
                    raise InputError(
                        f"{', '.join(coupling.sizes)} of {name} cannot be cut as in blocks like it: {problems[0]}"
                    )
        return self.known[kind]

    def usable(self, name: str, couplings: Sequence[Coupling]) -> tuple[Coupling, ...]:
        """The couplings of a block of which no pattern ignores a layer, and none is the output head."""
        return tuple(coupling for coupling in couplings if self._is_usable(f"{name}." if name else "", coupling))

    def _is_usable(self, prefix: str, coupling: Coupling) -> bool:
        names = [prefix + member.name for _, member in coupling.members()]
        asked = [self.whole.ignored.asked_for(full) for full in names]
        return not any(asked) and all(self.whole.model.get_submodule(full) is not self.head for full in names)
