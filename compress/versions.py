"""What a block's layers were and what they are now: weights that can be swapped, inputs that are rounded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compress.convolution import Geometry, samples
from compress.scheme import ActivationCodes


class RoundInput:
    """A hook that rounds what a layer is given, so that a model in memory computes what its checkpoint will.

    What a token is to a linear layer, a sample is to a convolution: a dynamic range is fitted to each.
    """

    def __init__(self, codes: ActivationCodes, geometry: Geometry | None = None) -> None:
        self.codes, self.geometry, self.active = codes, geometry, True

    def rounded(self, x: Tensor) -> Tensor:
        """What the layer multiplies in place of x."""
        if self.geometry is None:
            return self.codes.fake_quantize(x)
        return self.codes.fake_quantize(samples(x, self.geometry).flatten(1)).reshape(x.shape)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_StraightThrough.apply(args[0], self.rounded), *args[1:]) if self.active else args


class _StraightThrough(torch.autograd.Function):
    """Rounded inputs whose gradient is that of the inputs, as the kernels have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Versions:
    """The original and the new state of the layers changed so far in a block, to swap between."""

    def __init__(self) -> None:
        self.pairs: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self.hooks: dict[nn.Module, RoundInput] = {}
        self.installed: set[nn.Module] = set()

    def add(self, parameter: nn.Parameter, new: Tensor) -> None:
        self.pairs.append((parameter, parameter.data, new))
        parameter.data = new

    def use_original(self, original: bool) -> None:
        for parameter, old, new in self.pairs:
            parameter.data = old if original else new
        for hook in self.hooks.values():
            hook.active = not original

    def entering(self, module: nn.Module, x: Tensor) -> Tensor:
        """What a layer multiplies while forwards are suspended: hooks that they already passed cannot act."""
        hook = self.hooks.get(module)
        return x if hook is None or not hook.active or module in self.installed else hook.rounded(x)

    def install_hooks(self) -> None:
        """From now on the layers round their own inputs."""
        for module, hook in self.hooks.items():
            if module not in self.installed:
                module.register_forward_pre_hook(hook)
                self.installed.add(module)
