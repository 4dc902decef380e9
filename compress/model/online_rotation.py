"""Rotations that a model computes as it runs: what a layer reads is multiplied by a Hadamard matrix, block by block.

    y = W x = (W H) (H^T x)        the layer holds W H; a hook of it makes H^T x of what it is given

It is for inputs whose producer takes no rotation, as an activation lies in between. What is rounded behind it, and the
statistics that a pass collects, are of the rotated input.

Source: QuaRot (Ashkboos et al. 2024, arXiv 2404.00456), the Hadamard matrix before down_proj; R4 of SpinQuant (Liu et
al. 2024, arXiv 2405.16406).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.model.edits.changes import DATA, Applied, Change, change, changing
from compress.model.layers import Layer
from compress.weights.rotations.hadamard import rotated


class RotateInput:
    """A hook that rotates what a layer is given. block: channels that one Hadamard matrix mixes."""

    def __init__(self, block: int) -> None:
        self.block = block

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rotated(args[0], self.block), *args[1:])


class InputHook:
    """The place of a module for a `RotateInput`, which `model.edits.changes` sets and empties again."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def hook(self) -> RotateInput | None:
        """The hook that is there."""
        return next((hook for hook in self.module._forward_pre_hooks.values() if isinstance(hook, RotateInput)), None)

    @hook.setter
    def hook(self, hook: RotateInput | None) -> None:
        hooks = self.module._forward_pre_hooks
        for key in [key for key, each in hooks.items() if isinstance(each, RotateInput)]:
            del hooks[key]
        if hook is not None:
            self.module.register_forward_pre_hook(hook)


def rotate_input(module: nn.Module, block: int) -> Change:
    """Make a layer rotate what it is given. Returns the change."""
    return change(InputHook(module), "hook", RotateInput(block))


def input_rotation(module: nn.Module) -> int | None:
    """The size of the blocks in which a layer rotates what it is given; None where it does not."""
    hook = InputHook(module).hook
    return None if hook is None else hook.block


def as_read(module: nn.Module, x: Tensor) -> Tensor:
    """The input of a layer as its product, or the rounding before that, reads it."""
    hook = InputHook(module).hook
    return x if hook is None else rotated(x, hook.block)


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
        return {"edit": self.kind, "layer": self.layer, "block": self.block}

    def parts(self) -> dict[str, Tensor]:
        return {}
