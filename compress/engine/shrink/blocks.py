"""Blocks of a whole model before the plan is made: how each is called, and what can go of it together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from compress.base.errors import InputError
from compress.engine.plan.batches import ChainBrokenError
from compress.engine.plan.matching import Ignored, remarks_on_patterns
from compress.engine.residency import Local, Residency
from compress.engine.walk.capture import capture, check_hidden_alone, output_shape
from compress.model.calls import Batch, Call, evaluating
from compress.model.edits.folds import Fold
from compress.model.edits.keep_channels import Coupling
from compress.model.layers import Stack, find_stacks, layers_of, output_head, whole_model
from compress.model.sharing import shared_parameters
from compress.model.structure.couplings import find_couplings, why_not
from compress.model.structure.discovery import Finder, signature_of
from compress.model.structure.rotate import why_not as unpassable
from compress.model.structure.rotate import widest


def stacks_called(
    model: nn.Module, probe: Batch, residency: Local, one_block: bool
) -> tuple[list[Stack], dict[nn.Module, Call]]:
    """The stacks of a model and the probe's call of every block; the model as one block where that is asked for, or
    where its blocks are no chain."""
    stacks = find_stacks(model)
    if one_block or len(stacks) > 1:
        stacks = [whole_model(model)]
    try:
        return stacks, _probed(model, stacks, probe, residency)
    except ChainBrokenError:
        stacks = [whole_model(model)]
        return stacks, _probed(model, stacks, probe, residency)


def _probed(model: nn.Module, stacks: Sequence[Stack], probe: Batch, residency: Local) -> dict[nn.Module, Call]:
    calls: dict[nn.Module, Call] = {}
    for stack in stacks:
        captured = calls_of(model, stack, [probe], residency)
        calls |= {block: of[0] for (_, block), of in zip(stack.blocks, captured, strict=True)}
    return calls


def calls_of(model: nn.Module, stack: Stack, batches: Sequence[Batch], residency: Local) -> list[list[Call]]:
    """The calls of every block of a stack."""

    def first_output(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with residency.open(stack.blocks[0][1], keep=False) as opened:
            return output_shape(opened.block, args, kwargs)

    calls = capture(model, stack, batches, residency, first_output)
    check_hidden_alone(calls)
    return calls


class MatrixFinder:
    """Finds the folds of blocks along which a matrix passes; of a block like one that was looked at, it confirms
    them."""

    def __init__(self, model: nn.Module, residency: Residency) -> None:
        self.residency, self.shared = residency, shared_parameters(model)
        self.finder = Finder()
        self.known: dict[tuple[object, ...], dict[str, int]] = {}

    def of_all(
        self, stacks: Sequence[Stack], calls: Mapping[nn.Module, Call]
    ) -> Iterator[tuple[str, tuple[tuple[Fold, int], ...]]]:
        """(A block's name, its folds with the largest size of a matrix) of all blocks."""
        for stack in stacks:
            for name, block in stack.blocks:
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
        found = widest(block, call, fold)
        if found is not None:
            known[fold.producer] = found
        return found


class CouplingFinder:
    """Finds the couplings of blocks; of a block like one that was looked at, it confirms them."""

    def __init__(self, model: nn.Module, residency: Residency, ignored: Ignored) -> None:
        self.model, self.residency, self.ignored = model, residency, ignored
        self.shared, self.head = shared_parameters(model), output_head(model)
        self.known: dict[tuple[object, ...], tuple[tuple[Coupling, ...], tuple[str, ...]]] = {}

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
        """True if no pattern ignores a layer of the coupling, and none is the output head."""
        prefix = f"{name}." if name else ""
        names = [prefix + member.name for _, member in coupling.members()]
        asked = [self.ignored.asked_for(full) for full in names]
        return not any(asked) and all(self.model.get_submodule(full) is not self.head for full in names)

    def of_all(
        self, stacks: Sequence[Stack], calls: Mapping[nn.Module, Call]
    ) -> Iterator[tuple[str, tuple[Coupling, ...]]]:
        """(A block's name, its usable couplings) of all blocks."""
        for stack in stacks:
            for name, block in stack.blocks:
                with self.residency.open(block, keep=False) as opened, evaluating(block):
                    found, _ = self.couplings_of(name, opened.block, calls[block])
                yield name, tuple(coupling for coupling in found if self.usable(name, coupling))


def check_ignored(model: nn.Module, ignored: Ignored) -> None:
    """Raises InputError for a pattern that matches nothing of the model."""
    blocks = [each for stack in find_stacks(model) for each in stack.blocks]
    layers = [layer for name, block in blocks for layer in layers_of(block, name, convolutions=True)]
    for layer in layers:
        ignored.asked_for(layer.name)
    remarks_on_patterns(model, (), layers, ignored, convolutions=True)
