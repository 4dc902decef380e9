"""Permutes channels: the rows of their producers, the numbers in between and the inputs of their consumers alike.

    y' = P y        W_producer <- P W_producer        W_consumer <- W_consumer P^T        (W P^T)(P y) = W y

Only the order of numbers changes, so every number keeps its bits; the function is the same up to the order in which a
consumer adds. `model.structure.orders` finds the channels that may be permuted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from compress.base.errors import CheckpointError, InputError
from compress.base.schema import fits
from compress.model.edits.changes import Applied, changing
from compress.model.edits.folds import indices
from compress.model.edits.keep_channels import ROLES, take_channels


@dataclass(frozen=True, eq=False)
class ChannelOrder:
    """The new order of a module's channels. name: inside the block. order: for each place, the old channel that moves
    there (rows of a producer, inputs of a consumer)."""

    name: str
    order: Tensor


class PermuteEntry(TypedDict):
    """The JSON entry of a `Permute`; the orders are tensors."""

    edit: str
    producers: list[str]
    between: list[str]
    consumers: list[str]


@dataclass(frozen=True, eq=False)
class Permute:
    """An edit: reorders channels in all modules that hold them. Raises InputError for an order that is no
    permutation."""

    kind: ClassVar[str] = "permute"

    producers: tuple[ChannelOrder, ...]
    between: tuple[ChannelOrder, ...]
    consumers: tuple[ChannelOrder, ...]

    def __post_init__(self) -> None:
        for each in (*self.producers, *self.between, *self.consumers):
            if not torch.equal(each.order.cpu().sort().values, torch.arange(len(each.order))):
                raise InputError(f"the order of {each.name} names a channel twice; give each of its channels once")

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Reorder the tensors of a block. Parameters stay the same objects.

        Raises InputError, and undoes all changes, for a block whose layers have other widths.
        """
        with changing() as done:
            for role in ROLES:
                for each in getattr(self, role):
                    done += take_channels(module, each.name, role, each.order, len(each.order))
        return Applied(tuple(done))

    def entry(self) -> dict[str, Any]:
        return {"edit": self.kind, **{str(role): [each.name for each in getattr(self, role)] for role in ROLES}}

    def parts(self) -> dict[str, Tensor]:
        return {
            f"{role}.{i}": each.order.cpu().clone().contiguous()
            for role in ROLES
            for i, each in enumerate(getattr(self, role))
        }

    @classmethod
    def read(cls, entry: Mapping[str, Any], parts: Mapping[str, Tensor]) -> "Permute":
        """The stored edit. Raises CheckpointError for an entry that is no such edit."""
        fits(entry, PermuteEntry, "an edit that permutes channels")

        def order(name: str) -> Tensor:
            return indices(parts, name, (None,), 0, len(parts[name]) if name in parts else 0)

        members = {
            str(role): tuple(ChannelOrder(name, order(f"{role}.{i}")) for i, name in enumerate(entry[role]))
            for role in ROLES
        }
        try:
            return cls(**members)
        except InputError as error:
            raise CheckpointError(str(error)) from None
