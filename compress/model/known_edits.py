"""Edits: changes of a model's weights or structure before anything in it is rounded.

`Scale`, `Rotate`, `RotateOnline` and `Permute` keep the function; `Keep` and `Drop` make a smaller model. An edit is a
value. It is made before the model is changed, applied to a block (`Drop`: to a model) and undone bit for bit. Edits
inside the loop over blocks are stored as a JSON entry and tensors, from which a resumed run applies them to the
original again.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compress.base.errors import CheckpointError, InputError, one_of
from compress.model.edits.changes import Applied
from compress.model.edits.folds import Scale
from compress.model.edits.permute_channels import Permute
from compress.model.structure.rotate import Rotate


class Applicable(Protocol):
    """A change of a module. `model.edits.changes.undo` undoes the changes that `apply` returns."""

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Change a block or model in place. stored_dtypes: {parameter name inside it: the dtype in which the model
        stores it}, for those whose present dtype is another."""
        ...


class Edit(Applicable, Protocol):
    """A change that is known before the model is changed."""

    def entry(self) -> dict[str, Any]:
        """The JSON part of the edit, with a word for its kind under "edit"."""
        ...

    def parts(self) -> dict[str, Tensor]:
        """The tensors of the edit: on the CPU, contiguous, each with its own storage."""
        ...


# Edits inside of blocks, which a resumed run reads again.
EDITS: Mapping[str, type[Scale] | type[Rotate] | type[Permute]] = {edit.kind: edit for edit in (Scale, Rotate, Permute)}


def read_edit(entry: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Edit:
    """The stored edit, of any kind. Raises CheckpointError, which names the fault."""
    try:
        kind = one_of("edit", str(entry.get("edit")), EDITS)
    except InputError as error:
        raise CheckpointError(str(error)) from None
    return EDITS[kind].read(entry, parts)
