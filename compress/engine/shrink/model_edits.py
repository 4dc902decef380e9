"""Edits of a whole model, before the loop over blocks, as a pass makes them (`Restructure.edits`).

edits -> the model that they leave, without values -> plan of the rest of the run -> the model, edited likewise
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.errors import CompressError, InputError
from compress.engine.shrink.blocks import WholeModel
from compress.engine.shrink.edit_result import ModelSize, config_of
from compress.engine.shrink.removal import removal
from compress.model.calls import evaluating, without_cache
from compress.model.edits.configuration_search import Configure, unread_of
from compress.model.edits.drop_blocks import Drop
from compress.model.edits.keep_channels import Keep
from compress.model.edits.keep_experts import KeepExperts, counts_of
from compress.model.known_edits import Applicable, Edit
from compress.model.tensors import without_values
from compress.passes.protocol.base import Pass
from compress.passes.protocol.model_view import Foreseen
from compress.passes.protocol.removal import RemovalOptions
from compress.passes.protocol.stages import Restructure

Edits = Sequence[tuple[str, Edit]]


@dataclass(frozen=True)
class ModelEdits(WholeModel):
    """The edits of one pass on one model, which it sees as a `Whole`. check: refuses, before any work, a model (without
    values) of the shapes that are to be left."""

    p: Pass
    stage: Restructure
    check: Callable[[nn.Module], None]

    def run(self) -> None:
        """Edit the model. Raises InputError, before anything is changed, for what cannot be edited; whatever is raised,
        the model is then as it was."""
        try:
            with evaluating(self.model), without_cache(self.model):
                self.carry_out()
        except BaseException:
            self.done.undo()
            raise

    def carry_out(self) -> None:
        """Ask for the edits, plan the rest of the run for the model that they leave, and make them."""
        model, done = self.model, self.done
        self.check_ignored()
        with torch.no_grad():
            asked = self.stage.edits(self)
            foreseen = asked if isinstance(asked, Foreseen) else self.tried(list(asked))
        before, after = ModelSize.of(model), ModelSize.of(foreseen.model)
        self.check(foreseen.model)
        for note in foreseen.notes(after.said(before)):
            self.note(f"{self.p.name}: {note}")
        config = config_of(model)
        done.begin(before, after)
        for name, edit in foreseen.edits():
            done.changes.append(edit.apply(model.get_submodule(name)))
        done.finish(model, config, after)

    def removal(self, p: RemovalOptions) -> Foreseen:
        """The edits that remove shares of the model."""
        return removal(self, p)

    def tried(self, edits: Edits) -> Foreseen:
        """The edits, and the model that they leave. Raises InputError where there are none, for edits that cannot be,
        that no configuration describes, of a layer that is to be left alone, and for shapes that were to stay."""
        model, name = self.model, self.p.name
        if not edits:
            raise InputError(f"{name} finds nothing to edit in {type(model).__name__}; leave it out")
        entries = self.entries(edits)
        twin = without_values(model)
        try:
            made = [edit.apply(twin.get_submodule(module)) for module, edit in described(twin, edits)]
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        owners = {id(change.owner) for changes in made for change in changes.changes}
        for key, parameter in twin.named_parameters(remove_duplicate=False):
            layer = key.rpartition(".")[0]
            if id(parameter) in owners and self.ignored.asked_for(layer):
                raise InputError(f"{name} changes {layer}, which is to be left alone; leave one of them out")
        before, after = ModelSize.of(model), ModelSize.of(twin)
        grown = self.stage.unties and after.parameters > before.parameters
        if not self.stage.removes and before != after and not grown:
            raise InputError(f"{name} says that all shapes stay, and leaves {after.said(before)}")

        def notes(sizes: str) -> list[str]:
            if grown:
                return [f"{len(edits)} edits; {sizes} then"]
            return [f"{sizes} will stay" if before != after else f"{len(edits)} edits, which remove nothing"]

        def enter() -> Iterator[tuple[str, Applicable]]:
            self.done.record["edits"] = [*self.done.record.get("edits", []), *entries]
            yield from described(model, edits, like=twin)

        return Foreseen(twin, enter, notes)

    def entries(self, edits: Edits) -> list[dict[str, Any]]:
        """The entries of compress.json about the edits. Raises CompressError where ranks have found others."""
        entries = [{"module": name, **edit.entry(), "sha256": digest(edit.parts())} for name, edit in edits]
        if any(other != entries for other in self.comm.gather_objects(entries)):
            raise CompressError(f"ranks have found other edits of {self.p.name}; it must find the same on every rank")
        return entries


def described(model: nn.Module, edits: Edits, like: nn.Module | None = None) -> Iterator[tuple[str, Applicable]]:
    """The edits of a model, and those of its configuration where these have to come. like: a model that was edited
    likewise."""
    unread: list[tuple[str, str]] = []
    for name, edit in edits:
        if isinstance(edit, Drop) and unread:  # it looks for a configuration itself
            yield "", Configure(unread)
            unread = []
        yield name, edit
        unread += unread_of(name, edit.coupling) if isinstance(edit, Keep) else ()
    if any(isinstance(edit, KeepExperts) for _, edit in edits):
        unread += counts_of(model)
    yield "", Configure(unread, like=like)


def digest(parts: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors."""
    sha = hashlib.sha256()
    for name, tensor in sorted(parts.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
