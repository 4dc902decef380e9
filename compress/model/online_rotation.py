"""Rotations that a model computes as it runs: what a layer reads is multiplied by a Hadamard matrix, block by block.

    y = W x = (W H) (H^T x)        the layer holds W H; a hook of it makes H^T x of what it is given

It is for inputs whose producer takes no rotation, as an activation lies in between. What is rounded behind it, and the
statistics that a pass collects, are of the rotated input.
"""

from typing import Any

from torch import Tensor, nn

from compress.model.edits.changes import Change, change
from compress.weights.rotations.hadamard import rotated


class RotateInput:
    """A hook that rotates what a layer is given. block: channels that one Hadamard matrix mixes."""

    def __init__(self, block: int) -> None:
        self.block = block

    def rotated(self, x: Tensor) -> Tensor:
        """The rotated input."""
        return rotated(x, self.block)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.rotated(args[0]), *args[1:])


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
    return x if hook is None else hook.rotated(x)
