"""Finds the couplings of a block: channels or heads that can be removed, each with everything that must be cut with it.

Found by numbers, not by names. Components of the block (`model.structure.dependence`) with equally many rows and inputs
in the same layers are the groups of one coupling: 64 components of one row in gate and up and one input in down; two of
16, 8, 8 rows in q, k, v and 16 inputs in o. A trial then cuts half of the groups: up to float32's rounding, the block
must compute the same as with the inputs of the removed half zeroed. The trial also finds the attributes of modules that
count channels or heads: the smallest set with which the cut block runs.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.model.calls import Call
from compress.model.convolution import is_convolution
from compress.model.edits.folds import layer_at
from compress.model.edits.keep_channels import ROLES, Coupling, Member, channels_between
from compress.model.layers import Layer, is_layer, obstacle
from compress.model.structure.dependence import NONE, Dependence, Wiring, dependence_of
from compress.model.structure.excerpt import short_first, tried
from compress.model.structure.half_cut import HalfCut
from compress.model.structure.producers import Producer, repeated_parameters


@dataclass(frozen=True)
class Couplings:
    """The couplings of a block (found), and a reason for every layer whose rows cannot be removed (rejected)."""

    found: tuple[Coupling, ...]
    rejected: tuple[str, ...]


def find_couplings(block: nn.Module, call: Call, shared: Collection[int] = ()) -> Couplings:
    """The couplings of an opened block, from the micro-batch of one call. The block is left as it was, bit for bit.

    shared: identities of parameters that modules outside the block also use; sharing inside is found here.
    Any error gives no couplings, with the reason.
    """
    result = tried(
        block,
        short_first(call),
        lambda exact_call: _CouplingSearch(block, exact_call, set(shared) | repeated_parameters(block)).search(),
    )
    return result if isinstance(result, Couplings) else Couplings((), (f"no couplings: {result}",))


def why_not(block: nn.Module, call: Call, coupling: Coupling) -> list[str]:
    """The reasons why a coupling of another block of the same kind does not hold for this one; empty where it does."""
    problem = tried(
        block,
        short_first(call),
        lambda exact_call: HalfCut(block, exact_call, cuttable(block), coupling).problem(coupling),
    )
    return [] if problem is None else [problem]


def cuttable(block: nn.Module) -> dict[str, Producer]:
    """{name: layer} of a block whose rows or inputs may be cut. A depthwise convolution is no such layer: it holds
    numbers per channel."""
    return {
        name: Producer(module, "linear", Layer(name, module).shape[0])
        for name, module in block.named_modules()
        if is_layer(module)
        and not (is_convolution(module) and module.groups == module.in_channels == module.out_channels)  # depthwise
        and obstacle(module) is None
    }


class _CouplingSearch:
    """The search for couplings in one block in float32, with one call."""

    def __init__(self, block: nn.Module, call: Call, shared: set[int]) -> None:
        self.block, self.call = block, call
        layers = cuttable(block)
        # Modules that hold one number per channel: norms above all. They have no modules inside.
        between = {
            name: Producer(module, "norm", channels_between(module))
            for name, module in block.named_modules()
            if name not in layers
            and not isinstance(module, nn.Embedding)
            and not [*module.children()]
            and any(t.ndim for t in (*module.parameters(), *module.buffers()))
        }
        self.reasons: dict[str, str] = {}
        for name, module in block.named_modules():
            if any(id(p) in shared for p in module.parameters(recurse=False)):
                self.reasons[name] = "shares a parameter with another module"
            elif name in layers and getattr(module, "groups", 1) != 1:
                self.reasons[name] = "is a grouped convolution"
        self.wiring = Wiring(block, call, layers, between)
        self.unreached = [name for name in layers if name not in self.wiring.inputs]
        self.reasons |= dict.fromkeys(self.unreached, "was never called during the probe")

    def search(self) -> Couplings:
        """The couplings, and the reasons for layers without one."""
        fixed = dict(self.reasons)
        dependence = dependence_of(self.wiring, set(fixed))
        self.wiring.leaves.clear()
        couplings: list[Coupling] = []
        for candidate in group_alike(dependence, self.wiring.watched.keys()):
            problem = self.unusable(candidate, fixed)
            result = problem or HalfCut(self.block, self.call, self.wiring.producers, candidate).settle()
            if isinstance(result, Coupling):
                couplings.append(result)
            else:
                self.reasons |= {m.name: result for m in candidate.producers}
        working = {member.name for coupling in couplings for member in coupling.producers}
        for name, component_C in dependence.produced.items():
            if bool((component_C == NONE).all()):
                reason = "reaches the block's output, or what cannot be cut, without passing a layer"
            else:
                reason = "no layer reads it, or all of its channels hang together"
            self.reasons.setdefault(name, reason)
        return Couplings(
            tuple(couplings), tuple(f"{name}: {why}" for name, why in self.reasons.items() if name not in working)
        )

    def unusable(self, coupling: Coupling, fixed: Mapping[str, str]) -> str | None:
        """The reason why a coupling must not be cut, where it is known without a trial; None otherwise."""
        for member in (*coupling.producers, *coupling.between, *coupling.consumers):
            if member.name in fixed:
                return f"{member.name} {fixed[member.name]}"
        widths = {len(member.group_of) for member in coupling.consumers}
        for name in self.unreached:
            if layer_at(self.block, name).channels in widths:
                return f"{name} was never called during the probe and may read it, too"
        return None


def group_alike(dependence: Dependence, between: Collection[str]) -> Iterator[Coupling]:
    """Couplings whose groups are the components with equally many channels in the same places; without `numbers`."""
    places = [("producers", name, part) for name, part in dependence.produced.items()]
    places += [("between" if n in between else "consumers", n, part) for n, part in dependence.read.items()]
    labels = torch.cat([part for _, _, part in places]).unique()
    labels = labels[labels != NONE]
    if not labels.numel():
        return
    # [places, components]: number of channels of each component in each place
    counts = torch.stack([(_index(labels, part) + 1).bincount(minlength=len(labels) + 1)[1:] for _, _, part in places])
    kinds, kind_of = counts.unique(dim=1, return_inverse=True)
    for kind, sizes in enumerate(kinds.T):
        members = labels[kind_of == kind]
        inside: dict[str, tuple[Member, ...]] = dict.fromkeys(ROLES, ())
        for (role, name, part), size in zip(places, sizes.tolist(), strict=True):
            if size:
                inside[role] += (Member(name, _index(members, part)),)
        if len(members) > 1 and inside["producers"] and inside["consumers"]:
            yield Coupling(len(members), inside["producers"], inside["between"], inside["consumers"])


def _index(labels: Tensor, part: Tensor) -> Tensor:
    """The index of each component in a sorted list; NONE for those that are not in it."""
    place = torch.searchsorted(labels, part).clamp(max=len(labels) - 1)
    return torch.where(labels[place] == part, place, NONE)
