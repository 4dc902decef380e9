"""Drops whole blocks of a stack (ShortGPT, Men et al. 2024; the unreasonable ineffectiveness of the deeper layers,
Gromov et al. 2024): the remaining blocks follow each other directly.

The list of blocks gets shorter, blocks that hold their number are renumbered (an attention holds its place in the
cache), and the configuration gets the new number of blocks and their kinds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.base.errors import InputError
from compress.model.edits.changes import Applied, Change, change, changing
from compress.model.edits.configuration_search import configure


@dataclass(frozen=True)
class Drop:
    """An edit of a whole model: drops the blocks at `indices` of the stack (ModuleList) named `stack`."""

    kind: ClassVar[str] = "drop"

    stack: str
    indices: tuple[int, ...]

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Shorten the list in a model. Raises InputError, and leaves the model as it was, for a stack or blocks that do
        not exist, and where no configuration describes the remaining model."""
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
        return {"edit": self.kind, "stack": self.stack, "indices": list(self.indices)}

    def parts(self) -> dict[str, Tensor]:
        return {}


def _renumber(blocks: Sequence[nn.Module], kept: Sequence[int]) -> list[Change]:
    """Renumber the attributes that hold the block's number in every block that has them."""
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
