"""Edits of a whole model, before the loop over blocks, as a pass makes them (`Restructure.edits`).

edits -> a copy without values, edited -> configuration -> plan of the rest of the run -> the model, edited likewise
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import CompressError, InputError
from compress.base.progress import Reporter
from compress.engine.plan.matching import Ignored
from compress.engine.residency import Local
from compress.engine.shrink.blocks import CouplingFinder, MatrixFinder, calls_of, check_ignored, stacks_called
from compress.engine.shrink.edit_result import ModelSize, Restructured, config_of
from compress.engine.walk.state import Streams
from compress.model.calls import Batch, evaluating, without_cache
from compress.model.edits.changes import Applied
from compress.model.edits.configuration_search import configure, unread_of
from compress.model.edits.drop_blocks import Drop
from compress.model.edits.folds import Fold
from compress.model.edits.keep_channels import Coupling, Keep
from compress.model.edits.keep_experts import KeepExperts, counts_of
from compress.model.known_edits import Edit
from compress.model.layers import Stack
from compress.model.meta_copy import size_of, without_values
from compress.model.structure.streams import FoundStreams, find_streams
from compress.passes.protocol.base import Pass
from compress.passes.protocol.model_view import WatchBlock, Whole
from compress.passes.protocol.stages import Restructure

Edits = Sequence[tuple[str, Edit]]


@dataclass(frozen=True)
class Editing:
    """The edits of one pass on one model. The fields are those of `Restructuring`."""

    model: nn.Module
    p: Pass
    batches: Sequence[Batch]
    probe: Callable[[], Batch]
    residency: Local
    ignored: Ignored
    check: Callable[[nn.Module], None]
    comm: Comm
    reporter: Reporter
    done: Restructured = field(default_factory=Restructured)

    def run(self, one_block: bool) -> Restructured:
        """Edit the model. Raises InputError, before anything is changed, for what cannot be edited; whatever is raised,
        the model is then as it was."""
        try:
            with evaluating(self.model), without_cache(self.model):
                self.carry_out(one_block)
        except BaseException:
            self.done.undo()
            raise
        return self.done

    def carry_out(self, one_block: bool) -> None:
        """Ask for the edits, try them on a copy, plan the rest for that, and edit the model."""
        check_ignored(self.model, self.ignored)
        stage = self.p.stage(Restructure)
        assert stage is not None
        assert stage.edits is not None
        with torch.no_grad():
            edits = list(stage.edits(self.whole(one_block)))
        entries = self.entries(edits)
        twin = self.tried(edits)
        before, after = ModelSize(*size_of(self.model)), ModelSize(*size_of(twin))
        grown = stage.unties and after.parameters > before.parameters
        if not stage.removes and before != after and not grown:
            raise InputError(f"{self.p.name} says that all shapes stay, and leaves {after.said(before)}")
        self.check(twin)
        if grown:
            self.note(f"{self.p.name}: {len(edits)} edits; {after.said(before)} then")
        elif before != after:
            self.note(f"{self.p.name}: {after.said(before)} will stay")
        else:
            self.note(f"{self.p.name}: {len(edits)} edits, which remove nothing")
        config = config_of(self.model)
        self.done.begin(before, after)
        self.done.record["edits"] = [*self.done.record.get("edits", []), *entries]
        for changes in applied(self.model, edits, like=twin):
            self.done.changes.append(changes)
        self.done.finish(self.model, config, after)

    def whole(self, one_block: bool) -> Whole:
        """The model as the pass sees it."""

        @torch.enable_grad()  # the finder follows gradients
        def couplings() -> Mapping[str, Sequence[Coupling]]:
            stacks, calls = stacks_called(self.model, self.probe(), self.residency, one_block)
            return dict(CouplingFinder(self.model, self.residency, self.ignored).of_all(stacks, calls))

        def streams() -> FoundStreams:
            return find_streams(self.model, self.probe())

        @torch.enable_grad()
        def matrix_folds() -> Mapping[str, Sequence[tuple[Fold, int]]]:
            stacks, calls = stacks_called(self.model, self.probe(), self.residency, one_block)
            return dict(MatrixFinder(self.model, self.residency).of_all(stacks, calls))

        def through(watch: WatchBlock) -> None:
            stacks, _ = stacks_called(self.model, self.probe(), self.residency, one_block)
            for stack in stacks:
                self.watched(stack, watch)

        return Whole(self.model, self.batches, self.comm, couplings, streams, matrix_folds, through, self.note)

    def watched(self, stack: Stack, watch: WatchBlock) -> None:
        """Run this rank's micro-batches through a stack, each call of a block inside the context that `watch` makes."""
        captured = calls_of(self.model, stack, self.batches, self.residency)
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

    def note(self, said: str) -> None:
        """Tell the person something, and enter it into the record."""
        self.done.notes.append(said)
        self.reporter.note(said)

    def entries(self, edits: Edits) -> list[dict[str, Any]]:
        """The entries of compress.json about the edits. Raises InputError where there are none, and CompressError where
        ranks have found others."""
        if not edits:
            raise InputError(f"{self.p.name} finds nothing to edit in {type(self.model).__name__}; leave it out")
        found = [{"module": name, **edit.entry(), "sha256": digest(edit.parts())} for name, edit in edits]
        if any(other != found for other in self.comm.gather_objects(found)):
            raise CompressError(f"ranks have found other edits of {self.p.name}; it must find the same on every rank")
        return found

    def tried(self, edits: Edits) -> nn.Module:
        """The edited model, without values. Raises InputError for edits that cannot be, that no configuration
        describes, or of a layer that is to be left alone."""
        twin = without_values(self.model)
        try:
            done = list(applied(twin, edits))
        except InputError as error:
            raise InputError(f"{self.p.name}: {error}") from None
        owners = {id(change.owner) for changes in done for change in changes.changes}
        for name, parameter in twin.named_parameters(remove_duplicate=False):
            layer = name.rpartition(".")[0]
            if id(parameter) in owners and self.ignored.asked_for(layer):
                raise InputError(f"{self.p.name} changes {layer}, which is to be left alone; leave one of them out")
        return twin


def applied(model: nn.Module, edits: Edits, like: nn.Module | None = None) -> Iterator[Applied]:
    """The changes of each edit of a model, and of its configuration, as they are made. like: a model that was edited
    likewise. Raises InputError where no configuration describes the edited model."""
    unread: list[tuple[str, str]] = []
    for name, edit in edits:
        if isinstance(edit, Drop) and unread:  # it looks for a configuration itself
            yield configure(model, unread)
            unread = []
        yield edit.apply(model.get_submodule(name))
        unread += unread_of(name, edit.coupling) if isinstance(edit, Keep) else ()
    if any(isinstance(edit, KeepExperts) for _, edit in edits):
        unread += counts_of(model)
    yield configure(model, unread, like=like)


def digest(parts: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(parts.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
