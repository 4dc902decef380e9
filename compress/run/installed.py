"""What a block's layers were and what they are now: weights to swap, inputs, outputs and caches to be rounded."""

from typing import Any

from torch import Tensor, nn

from compress.model.attention import hold_scales
from compress.model.convolution import Geometry, samples
from compress.runtime.caches import RoundCache, round_cache
from compress.weights.caches import CacheCodes
from compress.weights.grid import straight_through
from compress.weights.rounding import ActivationCodes


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
        if not self.codes.dynamic:
            channel = -1 - len(self.geometry.kernel)
            return self.codes.fake_quantize(x.movedim(channel, -1)).movedim(-1, channel)
        return self.codes.fake_quantize(samples(x, self.geometry).flatten(1)).reshape(x.shape)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.active:
            return args
        x = args[0]
        return (straight_through(x, self.rounded(x.detach())), *args[1:])


class RoundOutput:
    """A hook that rounds what a layer returns, by a range fixed for the whole tensor."""

    def __init__(self, codes: ActivationCodes) -> None:
        self.codes, self.active = codes, True

    def rounded(self, y: Tensor) -> Tensor:
        """What the layer hands on in place of y."""
        return self.codes.fake_quantize(y)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return straight_through(output, self.rounded(output.detach())) if self.active else output


class Versions:
    """The original and the new state of the layers changed so far in a block, to swap between."""

    def __init__(self) -> None:
        self.pairs: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self.inputs: dict[nn.Module, RoundInput] = {}
        self.outputs: dict[nn.Module, RoundOutput] = {}
        self.installed: set[nn.Module] = set()
        self.caches: list[RoundCache] = []

    def add(self, parameter: nn.Parameter, new: Tensor) -> None:
        original = next((old for changed, old, _ in self.pairs if changed is parameter), parameter.data)
        self.pairs = [pair for pair in self.pairs if pair[0] is not parameter] + [(parameter, original, new)]
        parameter.data = new

    def keep_codes(self, attention: nn.Module, codes: CacheCodes) -> None:
        """From now on an attention's cache is rounded. The scales are no part of the model's state_dict."""
        if codes.scales is not None:
            hold_scales(attention, codes.scales, persistent=False)
        self.caches.append(round_cache(attention, codes.scheme))

    def use_original(self, original: bool) -> None:
        for parameter, old, new in self.pairs:
            parameter.data = old if original else new
        hooks: list[RoundInput | RoundOutput] = [*self.inputs.values(), *self.outputs.values()]
        for hook in hooks:
            hook.active = not original
        for cache in self.caches:
            cache.active = not original

    def entering(self, module: nn.Module, x: Tensor) -> Tensor:
        """What a layer multiplies while forwards are suspended: hooks that they already passed cannot act."""
        hook = self.inputs.get(module)
        return x if hook is None or not hook.active or module in self.installed else hook.rounded(x)

    def leaving(self, module: nn.Module, y: Tensor) -> Tensor:
        """What a layer hands on while forwards are suspended."""
        hook = self.outputs.get(module)
        return y if hook is None or not hook.active or module in self.installed else hook.rounded(y)

    def install_hooks(self) -> None:
        """From now on the layers round their own inputs and outputs."""
        for module in {**self.inputs, **self.outputs}:
            if module in self.installed:
                continue
            if module in self.inputs:
                module.register_forward_pre_hook(self.inputs[module])
            if module in self.outputs:
                module.register_forward_hook(self.outputs[module])
            self.installed.add(module)
