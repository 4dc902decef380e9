"""The couplings of a block: which channels or heads can be removed, and what must go with them.

Found by numbers, not by names. The components of the block (`model.dependence`) that have as many rows and inputs in
the same layers are the groups of one coupling: 64 components of one row in gate and up and one input in down; two of
16, 8, 8 rows in q, k, v and 16 inputs in o. Then half of the groups is cut on trial, and the block must compute, to
float32's rounding, what it computes with the inputs of the others zeroed. Which attributes of its modules count
channels or heads is tried out there, too: as few as it takes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

import torch
from torch import Tensor, nn

from compress.errors import first_line
from compress.model.calls import Call, evaluating
from compress.model.changes import undo
from compress.model.convolution import is_convolution
from compress.model.dependence import NONE, Dependence, Wiring, dependence_of
from compress.model.excerpt import in_float32, short_call
from compress.model.folds import layer_at
from compress.model.hollow import hollow_forward, repeatable, tensors_of
from compress.model.keep import ROLES, Coupling, Keep, Member, Number, channels_between
from compress.model.layers import Layer, is_layer, obstacle
from compress.model.producers import ROUNDING, Producer, distance, shared_parameters

MOST_TRIALS = 128  # sets of attributes that are tried out for one coupling


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
    with evaluating(block), in_float32(block, short_call(call)) as exact_call:
        problem = _Trial(block, exact_call, layers_of(block), coupling).problem(coupling)
    return [] if problem is None else [problem]


def _depthwise(module: nn.Module) -> bool:
    return is_convolution(module) and module.groups == module.in_channels == module.out_channels


def layers_of(block: nn.Module) -> dict[str, Producer]:
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
        layers = layers_of(block)
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
            result = problem or _Trial(self.block, self.call, self.wiring.producers, candidate).settled()
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


class _Trial:
    """Half of the groups of a coupling cut: hollow, every layer must read what it did, without the channels that are
    gone; and the block must compute what it does with the inputs of the other half zeroed."""

    def __init__(self, block: nn.Module, call: Call, layers: Mapping[str, Producer], coupling: Coupling) -> None:
        self.block, self.call, self.layers, self.coupling = block, call, layers, coupling
        self.edit = Keep(coupling, torch.arange(0, coupling.groups, 2))
        self.base = hollow_forward(block, call, layers)
        before: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for member in coupling.consumers:
                parameter = layer_at(block, member.name).parameter
                before.append((parameter, parameter.data))
                parameter.data = zeroed(layer_at(block, member.name), self.edit.staying(member))
            self.expected = self.run()
        finally:
            for parameter, data in reversed(before):
                parameter.data = data

    def run(self) -> list[Tensor]:
        """The block's outputs."""
        with torch.no_grad(), repeatable(self.block):
            return tensors_of(self.block(*self.call.args, **self.call.kwargs))

    def problem(self, coupling: Coupling) -> str | None:
        """Why the cut block computes something else, or nothing."""
        applied = Keep(coupling, self.edit.kept).apply(self.block)
        try:
            change = self.hollow_harm()
            change = distance(self.run(), self.expected) if change <= ROUNDING else change
        except Exception as error:  # noqa: BLE001 - a block that does not run so cannot be cut so
            return f"cut, the block does not run: {type(error).__name__}: {first_line(error)}"
        finally:
            undo(applied)
        return None if change <= ROUNDING else f"cut, what the block computes is off by {change:.1e} of the largest"

    def hollow_harm(self) -> float:
        """How far what the layers of the cut block read is from what they read before."""
        rows = {member.name: self.edit.staying(member) for member in self.coupling.producers}
        columns = {member.name: self.edit.staying(member) for member in self.coupling.consumers}

        def given(name: str, output: Tensor) -> Tensor:
            return output[..., rows[name].to(output.device)] if name in rows else output

        seen = hollow_forward(self.block, self.call, self.layers, given)
        if seen.inputs.keys() != self.base.inputs.keys():
            return float("inf")
        now, before = [], []
        for (name, index), x in self.base.inputs.items():
            full, now_rows = self.layers[name].rows(x), self.layers[name].rows(seen.inputs[name, index])
            now.append(now_rows)
            before.append(full[:, columns[name].to(full.device)] if name in columns else full)
        return distance(now, before)

    def settled(self) -> Coupling | str:
        """The coupling with the attributes that count its groups, or why it cannot be cut."""
        candidates = self.countable()
        subsets = (c for n in range(len(candidates) + 1) for c in combinations(candidates, n))
        first = ""
        for numbers in islice(subsets, MOST_TRIALS):
            coupling = replace(self.coupling, numbers=numbers)
            problem = self.problem(coupling)
            if problem is None:
                others = [(n.module, n.attribute) for n in candidates if n not in numbers]
                return replace(coupling, unread=tuple(each for each in others if self.ignores(*each)))
            first = first or problem
        return first

    def ignores(self, name: str, attribute: str) -> bool:
        """Whether the block runs without an attribute of a module."""
        attributes = vars(self.block.get_submodule(name))
        value = attributes.pop(attribute)
        try:
            self.run()
        except Exception:  # noqa: BLE001 - whatever it says, it was read
            return False
        finally:
            attributes[attribute] = value
        return True

    def countable(self) -> Sequence[Number]:
        """Attributes of the modules around the members (and in between) that may be multiples of the groups."""
        coupling = self.coupling
        names = [member.name for _, member in coupling.members()]
        paths = [name.split(".") for name in names]
        common = 0
        while all(len(path) > common + 1 and path[: common + 1] == paths[0][: common + 1] for path in paths):
            common += 1
        around = {".".join(path[:n]): None for path in paths for n in range(common, len(path))}
        sizes = {len(member.group_of) for _, member in coupling.members()}
        between = {member.name: len(member.group_of) for member in coupling.between}
        return [
            Number(name, attribute, value // coupling.groups)
            for name in sorted({*around, *between})
            for attribute, value in vars(self.block.get_submodule(name)).items()
            if type(value) is int
            and not attribute.startswith("_")
            and value > 0
            and value % coupling.groups == 0
            and any(size % value == 0 for size in sizes)
            and value != between.get(name)  # that one is cut with the module's tensors
        ]


def zeroed(layer: Layer, staying: Tensor) -> Tensor:
    """The weight of a layer, as it is stored, with zeros for all inputs (of a convolution, channels) but these."""
    weight = layer.parameter.data
    dimension = 0 if layer.transposed else 1
    keep = torch.zeros(weight.shape[dimension], dtype=weight.dtype, device=weight.device)
    keep[staying.to(weight.device)] = 1
    shape = [1] * weight.ndim
    shape[dimension] = -1
    return weight * keep.view(shape)
