"""Edits: changes of a model's weights or structure before anything in it is rounded.

`Scale`, `Rotate` and `Permute` leave the function as it is, `Keep` and `Drop` leave a smaller one. An edit is a value:
it is made before anything is touched, applied to a block (`Drop`: to a model), undone to the bit, and stored as a JSON
entry with tensors beside it, from which the same edit can be read and applied to the original again.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError, InputError, one_of
from compress.model.edits.changes import Applied
from compress.model.edits.drop import Drop
from compress.model.edits.folds import Scale
from compress.model.edits.keep import Keep
from compress.model.edits.permute import Permute
from compress.model.structure.rotate import Rotate


class Edit(Protocol):
    """What every edit has. `model.edits.changes.undo` takes back what `apply` returns."""

    kind: ClassVar[str]

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Change a block or model in place. stored_dtypes: by parameter name inside it, the dtype in which the model
        stores it, where that is not its present one."""
        ...

    def entry(self) -> dict[str, Any]:
        """What JSON can hold of it; its kind is under "edit"."""
        ...

    def parts(self) -> dict[str, Tensor]:
        """The tensors beside the entry: on the CPU, contiguous, with a storage of their own."""
        ...

    @classmethod
    def read(cls, entry: Mapping[str, Any], parts: Mapping[str, Tensor]) -> "Edit":
        """The edit that was stored. Raises CheckpointError that names what is wrong."""
        ...


EDITS: Mapping[str, type[Edit]] = {edit.kind: edit for edit in (Scale, Rotate, Permute, Keep, Drop)}


def read_edit(entry: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Edit:
    """The edit of any kind that was stored. Raises CheckpointError that names what is wrong."""
    try:
        kind = one_of("edit", str(entry.get("edit")), EDITS)
    except InputError as error:
        raise CheckpointError(str(error)) from None
    return EDITS[kind].read(entry, parts)
