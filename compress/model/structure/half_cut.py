"""Cuts a coupling on trial: checks that the block computes as it should, and finds the attributes that count groups."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice

import torch
from torch import Tensor, nn

from compress.base.errors import first_line
from compress.model.calls import Call
from compress.model.edits.changes import DATA, change, for_now
from compress.model.edits.folds import layer_at
from compress.model.edits.keep_channels import Coupling, Keep, Number
from compress.model.layers import Layer
from compress.model.structure.hollow_forward import hollow_forward, repeatable, tensors_of
from compress.model.structure.producers import ROUNDING, Producer, distance

MOST_TRIALS = 128  # most sets of attributes tried for one coupling


class HalfCut:
    """Cuts half of a coupling's groups and checks the block. In a hollow forward every layer must read the same inputs
    as before, except the removed channels. In a full forward the block must compute the same as the uncut one with the
    inputs of the removed half zeroed."""

    def __init__(self, block: nn.Module, call: Call, layers: Mapping[str, Producer], coupling: Coupling) -> None:
        self.block, self.call, self.layers, self.coupling = block, call, layers, coupling
        self.edit = Keep(coupling, torch.arange(0, coupling.groups, 2))
        self.base = hollow_forward(block, call, layers)
        with for_now() as done:
            for member in coupling.consumers:
                layer = layer_at(block, member.name)
                done.append(change(layer.parameter, DATA, zero_others(layer, self.edit.staying(member))))
            self.expected = self.run()

    def run(self) -> list[Tensor]:
        """The block's outputs."""
        with torch.no_grad(), repeatable(self.block):
            return tensors_of(self.block(*self.call.args, **self.call.kwargs))

    def problem(self, coupling: Coupling) -> str | None:
        """The reason why the cut block does not run or computes something else; None where it computes the same."""
        cut = Keep(coupling, self.edit.kept)
        with for_now() as done:
            done += cut.apply(self.block).changes
            try:
                off = self.hollow_harm()
                off = distance(self.run(), self.expected) if off <= ROUNDING else off
            except Exception as error:  # noqa: BLE001 - the cut block may fail in any way
                return f"cut, the block does not run: {type(error).__name__}: {first_line(error)}"
        return None if off <= ROUNDING else f"cut, what the block computes is off by {off:.1e} of the largest"

    def hollow_harm(self) -> float:
        """The largest relative difference (`distance`) between the layers' inputs in the cut and in the uncut block."""
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

    def settle(self) -> Coupling | str:
        """The coupling with the attributes that count its groups, or the reason why it cannot be cut."""
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
        """True where the block runs without an attribute of a module."""
        attributes = vars(self.block.get_submodule(name))
        value = attributes.pop(attribute)
        try:
            self.run()
        except Exception:  # noqa: BLE001 - any error means that the attribute was read
            return False
        finally:
            attributes[attribute] = value
        return True

    def countable(self) -> Sequence[Number]:
        """Attributes of the modules around and between the members whose numbers may be multiples of the groups."""
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


def zero_others(layer: Layer, staying: Tensor) -> Tensor:
    """The stored weight of a layer with zeros for all inputs (channels of a convolution) except `staying`."""
    weight = layer.parameter.data
    dimension = 0 if layer.transposed else 1
    keep = torch.zeros(weight.shape[dimension], dtype=weight.dtype, device=weight.device)
    keep[staying.to(weight.device)] = 1
    shape = [1] * weight.ndim
    shape[dimension] = -1
    return weight * keep.view(shape)
