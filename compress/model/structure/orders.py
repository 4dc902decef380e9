"""Finds the channels of a block that may be permuted, each set with all rows and inputs that must be permuted alike.

There are two kinds, found by numbers and confirmed by a trial. The channels of a coupling whose groups are single
channels may take any order (row j of gate and up, input j of down: `model.structure.couplings`). The channels of one
head between a producer and its readers may take any order inside the head (v and o: where whole matrices pass,
`model.structure.rotate`, so do permutations).

Shapes: U channels that may change places among themselves, R copies of them among the inputs of a consumer
(grouped-query attention: one per query head of a group).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.model.calls import Call
from compress.model.edits.changes import for_now
from compress.model.edits.folds import Fold, layer_at
from compress.model.edits.keep_channels import OUTSIDE, ROLES, Coupling, Role
from compress.model.edits.permute_channels import ChannelOrder, Permute
from compress.model.layers import is_linear
from compress.model.structure.couplings import find_couplings
from compress.model.structure.excerpt import short_call, tried
from compress.model.structure.hollow_forward import repeatable, tensors_of
from compress.model.structure.producers import ROUNDING, distance
from compress.model.structure.rotate import copies, unfit, widest


@dataclass(frozen=True)
class Places:
    """Channels that may be permuted among themselves. of: {(role, module): [R, U] its channels, every copy in the same
    order}; widths: {(role, module): the number of all its channels}."""

    of: Mapping[tuple[Role, str], Tensor]
    widths: Mapping[tuple[Role, str], int]

    @property
    def consumers(self) -> dict[str, Tensor]:
        """{layer that reads the channels: its inputs [R, U]}."""
        return {name: places for (role, name), places in self.of.items() if role == "consumers"}

    def permuted(self, order_U: Tensor) -> Permute:
        """The edit that moves channel order[u] to the place of channel u."""
        orders: dict[Role, list[ChannelOrder]] = {role: [] for role in ROLES}
        for (role, name), places_RU in self.of.items():
            order = torch.arange(self.widths[role, name])
            order[places_RU.flatten()] = places_RU[:, order_U].flatten()
            orders[role].append(ChannelOrder(name, order))
        return Permute(*(tuple(orders[role]) for role in ROLES))


@dataclass(frozen=True)
class Orders:
    """The channels of a block that may be permuted (found), and known reasons why the inputs of other layers may not
    (rejected: {layer: reason})."""

    found: tuple[Places, ...]
    rejected: Mapping[str, str]


def find_orders(block: nn.Module, call: Call, folds: Sequence[Fold], shared: Collection[int] = ()) -> Orders:
    """The channels of an opened block that may be permuted, from the micro-batch of one call. The block is left as it
    was.

    folds: those of the block; shared: identities of parameters that modules outside the block also use.
    """
    offers = [places for c in find_couplings(block, call, shared).found if (places := _of_coupling(block, c))]
    taken = {name for places in offers for name in places.consumers}
    for fold in folds:
        readers = {consumer.name for consumer in fold.consumers}
        if fold.kind == "linear" and not unfit(fold) and taken.isdisjoint(readers):
            offers += _of_fold(block, call, fold)
            taken |= readers
    orders: list[Places] = []
    rejected: dict[str, str] = {}
    for places in offers:
        problem = why_not(block, call, places)
        if problem is None:
            orders.append(places)
        else:
            rejected |= dict.fromkeys(places.consumers, problem)
    return Orders(tuple(orders), rejected)


def why_not(block: nn.Module, call: Call, places: Places) -> str | None:
    """The reason why channels must stay in their order; None where the block computes the same in another order."""
    order = torch.arange(next(iter(places.of.values())).shape[1]).roll(1).flip(0)

    def change(exact: Call) -> float:
        """The largest relative difference of the outputs in another order."""
        with torch.no_grad(), repeatable(block):
            before = tensors_of(block(*exact.args, **exact.kwargs))
        with torch.no_grad(), repeatable(block), for_now() as done:
            done += places.permuted(order).apply(block).changes
            return distance(tensors_of(block(*exact.args, **exact.kwargs)), before)

    off = tried(block, [short_call(call)], change)
    if isinstance(off, str):
        return f"permuted, the block does not run: {off}"
    return None if off <= ROUNDING else f"permuted, what the block computes is off by {off:.1e} of the largest"


def _of_coupling(block: nn.Module, coupling: Coupling) -> Places | None:
    """The channels of a coupling of linear layers; None where a group is more than one channel of any member, and for
    other layers."""
    of: dict[tuple[Role, str], Tensor] = {}
    widths: dict[tuple[Role, str], int] = {}
    for role, member in coupling.members():
        if role != "between" and not is_linear(block.get_submodule(member.name)):
            return None
        places = (member.group_of != OUTSIDE).nonzero().flatten()
        if len(places) != coupling.groups:
            return None
        of[role, member.name] = places[member.group_of[places].argsort()][None]
        widths[role, member.name] = len(member.group_of)
    return Places(of, widths)


def _of_fold(block: nn.Module, call: Call, fold: Fold) -> Iterator[Places]:
    """The channels of each head between a producer and its consumers."""
    size = widest(block, call, fold)
    if size is None:
        return
    used = fold.used().nonzero().flatten()
    readers = {consumer.name: copies(consumer) for consumer in fold.consumers}
    for head in range(len(used) // size):
        part = slice(head * size, (head + 1) * size)
        of: dict[tuple[Role, str], Tensor] = {("producers", fold.producer): used[None, part]}
        of |= {("consumers", name): places[:, part] for name, places in readers.items()}
        widths = {(role, name): layer_at(block, name).shape[role == "consumers"] for role, name in of}
        yield Places(of, widths)
