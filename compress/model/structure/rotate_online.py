"""Rotates inputs of layers as the model runs, where their producers take no rotation: the function stays the same.

Source: QuaRot (Ashkboos et al. 2024, arXiv 2404.00456), the Hadamard matrix before down_proj; R4 of SpinQuant (Liu et
al. 2024, arXiv 2405.16406).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.model.edits.changes import DATA, Applied, change, changing
from compress.model.edits.folds import Fold
from compress.model.experts import Experts
from compress.model.layers import Layer, is_linear, layers_of, output_head
from compress.model.online_rotation import input_rotation, rotate_input
from compress.model.structure.streams import Stream
from compress.weights.rotations.hadamard import rotated


@dataclass(frozen=True)
class RotateOnline:
    """An edit of a model: a layer that rotates its input by Hadamard matrices of `block` channels."""

    kind: ClassVar[str] = "rotate-online"

    layer: str
    block: int

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Rotate the weight, in float32 or better, and give the layer the hook that rotates its input."""
        layer = Layer(self.layer, module.get_submodule(self.layer))
        with changing() as done:
            weight_NK = layer.weight
            turned = rotated(weight_NK.to(torch.promote_types(weight_NK.dtype, torch.float32)), self.block)
            after = turned.to(weight_NK.dtype)
            done.append(change(layer.parameter, DATA, (after.t() if layer.transposed else after).contiguous()))
            done.append(rotate_input(layer.module, self.block))
        return Applied(tuple(done))

    def entry(self) -> dict[str, Any]:
        """The layer and the size of its blocks."""
        return {"edit": self.kind, "layer": self.layer, "block": self.block}

    def parts(self) -> dict[str, Tensor]:
        """No tensors: the size says all about the matrix."""
        return {}


def unreached(
    model: nn.Module, streams: Sequence[Stream], folds: Mapping[str, list[Fold]]
) -> Iterator[tuple[str, int]]:
    """(Name, K) of layers of blocks whose inputs no rotation of a producer reaches: those that read neither a hidden
    state nor what a linear path leads to. streams, folds: the hidden states and, {block: folds along which a matrix
    passes}, the linear paths that are rotated. Layers that rotate their input already, and experts, are none."""
    reached = {name for stream in streams for name in stream.readers}
    reached |= {name for stream in streams for norm in stream.norms for name in norm.readers}
    for block, found in folds.items():
        reached |= {f"{block}.{each.name}" if block else each.name for fold in found for each in fold.consumers}
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    inside = {inner for module in experts for inner in module.modules()}
    head = output_head(model)
    for block in folds:
        for layer in layers_of(model.get_submodule(block), block):
            module = layer.module
            own = layer.is_called and is_linear(module) and module is not head and module not in inside
            if own and layer.name not in reached and input_rotation(module) is None:
                yield layer.name, layer.shape[1]
