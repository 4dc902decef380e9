"""Removes channels, attention heads and the like: a producer's rows together with the inputs that read them.

A `Coupling` names everything that must be cut together: the layers whose rows are removed, the modules in between that
hold one number per channel (a batch norm, a depthwise convolution), the layers whose inputs are removed, and the
attributes of modules that count them. Its *groups* are the smallest parts that can be removed: one channel of an MLP
(row j of gate and up, input j of down), one key-value head with its query heads. `model.structure.couplings` finds
couplings; `Keep` cuts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.base.errors import InputError
from compress.model.convolution import is_convolution
from compress.model.edits.changes import DATA, Applied, Change, change, changing

OUTSIDE = -1  # the group of a channel that is in no group and always stays
Role = Literal["producers", "between", "consumers"]
ROLES: tuple[Role, ...] = ("producers", "between", "consumers")


@dataclass(frozen=True, eq=False)
class Member:
    """A module of a coupling, by its name inside the block. group_of: the group of each channel, or OUTSIDE."""

    name: str
    group_of: Tensor


@dataclass(frozen=True)
class Number:
    """An attribute of a module that counts channels or heads: `each` times the number of groups."""

    module: str
    attribute: str
    each: int


@dataclass(frozen=True, eq=False)
class Coupling:
    """Modules that are cut together. The channels of a producer are its rows, those of a consumer its inputs.

    unread: (module, attribute) of numbers that may count channels, too, but that the block never reads: copies of
    numbers of the configuration, which `model.edits.configuration_search` updates.
    """

    groups: int
    producers: tuple[Member, ...]
    between: tuple[Member, ...]
    consumers: tuple[Member, ...]
    numbers: tuple[Number, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """{producer: rows per group}; all are 1 where single channels can be removed."""
        return {m.name: int((m.group_of != OUTSIDE).sum()) // self.groups for m in self.producers}

    def members(self) -> Iterator[tuple[Role, Member]]:
        """(Role, member) of every module."""
        for role in ROLES:
            yield from ((role, member) for member in getattr(self, role))


@dataclass(frozen=True, eq=False)
class Keep:
    """An edit: keeps the groups `kept` of a coupling, in ascending order, and removes the others."""

    kind: ClassVar[str] = "keep"

    coupling: Coupling
    kept: Tensor

    def __post_init__(self) -> None:
        given = self.kept.tolist()
        if not given or given != sorted(set(given)) or not (given[0] >= 0 and given[-1] < self.coupling.groups):
            raise InputError(
                f"groups to keep of {', '.join(self.coupling.sizes)}: {given}; give at least one, each once and in "
                f"order, from 0 to {self.coupling.groups - 1}"
            )

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Cut the tensors of a block and the counts in its modules. Parameters stay the same objects.

        Raises InputError, and undoes all changes, for a block whose layers have other widths.
        """
        with changing() as done:
            for role, member in self.coupling.members():
                done += take_channels(module, member.name, role, self.staying(member), len(member.group_of))
            for number in self.coupling.numbers:
                after = number.each * len(self.kept)
                done.append(change(module.get_submodule(number.module), number.attribute, after))
        return Applied(tuple(done))

    def staying(self, member: Member) -> Tensor:
        """The channels of a member that stay, in order."""
        return (torch.isin(member.group_of, self.kept) | (member.group_of == OUTSIDE)).nonzero().flatten()

    def entry(self) -> dict[str, Any]:
        numbers = [{"module": n.module, "attribute": n.attribute, "each": n.each} for n in self.coupling.numbers]
        entry = {"edit": self.kind, "groups": self.coupling.groups, "numbers": numbers}
        entry |= {str(role): [member.name for member in getattr(self.coupling, role)] for role in ROLES}
        return {**entry, "unread": [list(each) for each in self.coupling.unread]}

    def parts(self) -> dict[str, Tensor]:
        found = {"kept": self.kept.clone().contiguous()}
        for role in ROLES:
            members: Sequence[Member] = getattr(self.coupling, role)
            found |= {f"{role}.{i}": member.group_of.clone().contiguous() for i, member in enumerate(members)}
        return found


def dimension_of(layer: nn.Module, role: Role) -> int:
    """The dimension of a layer's stored weight that is cut: its rows (producers) or its inputs (otherwise)."""
    rows = 1 if isinstance(layer, Conv1D) else 0
    return rows if role == "producers" else 1 - rows


def number_of(layer: nn.Module, role: Role) -> str:
    """The attribute in which a layer counts its inputs (consumers) or its rows (otherwise)."""
    names = ("nf", "nx") if isinstance(layer, Conv1D) else ("out_features", "in_features")
    names = ("out_channels", "in_channels") if is_convolution(layer) else names
    return names[role == "consumers"]


def take_channels(block: nn.Module, name: str, role: Role, channels: Tensor, width: int) -> Iterator[Change]:
    """Leave a module of a block these of its channels, in this order: the entries of its tensors and the numbers that
    count them. Raises InputError for a module with another number of channels than `width`."""
    module = block.get_submodule(name)
    if role == "between":  # every tensor with an entry per channel, every number of them
        tensors = [t for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)) if t.ndim > 0]
        places = [(tensor, 0) for tensor in tensors if len(tensor) == len(tensors[0])]
        plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        counts = [name for name, value in plain.items() if type(value) is int and value == len(tensors[0])]
    else:
        places = [(module.get_parameter("weight"), dimension_of(module, role))]
        if role == "producers" and getattr(module, "bias", None) is not None:
            places.append((module.get_parameter("bias"), 0))
        counts = [number_of(module, role)]
    if other := [t.shape[dimension] for t, dimension in places if t.shape[dimension] != width]:
        raise InputError(f"{name} has {other[0]} channels; the edit is for {width}")
    for tensor, dimension in places:
        taken = tensor.data.index_select(dimension, channels.to(tensor.device)).contiguous()
        yield change(tensor, DATA, taken)
    yield from (change(module, count, len(channels)) for count in counts)


def channels_between(module: nn.Module) -> int:
    """The number of channels of a module that holds numbers per channel: the length of its first tensor."""
    return next(t.shape[0] for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)) if t.ndim > 0)
