"""Removes channels, attention heads and the like: a producer's rows together with the inputs that read them.

A `Coupling` names everything that must be cut together: the layers whose rows are removed, the modules in between that
hold one number per channel (a batch norm, a depthwise convolution), the layers whose inputs are removed, and the
attributes of modules that count them. Its *groups* are the smallest parts that can be removed: one channel of an MLP
(row j of gate and up, input j of down), one key-value head with its query heads. `model.structure.couplings` finds
couplings; `Keep` cuts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.base.errors import CheckpointError, InputError
from compress.base.schema import fits
from compress.model.convolution import is_convolution
from compress.model.edits.changes import DATA, Applied, Change, change, changing
from compress.model.edits.parts import indices

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


class KeepEntry(TypedDict):
    """The JSON entry of a `Keep`; the group of every channel and the kept groups are tensors."""

    edit: str
    groups: int
    producers: list[str]
    between: list[str]
    consumers: list[str]
    numbers: list[Number]
    unread: list[tuple[str, str]]


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

        Raises InputError, before any change, for a block whose layers have other widths.
        """
        modules = {name: module.get_submodule(name) for name in {m.name for _, m in self.coupling.members()}}
        for role, member in self.coupling.members():
            width = _width(modules[member.name], role)
            if width not in (None, len(member.group_of)):
                raise InputError(f"{member.name} has {width} channels; the edit is for {len(member.group_of)}")
        with changing() as done:
            for role, member in self.coupling.members():
                staying = self.staying(member)
                cut = _cut_between if role == "between" else _cut_layer
                done += cut(modules[member.name], staying, role)
            for number in self.coupling.numbers:
                after = number.each * len(self.kept)
                done.append(change(module.get_submodule(number.module), number.attribute, after))
        return Applied(tuple(done))

    def staying(self, member: Member) -> Tensor:
        """The channels of a member that stay, in order."""
        return (torch.isin(member.group_of, self.kept) | (member.group_of == OUTSIDE)).nonzero().flatten()

    def entry(self) -> dict[str, Any]:
        """A `KeepEntry`."""
        numbers = [{"module": n.module, "attribute": n.attribute, "each": n.each} for n in self.coupling.numbers]
        entry = {"edit": self.kind, "groups": self.coupling.groups, "numbers": numbers}
        entry |= {str(role): [member.name for member in getattr(self.coupling, role)] for role in ROLES}
        return {**entry, "unread": [list(each) for each in self.coupling.unread]}

    def parts(self) -> dict[str, Tensor]:
        """The kept groups, and the group of every channel of every member."""
        found = {"kept": self.kept.clone().contiguous()}
        for role in ROLES:
            members: Sequence[Member] = getattr(self.coupling, role)
            found |= {f"{role}.{i}": member.group_of.clone().contiguous() for i, member in enumerate(members)}
        return found

    @classmethod
    def read(cls, entry: Mapping[str, Any], parts: Mapping[str, Tensor]) -> "Keep":
        """The stored edit. Raises CheckpointError for an entry that is no such edit."""
        fits(entry, KeepEntry, "an edit that keeps channels")
        groups = entry["groups"]
        members = {
            str(role): tuple(
                Member(name, indices(parts, f"{role}.{i}", (None,), OUTSIDE, groups))
                for i, name in enumerate(entry[role])
            )
            for role in ROLES
        }
        numbers = tuple(Number(**number) for number in entry["numbers"])
        unread = tuple((module, attribute) for module, attribute in entry["unread"])
        coupling = Coupling(groups, **members, numbers=numbers, unread=unread)
        kept = indices(parts, "kept", (None,), 0, groups)
        try:
            return cls(coupling, kept)
        except InputError as error:
            raise CheckpointError(str(error)) from None


def dimension_of(layer: nn.Module, role: Role) -> int:
    """The dimension of a layer's stored weight that is cut: its rows (producers) or its inputs (otherwise)."""
    rows = 1 if isinstance(layer, Conv1D) else 0
    return rows if role == "producers" else 1 - rows


def number_of(layer: nn.Module, role: Role) -> str:
    """The attribute in which a layer counts its inputs (consumers) or its rows (otherwise)."""
    names = ("nf", "nx") if isinstance(layer, Conv1D) else ("out_features", "in_features")
    names = ("out_channels", "in_channels") if is_convolution(layer) else names
    return names[role == "consumers"]


def _width(module: nn.Module, role: Role) -> int | None:
    """The number of channels of a member; None for one in between, or without a weight."""
    weight = module._parameters.get("weight")
    if role == "between" or weight is None:
        return None
    return weight.shape[dimension_of(module, role)]


def _cut_layer(layer: nn.Module, staying: Tensor, role: Role) -> list[Change]:
    weight, bias = layer.weight, getattr(layer, "bias", None)
    assert isinstance(weight, nn.Parameter)
    done = [_cut(weight, dimension_of(layer, role), staying)]
    if role == "producers" and bias is not None:
        done.append(_cut(bias, 0, staying))
    done.append(change(layer, number_of(layer, role), len(staying)))
    return done


def _cut_between(module: nn.Module, staying: Tensor, role: Role) -> list[Change]:
    """Cut every tensor with an entry per channel, and every number that counts the channels."""
    done: list[Change] = []
    width = channels_between(module)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.ndim > 0 and tensor.shape[0] == width:
            done.append(_cut(tensor, 0, staying))
    for name, value in list(vars(module).items()):
        if not name.startswith("_") and type(value) is int and value == width:
            done.append(change(module, name, len(staying)))
    return done


def channels_between(module: nn.Module) -> int:
    """The number of channels of a module that holds numbers per channel: the length of its first tensor."""
    return next(t.shape[0] for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)) if t.ndim > 0)


def _cut(tensor: Tensor, dimension: int, staying: Tensor) -> Change:
    return change(tensor, DATA, tensor.data.index_select(dimension, staying.to(tensor.device)).contiguous())
