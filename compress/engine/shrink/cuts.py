"""A cut of one coupling: what will go, what it is decided by, and how it is carried out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.engine.layer_versions import Versions
from compress.engine.shrink.groups import Chosen
from compress.model.edits.changes import DATA, Applied, change
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
class Removed:
    """A cut that is decided: the groups that stay, and {layer: (weight [N, S], bias)} of those that make up for what
    goes, in the dtype that the model stores."""

    cut: Cut
    chosen: Chosen
    solved: Mapping[str, tuple[Tensor, Tensor | None]]

    @classmethod
    def of(cls, cut: Cut, chosen: Chosen, opened: Opened) -> "Removed":
        """The choice made for an open block, in the dtypes that it stores."""
        solved = {}
        for name, (weight, bias) in chosen.solved.items():
            layer = Layer(name, opened.block.get_submodule(name))
            held = None if bias is None else bias.to(opened.dtype_of(layer.module.bias))  # type: ignore[arg-type]
            solved[name] = weight.to(opened.dtype_of(layer.parameter)), held
        return cls(cut, chosen, solved)

    def stand_in(self, block: nn.Module, versions: Versions) -> None:
        """Make an open block compute what it will, in its old shapes: nothing reads what goes."""
        for member in self.cut.coupling.consumers:
            layer = Layer(member.name, block.get_submodule(member.name))
            columns = self.cut.columns(layer, member)[self.chosen.kept.to(layer.weight.device)].flatten()
            free_K = torch.ones(layer.shape[1], dtype=torch.bool, device=layer.weight.device)
            free_K[self.cut.columns(layer, member).flatten()] = False
            inputs = torch.cat([columns, free_K.nonzero().flatten()]).sort().values
            weight_NS, bias = self.solved.get(member.name, (layer.weight[:, inputs], None))
            weight_NK = torch.zeros_like(layer.weight)
            weight_NK[:, inputs] = weight_NS.to(weight_NK)
            versions.replace(layer.parameter, layer.stored(weight_NK))
            if bias is not None:
                parameter: Any = layer.module.bias
                versions.replace(parameter, bias.to(parameter.data))

    def apply(self, block: nn.Module) -> list[Applied]:
        """Cut a block, at home."""
        done = [Keep(self.cut.coupling, self.chosen.kept).apply(block)]
        for name, (weight, bias) in self.solved.items():
            layer = Layer(name, block.get_submodule(name))
            now = layer.parameter.data
            changes = [change(layer.parameter, DATA, layer.stored(weight).to(now))]
            if bias is not None:
                parameter: Any = layer.module.bias
                changes.append(change(parameter, DATA, bias.to(parameter.data)))
            done.append(Applied(tuple(changes)))
        return done

    def entry(self, block_name: str) -> dict[str, Any]:
        """The entry of compress.json about this removal."""
        coupling = self.cut.coupling
        kept = set(self.chosen.kept.tolist())
        return {
            "block": block_name,
            "part": self.cut.part,
            "cut": [member.name for member in coupling.producers],
            "read_by": [member.name for member in coupling.consumers],
            "of": coupling.groups,
            "removed": [i for i in range(coupling.groups) if i not in kept],
            "figures": dict(self.chosen.figures),
        }
