"""A cut of one coupling: what it is decided by, and how it is carried out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.engine.layer_versions import Versions
from compress.engine.shrink.groups import Chosen
from compress.model.edits.changes import DATA, Applied, change, changing
from compress.model.edits.keep_channels import OUTSIDE, Coupling, Keep, Member
from compress.model.layers import Layer
from compress.model.open_block import Opened
from compress.passes.protocol.removal import Part

NAMES: Mapping[Part, str] = {"heads": "groups of heads", "channels": "channels"}


def part_of(coupling: Coupling) -> Part:
    """A group of channels is one input of each layer that reads it; a head is several."""
    each = {int((m.group_of != OUTSIDE).sum()) // coupling.groups for m in coupling.consumers}
    return "channels" if each == {1} else "heads"


@dataclass(frozen=True)
class Cut:
    """A cut of one coupling of a block, of which `staying` groups will stay."""

    part: Part
    coupling: Coupling
    staying: int

    def layers(self, block: nn.Module, block_name: str) -> dict[str, Layer]:
        """The layers that read what goes, by their names inside the block."""
        prefix = f"{block_name}." if block_name else ""
        names = [member.name for member in self.coupling.consumers]
        return {name: Layer(prefix + name, block.get_submodule(name)) for name in names}

    def columns(self, layer: Layer, member: Member) -> Tensor:
        """[G, s] the inputs (of a convolution, elements of the patch) of each group of a layer that reads them."""
        group_of_K = member.group_of.repeat_interleave(layer.shape[1] // len(member.group_of))
        inside = (group_of_K != OUTSIDE).nonzero().flatten()
        order = group_of_K[inside].argsort(stable=True)
        return inside[order].reshape(self.coupling.groups, -1).to(layer.weight.device)

    def written(self, block: nn.Module) -> Tensor:
        """[G] the sum of squares of the weights that make each group."""
        total_G = torch.zeros(self.coupling.groups, dtype=torch.float64)
        for member in self.coupling.producers:
            rows_N = Layer(member.name, block.get_submodule(member.name)).weight.double().square().sum(1).cpu()
            inside = member.group_of != OUTSIDE
            total_G.index_add_(0, member.group_of[inside], rows_N[inside])
        return total_G


@dataclass(frozen=True)
class Refit:
    """An edit: layers with other weights [N, K] and biases, in the dtypes that the model stores (None: no bias)."""

    solved: Sequence[tuple[Layer, Tensor, Tensor | None]]

    @classmethod
    def of(cls, opened: Opened, solved: Sequence[tuple[Layer, Tensor, Tensor | None]]) -> "Refit":
        """The edit of layers of an open block."""

        def bias_of(layer: Layer, bias: Tensor | None) -> Tensor | None:
            return None if bias is None else bias.to(opened.dtype_of(cast(nn.Parameter, layer.module.bias)))

        return cls([(layer, w.to(opened.dtype_of(layer.parameter)), bias_of(layer, b)) for layer, w, b in solved])

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(Parameter, its new value) of all weights and biases."""
        for layer, weight, bias in self.solved:
            yield layer.parameter, layer.stored(weight).to(layer.parameter.data)
            if bias is not None:
                parameter = cast(nn.Parameter, layer.module.bias)
                yield parameter, bias.to(parameter.data)

    def stand_in(self, versions: Versions) -> None:
        """Give the layers of an open block these values."""
        for parameter, value in self.values():
            versions.replace(parameter, value)

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Give the layers these values, at home."""
        with changing() as done:
            done += (change(parameter, DATA, value) for parameter, value in self.values())
        return Applied(tuple(done))


@dataclass(frozen=True)
class Removed:
    """A cut that is decided, an edit of a block: the groups that stay, and the layers that make up for what goes, with
    weights [N, S]."""

    cut: Cut
    chosen: Chosen
    refit: Refit

    @classmethod
    def of(cls, cut: Cut, chosen: Chosen, opened: Opened) -> "Removed":
        """The choice made for an open block."""
        layers = {name: Layer(name, opened.block.get_submodule(name)) for name in chosen.solved}
        return cls(cut, chosen, Refit.of(opened, [(layers[name], *own) for name, own in chosen.solved.items()]))

    def stand_in(self, block: nn.Module, versions: Versions) -> None:
        """Make an open block compute what it will, in its old shapes: nothing reads what goes."""
        solved = {layer.name: (weight, bias) for layer, weight, bias in self.refit.solved}
        wide: list[tuple[Layer, Tensor, Tensor | None]] = []
        for member in self.cut.coupling.consumers:
            layer = Layer(member.name, block.get_submodule(member.name))
            columns = self.cut.columns(layer, member)
            staying = columns[self.chosen.kept.to(columns.device)].flatten()
            free_K = torch.ones(layer.shape[1], dtype=torch.bool, device=columns.device)
            free_K[columns.flatten()] = False
            inputs = torch.cat([staying, free_K.nonzero().flatten()]).sort().values
            weight_NS, bias = solved.get(member.name, (layer.weight[:, inputs], None))
            weight_NK = torch.zeros_like(layer.weight)
            weight_NK[:, inputs] = weight_NS.to(weight_NK)
            wide.append((layer, weight_NK, bias))
        Refit(wide).stand_in(versions)

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Cut a block, at home."""
        with changing() as done:
            done += Keep(self.cut.coupling, self.chosen.kept).apply(module).changes
            done += self.refit.apply(module).changes
        return Applied(tuple(done))

    def entry(self, block_name: str) -> dict[str, Any]:
        """The entry of compress.json about this removal."""
        coupling = self.cut.coupling
        kept_groups = set(self.chosen.kept.tolist())
        return {
            "block": block_name,
            "part": self.cut.part,
            "cut": [member.name for member in coupling.producers],
            "read_by": [member.name for member in coupling.consumers],
            "of": coupling.groups,
            "removed": [i for i in range(coupling.groups) if i not in kept_groups],
            "figures": dict(self.chosen.figures),
        }
