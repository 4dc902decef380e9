"""Finds the channels of a block that can only be removed together: its connected components, seen in hollow forwards.

An input of a layer depends on a channel of a producer when it changes with the channel in any way: a gate enters a
product through an activation, a query through softmax. Each such pair is an edge of a graph, whose connected parts are
the *components*: row j of gate and up with input j of down; the query, key and value rows of one key-value head with
the inputs of o that belong to it. Removing a whole component leaves all others as they are.

The hollow block answers two questions. `reach` gives the channels that chosen inputs depend on, by one backward pass
(gradients that are not zero). `changed` gives the inputs that change with chosen channels, by one forward. Segments of
inputs are bisected, all at the same time, while their halves depend on different channels: 2 log K passes tell K
channels apart. A segment whose halves share channels (a cut in the middle of a head, a norm that mixes all) is split by
growing components from single inputs: the channels that an input depends on, the inputs that these reach, and so on.

Gradients can be zero by chance, so the result is a proposal, which a cut must confirm (`model.structure.couplings`).

Shapes: K inputs of a reader, C channels of all producers, one after the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.model.calls import Call
from compress.model.structure.hollow_forward import changed_inputs, given_output, hollow_forward
from compress.model.structure.producers import Producer

NONE = -1  # for an input that depends on no producer, and for a channel in no component that can be removed
MOST_ROUNDS = 512  # most heads to tell apart one after the other; the rest then counts as one component


@dataclass(frozen=True)
class Dependence:
    """Components of a block's channels. produced: {layer: the component of each output channel}; read: {layer or
    watched module: the component of each input}. NONE for a channel or input without a component that can be
    removed."""

    produced: dict[str, Tensor]
    read: dict[str, Tensor]


class Wiring:
    """A hollow block in which every given output can be replaced, and be the variable of a gradient."""

    def __init__(
        self, block: nn.Module, call: Call, producers: Mapping[str, Producer], watched: Mapping[str, Producer]
    ) -> None:
        self.block, self.call, self.producers, self.watched = block, call, producers, watched
        self.leaves: list[tuple[str, Tensor]] = []
        self.base = hollow_forward(block, call, producers, self._leaf, gradients=True, watched=watched)
        sizes = [p.channels for p in producers.values()]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.places = {name: slice(end - size, end) for name, size, end in zip(producers, sizes, ends, strict=True)}
        self.channels = sum(sizes)
        everyone = {**producers, **watched}
        self.inputs: dict[str, list[Tensor]] = {}
        for (name, _), x in self.base.inputs.items():
            self.inputs.setdefault(name, []).append(everyone[name].rows(x))

    def _leaf(self, name: str, output: Tensor) -> Tensor:
        self.leaves.append((name, output.requires_grad_()))
        return output.clone()  # a leaf must not be changed in place

    def reach(self, reader: str, chosen_K: Tensor) -> Tensor:
        """Bool mask [C] of the channels that the chosen inputs of a reader depend on."""
        return self._behind([rows[:, chosen_K.to(rows.device)] for rows in self.inputs[reader]])

    def reached_by_outputs(self) -> Tensor:
        """Bool mask [C] of the channels that reach the block's output without passing a layer."""
        return self._behind([t for t in self.base.outputs if t.is_floating_point()])

    def _behind(self, tensors: list[Tensor]) -> Tensor:
        found_C = torch.zeros(self.channels, dtype=torch.bool)
        live = [t for t in tensors if t.requires_grad and t.numel()]
        if not live:
            return found_C
        # Not the plain sum: a norm makes it constant, so that gradients would vanish.
        weights = [given_output("weights", t.shape[:1], t[:1].numel()).reshape(t.shape).to(t) for t in live]
        total = torch.stack([(t * w).sum() for t, w in zip(live, weights, strict=True)]).sum()
        leaves = [leaf for _, leaf in self.leaves]
        slopes = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        for (name, _), slope in zip(self.leaves, slopes, strict=True):
            if slope is not None and slope.numel():
                found_C[self.places[name]] |= (slope != 0).reshape(-1, slope.shape[-1]).any(0).cpu()
        return found_C

    def changed_inputs(self, reader: str, chosen_C: Tensor) -> Tensor:
        """Bool mask [K] of a reader's inputs that change when the chosen channels get other numbers."""

        def other(name: str, output: Tensor) -> Tensor:
            chosen = chosen_C[self.places[name]].to(output.device)
            instead = given_output(f"{name}, other", output.shape[:-1], output.shape[-1]).to(output)
            return torch.where(chosen, instead, output)

        seen = hollow_forward(self.block, self.call, self.producers, other, watched=self.watched)
        return changed_inputs(self.base, seen, {**self.producers, **self.watched})[reader].cpu()

    def parts_of(self, reader: str) -> tuple[Tensor, Tensor]:
        """`take_apart` for a reader."""
        width = self.inputs[reader][0].shape[1]
        return take_apart(width, lambda k: self.reach(reader, k), lambda c: self.changed_inputs(reader, c))


def take_apart(
    inputs: int, reach: Callable[[Tensor], Tensor], changed: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(The part of each input [K] of a reader, the part of each channel [C] that it reads); NONE for inputs and
    channels without one. Inputs of different parts depend on different channels."""
    part_K = torch.zeros(inputs, dtype=torch.int64)
    part_C = torch.where(reach(part_K == 0), 0, NONE)
    count = 1
    segments = [(0, 0, inputs)]
    tangled_K = torch.zeros(inputs, dtype=torch.bool)
    while segments := [(p, a, b) for p, a, b in segments if b - a > 1]:
        right_K = torch.zeros(inputs, dtype=torch.bool)
        whole_K = right_K.clone()
        for _, a, b in segments:
            right_K[(a + b) // 2 : b], whole_K[a:b] = True, True
        left_C, right_C = reach(whole_K & ~right_K), reach(right_K)
        mixed = set(part_C[left_C & right_C].tolist())
        live = set(part_C.tolist())
        renamed = torch.arange(count)
        halves = []
        for part, a, b in segments:
            if part in mixed:
                tangled_K[a:b] = True
            elif part in live:
                middle = (a + b) // 2
                part_K[middle:b] = renamed[part] = count
                halves += [(part, a, middle), (count, middle, b)]
                count += 1
        moved = right_C & (part_C != NONE)
        part_C[moved] = renamed[part_C[moved]]
        segments = halves
    _untangle(part_K, part_C, tangled_K, count, reach, changed)
    return torch.where(torch.isin(part_K, part_C), part_K, NONE), part_C


def _untangle(
    part_K: Tensor,
    part_C: Tensor,
    left_K: Tensor,
    count: int,
    reach: Callable[[Tensor], Tensor],
    changed: Callable[[Tensor], Tensor],
) -> None:
    """Split the parts of the inputs `left_K` in place. Each round grows one component in every such part, from one
    input."""
    for _ in range(MOST_ROUNDS):
        if not bool(left_K.any()):
            return
        places = left_K.nonzero().flatten()
        parts, inverse = part_K[places].unique(return_inverse=True)
        seeds = torch.full((len(parts),), len(part_K)).scatter_reduce_(0, inverse, places, "amin")
        grown_K = torch.zeros_like(left_K)
        grown_K[seeds] = True
        while True:
            found_C = reach(grown_K)
            more_K = grown_K | (changed(found_C) & left_K)
            if torch.equal(more_K, grown_K):
                break
            grown_K = more_K
        renamed = torch.arange(count)
        renamed[parts] = count + torch.arange(len(parts))
        count += len(parts)
        found_C &= torch.isin(part_C, parts)
        part_C[found_C] = renamed[part_C[found_C]]
        part_K[grown_K] = renamed[part_K[grown_K]]
        left_K &= ~grown_K


def dependence_of(wiring: Wiring, fixed: set[str]) -> Dependence:
    """The components of a whole block. fixed: layers whose channels and inputs cannot be removed."""
    held_C = wiring.reached_by_outputs()
    for name in fixed & wiring.places.keys():
        held_C[wiring.places[name]] = True
    for name in fixed & wiring.inputs.keys():
        held_C |= wiring.reach(name, torch.ones(wiring.inputs[name][0].shape[1], dtype=torch.bool))
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    for name, rows in wiring.inputs.items():
        same_size = (n for n in parts if len(wiring.inputs[n]) == len(rows))
        alike = (n for n in same_size if all(map(torch.equal, wiring.inputs[n], rows)))
        known = next(alike, None)
        parts[name] = wiring.parts_of(name) if known is None else parts[known]
    # A watched module does not join components: a norm over the channels of one head, say, is used by all heads.
    label_C = join_parts([part_C for name, (_, part_C) in parts.items() if name in wiring.producers], wiring.channels)
    label_C = torch.where(torch.isin(label_C, label_C[held_C]), NONE, label_C)
    read = {name: _labels(part_K, part_C, label_C) for name, (part_K, part_C) in parts.items()}
    return Dependence({name: label_C[place] for name, place in wiring.places.items()}, read)


def join_parts(parts: list[Tensor], channels: int) -> Tensor:
    """The component [C] of each channel, named by the number of its first channel. Channels that lie in one part of any
    reader are of one component."""
    label_C = torch.arange(channels)
    while True:
        before_C = label_C.clone()
        for part_C in parts:
            used = part_C != NONE
            if bool(used.any()):
                first = torch.full((int(part_C.max()) + 1,), channels)
                first.scatter_reduce_(0, part_C[used], label_C[used], "amin")
                label_C[used] = first[part_C[used]]
        label_C = label_C[label_C]
        if torch.equal(label_C, before_C):
            return label_C


def _labels(part_K: Tensor, part_C: Tensor, label_C: Tensor) -> Tensor:
    """The component [K] of each input: that of all channels of its part; NONE where they are of several components."""
    used = part_C != NONE
    size = int(torch.cat([part_K, part_C]).max()) + 2  # the last entry is for NONE
    lowest, highest = torch.full((size,), label_C.numel()), torch.full((size,), NONE)
    lowest.scatter_reduce_(0, part_C[used], label_C[used], "amin")
    highest.scatter_reduce_(0, part_C[used], label_C[used], "amax")
    return torch.where(lowest == highest, highest, NONE)[part_K]
