"""The couplings of a block: which channels or heads can be removed, and what must go with them.

Found by numbers, not by names. The components of the block (`model.structure.dependence`) that have as many rows and
inputs in the same layers are the groups of one coupling: 64 components of one row in gate and up and one input in down;
two of 16, 8, 8 rows in q, k, v and 16 inputs in o. Then half of the groups is cut on trial, and the block must compute,
to float32's rounding, what it computes with the inputs of the others zeroed. Which attributes of its modules count
channels or heads is tried out there, too: as few as it takes.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.errors import first_line
from compress.model.calls import Call, evaluating
from compress.model.convolution import is_convolution
from compress.model.edits.folds import layer_at
from compress.model.edits.keep import ROLES, Coupling, Member, channels_between
from compress.model.layers import Layer, is_layer, obstacle
from compress.model.structure.dependence import NONE, Dependence, Wiring, dependence_of
from compress.model.structure.excerpt import in_float32, short_call
from compress.model.structure.producers import Producer, shared_parameters
from compress.model.structure.trial import Trial


@dataclass(frozen=True)
class Couplings:
    """The couplings of a block; for every layer whose rows cannot be removed, the reason."""

    found: tuple[Coupling, ...]
    rejected: tuple[str, ...]


def find_couplings(block: nn.Module, call: Call, shared: Collection[int] = ()) -> Couplings:
    """The couplings of an opened block, from the micro-batch of one call. The block is left as it was, bit for bit.

    shared: identities of parameters that something outside the block also uses; sharing inside is found here.
    Whatever goes wrong means no couplings, with the reason.
    """
    short = short_call(call)
    problem = ""
    for attempt in [call] if short is call else [short, call]:
        try:
            with evaluating(block), in_float32(block, attempt) as exact_call:
                return _Search(block, exact_call, set(shared) | shared_parameters(block)).found()
        except Exception as error:  # noqa: BLE001 - couplings are an offer: a block that cannot be probed has none
            problem = f"no couplings: {type(error).__name__}: {first_line(error)}"
    return Couplings((), (problem,))


def why_not(block: nn.Module, call: Call, coupling: Coupling) -> list[str]:
    """Why a coupling found on another block of the same kind does not hold for this one; empty where it does."""
    short, problem = short_call(call), None
    for attempt in [call] if short is call else [short, call]:
        try:
            with evaluating(block), in_float32(block, attempt) as exact_call:
                problem = Trial(block, exact_call, cuttable(block), coupling).problem(coupling)
            return [] if problem is None else [problem]
        except Exception as error:  # noqa: BLE001 - a call may be cut where it must not be
            problem = f"{type(error).__name__}: {first_line(error)}"
    assert problem is not None
    return [problem]


def _depthwise(module: nn.Module) -> bool:
    return is_convolution(module) and module.groups == module.in_channels == module.out_channels


def cuttable(block: nn.Module) -> dict[str, Producer]:
    """The layers of a block whose rows or inputs may be cut, by name. A depthwise convolution is none of them: it is a
    number (or some) per channel."""
    return {
        name: Producer(module, "linear", Layer(name, module).shape[0])
        for name, module in block.named_modules()
        if is_layer(module) and not _depthwise(module) and obstacle(module) is None
    }


class _Search:
    """One block in float32 with one call: its components, and the couplings that they make."""

    def __init__(self, block: nn.Module, call: Call, shared: set[int]) -> None:
        self.block, self.call = block, call
        layers = cuttable(block)
        # Modules that hold one number per channel: norms above all. What has modules inside is no such thing.
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

    def found(self) -> Couplings:
        """Couplings and reasons."""
        fixed = dict(self.reasons)
        dependence = dependence_of(self.wiring, set(fixed))
        self.wiring.leaves.clear()
        couplings: list[Coupling] = []
        for candidate in alike(dependence, self.wiring.watched.keys()):
            problem = self.unusable(candidate, fixed)
            result = problem or Trial(self.block, self.call, self.wiring.producers, candidate).settled()
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
        """Why a coupling must not be cut, as far as it can be said without trying."""
        for member in (*coupling.producers, *coupling.between, *coupling.consumers):
            if member.name in fixed:
                return f"{member.name} {fixed[member.name]}"
        widths = {len(member.group_of) for member in coupling.consumers}
        for name in self.unreached:
            if layer_at(self.block, name).channels in widths:
                return f"{name} was never called during the probe and may read it, too"
        return None


def alike(dependence: Dependence, between: Collection[str]) -> Iterator[Coupling]:
    """Components that have as many channels in the same places, as the groups of couplings, still without numbers."""
    places = [("producers", name, part) for name, part in dependence.produced.items()]
    places += [("between" if n in between else "consumers", n, part) for n, part in dependence.read.items()]
    labels = torch.cat([part for _, _, part in places]).unique()
    labels = labels[labels != NONE]
    if not labels.numel():
        return
    # [places, components]: how many channels of each component are in each place
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
    """The place of each component in a sorted list, -1 for those that are not in it."""
    place = torch.searchsorted(labels, part).clamp(max=len(labels) - 1)
    return torch.where(labels[place] == part, place, NONE)
