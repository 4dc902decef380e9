"""Dropping whole blocks of a stack (ShortGPT, Men et al. 2024; the unreasonable ineffectiveness of the deeper layers,
Gromov et al. 2024): those that are left follow each other directly.

The list of blocks gets shorter, the blocks are renumbered where they know their number (an attention its place in the
cache), and the configuration says how many there are and of which kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from compress.errors import InputError
from compress.model.edits.changes import Applied, Change, change, changing
from compress.model.edits.configured import configure
from compress.system.schema import fits


class DropEntry(TypedDict):
    """A `Drop` as JSON has it."""

    edit: str
    stack: str
    indices: list[int]


@dataclass(frozen=True)
class Drop:
    """The edit, of a whole model: blocks of a stack, by its name and their places in it."""

    kind: ClassVar[str] = "drop"

    stack: str
    indices: tuple[int, ...]

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Shorten the list in a model. Raises InputError where there is no such block, or no configuration for what
        would be left; the model is then as it was."""
        container = dict(module.named_modules()).get(self.stack)
        if not isinstance(container, nn.ModuleList):
            raise InputError(f"{type(module).__name__} has no list of blocks {self.stack!r} to drop some of")
        count, gone = len(container), set(self.indices)
        if not gone or gone >= set(range(count)) or not gone <= set(range(count)) or len(gone) != len(self.indices):
            raise InputError(
                f"blocks to drop of {self.stack}: {list(self.indices)}; it has {count}: give each once, from 0 to "
                f"{count - 1}, and leave one"
            )
        kept = [i for i in range(count) if i not in gone]
        blocks = list(container)
        with changing() as done:
            done += _renumber(blocks, kept)
            done.append(change(container, "_modules", {str(new): blocks[old] for new, old in enumerate(kept)}))
            done += configure(module, pairs=[(count, len(kept))], kept=kept).changes
        return Applied(tuple(done))

    def entry(self) -> dict[str, Any]:
        """A `DropEntry`."""
        return {"edit": self.kind, "stack": self.stack, "indices": list(self.indices)}

    def parts(self) -> dict[str, Tensor]:
        """None: the entry says all."""
        return {}

    @classmethod
    def read(cls, entry: Mapping[str, Any], parts: Mapping[str, Tensor]) -> "Drop":
        """What was stored. Raises CheckpointError for what is no such edit."""
        fits(entry, DropEntry, "an edit that drops blocks")
        return cls(entry["stack"], tuple(entry["indices"]))


def _renumber(blocks: Sequence[nn.Module], kept: Sequence[int]) -> list[Change]:
    """Attributes that are the number of the block in every block that has them get the new number."""
    values: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for i, block in enumerate(blocks):
        for name, module in block.named_modules():
            for attribute, value in vars(module).items():
                if type(value) is int and not attribute.startswith("_"):
                    values.setdefault((name, attribute), []).append((i, value))
    counting = [
        key for key, found in values.items() if len(found) > 1 and all(index == value for index, value in found)
    ]
    return [
        change(dict(blocks[old].named_modules())[name], attribute, new)
        for new, old in enumerate(kept)
        for name, attribute in counting
        if hasattr(dict(blocks[old].named_modules()).get(name), attribute)
    ]
