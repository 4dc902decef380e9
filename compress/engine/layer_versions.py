"""Former and present versions of a block's layers: weights to swap, inputs, outputs and caches to be rounded."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.base.errors import CompressError
from compress.inference.load.kv_caches import RoundCache, round_cache
from compress.model.attention import hold_scales
from compress.model.calls import Arrival
from compress.model.convolution import Geometry, elements, on_channels, on_samples
from compress.model.layers import Layer
from compress.weights.decision import Decision
from compress.weights.grid import straight_through
from compress.weights.kv_cache_codes import CacheCodes
from compress.weights.rounding import ActivationCodes


class RoundInput:
    """A hook that rounds what a layer is given, so that a model in memory computes what its checkpoint will.

    Without codes it does nothing. It can so be in place before it is known how to round: a forward that waits in an
    earlier hook of the layer meets this one when it goes on.

    What a token is to a linear layer, a sample is to a convolution: a dynamic range is fitted to each.
    """

    def __init__(self, geometry: Geometry | None = None, codes: ActivationCodes | None = None) -> None:
        self.geometry, self.codes, self.active = geometry, codes, True

    def rounded(self, x: Tensor) -> Tensor:
        """The rounded input, which the layer multiplies in place of x; x itself while inactive."""
        if self.codes is None or not self.active:
            return x
        on = on_samples if self.codes.dynamic else on_channels
        return on(x, self.geometry, self.codes.fake_quantize)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.codes is None or not self.active:
            return args
        x = args[0]
        return (straight_through(x, self.rounded(x.detach())), *args[1:])


class RoundOutput:
    """A hook that rounds what a layer returns, by a range fixed for the whole tensor. Without codes it does nothing."""

    def __init__(self, codes: ActivationCodes | None = None) -> None:
        self.codes, self.active = codes, True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if self.codes is None or not self.active:
            return output
        return straight_through(output, self.codes.fake_quantize(output.detach()))


def check_decided(layer: str, values: Tensor, decided: Decision | Tensor) -> None:
    """Raise CompressError where the values that were decided for a layer, or the scales by which it rounds its input or
    output, are not finite numbers."""
    sides = {"input": decided.inputs, "output": decided.outputs} if isinstance(decided, Decision) else {}
    scales = {f"{side} scale": codes.scale for side, codes in sides.items() if codes is not None}
    for what, held in {"weight": values, **scales}.items():
        if held is not None and not bool(torch.isfinite(held).all()):
            raise CompressError(
                f"the {what} that was decided for {layer} is not made of finite numbers; if it was trained, lower the "
                "learning rate, otherwise leave the layer alone (ignore)"
            )


class Versions:
    """The original and the new state of the layers changed so far in a block, to swap between. originals: whether the
    original weights are kept; without them there is no way back."""

    def __init__(self, originals: bool = True) -> None:
        self.originals = originals
        self.weights: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # what it was, what it is
        self._unchanged: set[nn.Parameter] = set()  # of these, copies in which no slice is new
        self.inputs: dict[nn.Module, RoundInput] = {}
        self.outputs: dict[nn.Module, RoundOutput] = {}
        self.caches: list[RoundCache] = []
        self._shows_original = False
        self._handles: dict[RoundInput | RoundOutput, RemovableHandle] = {}

    def install(self, layer: Layer, decided: Decision | Tensor) -> None:
        """Give a layer the values [N, K] that were decided (a tensor: its weight as it is stored), and hooks that round
        its input and output. Raises CompressError for values or scales that are not finite."""
        parameter = layer.parameter
        values = decided.weight.dequantize() if isinstance(decided, Decision) else decided
        check_decided(layer.name, values, decided)
        values = values.to(parameter.device, parameter.dtype)
        new = layer.stored(values) if isinstance(decided, Decision) else values
        if layer.index is None:
            self.replace(parameter, new)
        else:
            layer.part(self._copy_of(parameter)).copy_(new)
            self._unchanged.discard(parameter)
        if isinstance(decided, Decision) and decided.inputs is not None:
            self.round_input(layer, decided.inputs)
        if isinstance(decided, Decision) and decided.outputs is not None:
            self.round_output(layer, decided.outputs)

    def replace(self, parameter: nn.Parameter, new: Tensor) -> None:
        """Give a parameter other values."""
        before = self.weights[parameter][0] if parameter in self.weights else parameter.data
        self.weights[parameter] = before if self.originals else new, new
        parameter.data = self.weights[parameter][not self._shows_original]

    def drop(self, parameter: nn.Parameter) -> None:
        """Forget the values of a parameter."""
        self.weights.pop(parameter, None)

    def _copy_of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor of a parameter that gets new values slice by slice, in place: suspended forwards hold views of it.
        The original tensor is not changed, where originals are kept."""
        if parameter not in self.weights:
            self.replace(parameter, parameter.data.clone() if self.originals else parameter.data)
            self._unchanged.add(parameter)
        return self.weights[parameter][1]

    def round_input(self, layer: Layer, codes: ActivationCodes) -> None:
        """Make a layer round its inputs."""
        self._input_of(layer).codes = codes

    def round_output(self, layer: Layer, codes: ActivationCodes) -> None:
        """Make a layer round its outputs."""
        self._output_of(layer).codes = codes

    def keep_codes(self, attention: nn.Module, codes: CacheCodes) -> None:
        """Make an attention round its cache. The scales are not in the model's state_dict."""
        if codes.scales is not None:
            hold_scales(attention, codes.scales, persistent=False)
        self.caches.append(round_cache(attention, codes.scheme)[0])

    def returned(self, layer: Layer, arrival: Arrival | None) -> Tensor:
        """[M, N] the output of a layer, as it is now, for a micro-batch suspended before it, bias included; of a
        convolution, rows of channels."""
        if arrival is None:
            return torch.empty(0, layer.shape[0], device=layer.weight.device)
        x = arrival.x_MK if arrival.samples is None else arrival.samples
        if layer.module in self.inputs:
            x = self.inputs[layer.module].rounded(x)
        y = layer.module.forward(x)  # not called: its hooks belong to the forwards that wait
        return y if layer.geometry is None else elements(y, layer.geometry)

    @contextmanager
    def original(self) -> Iterator[None]:
        """Restores the original weights, and turns rounding off, inside the context."""
        assert self.originals, "the original weights were not kept"
        self._use(original=True)
        try:
            yield
        finally:
            self._use(original=False)

    def _use(self, *, original: bool) -> None:
        self._shows_original = original
        for parameter, (old, new) in self.weights.items():
            parameter.data = old if original else new
        hooks: list[RoundInput | RoundOutput | RoundCache] = [*self.inputs.values(), *self.outputs.values()]
        for hook in (*hooks, *self.caches):
            hook.active = not original

    @contextmanager
    def ready(self, layers: Iterable[Layer]) -> Iterator[None]:
        """Gives layers hooks that act as soon as `install` gives them codes, and slices a tensor that may be changed in
        place. Removes hooks without codes and unchanged copies after the context."""
        for layer in layers:
            if layer.index is not None:
                self._copy_of(layer.parameter)
            if layer.is_called:
                self._input_of(layer)
                self._output_of(layer)
        try:
            yield
        finally:
            self._drop_unused()

    def _input_of(self, layer: Layer) -> RoundInput:
        module = layer.module
        if module not in self.inputs:
            hook = self.inputs[module] = RoundInput(layer.geometry)
            hook.active = not self._shows_original
            self._handles[hook] = module.register_forward_pre_hook(hook)
        return self.inputs[module]

    def _output_of(self, layer: Layer) -> RoundOutput:
        module = layer.module
        if module not in self.outputs:
            hook = self.outputs[module] = RoundOutput()
            hook.active = not self._shows_original
            self._handles[hook] = module.register_forward_hook(hook)
        return self.outputs[module]

    def _drop_unused(self) -> None:
        for hook in [hook for hook in self._handles if hook.codes is None]:
            self._handles.pop(hook).remove()
        self.inputs = {module: hook for module, hook in self.inputs.items() if hook.codes is not None}
        self.outputs = {module: hook for module, hook in self.outputs.items() if hook.codes is not None}
        for parameter in self._unchanged:
            parameter.data = self.weights.pop(parameter)[0]
        self._unchanged.clear()
