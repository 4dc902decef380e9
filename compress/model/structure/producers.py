"""The modules of a block whose output channels can be scaled through their own parameters: linear layers and norms.

A norm is recognised by its behaviour: scaling its weight and bias scales its output's channels. A trial tells a norm
that multiplies by w from one that multiplies by 1 + w.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from compress.model.calls import removing
from compress.model.convolution import geometry_of, is_convolution, output_sizes
from compress.model.edits.changes import DATA, change, for_now
from compress.model.edits.folds import Kind, divided_norm
from compress.model.layers import Layer, is_linear

ROUNDING = 2.0**-16  # a norm that multiplies by 1 + w cannot hold every power of two exactly in float32
LARGEST_SHIFT = 6  # factors up to 2^6: the output of a module that does not scale is then far from the scaled one

CHANNELS_SECOND = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.PReLU)  # torch counts channels along dimension 1


@dataclass(frozen=True)
class Producer:
    """A module whose output channels can be scaled. kind: the form of the scale; channels: their number C."""

    module: nn.Module
    kind: Kind
    channels: int

    @property
    def is_linear(self) -> bool:
        return self.kind == "linear"

    def leading(self, x: Tensor) -> torch.Size:
        """The shape of its output, without the channels, for an input."""
        if not is_convolution(self.module):
            return x.shape[:-1]
        geometry = geometry_of(self.module)
        spatial = len(geometry.kernel)
        return torch.Size((*x.shape[: -spatial - 1], *output_sizes(x.shape[-spatial:], geometry)))

    def arranged(self, output: Tensor) -> Tensor:
        """An output [..., C] with its channels moved to the dimension where the module has them."""
        return output.movedim(-1, -1 - len(geometry_of(self.module).kernel)) if is_convolution(self.module) else output

    def rows(self, x: Tensor) -> Tensor:
        """Its input as rows of channels [M, K]."""
        axis = x.ndim - 1
        if is_convolution(self.module):
            axis -= len(geometry_of(self.module).kernel)
        elif isinstance(self.module, CHANNELS_SECOND) and x.ndim > 2:
            axis = 1
        return x.movedim(axis, -1).reshape(-1, x.shape[axis])


def repeated_parameters(model: nn.Module) -> set[int]:
    """Identities (`id`) of the parameters that have several names, be it as a part of one module that has several."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def powers_of_two(exponents_C: Tensor) -> Tensor:
    """2^e in float32, exact: torch's exp2 and ldexp may be off in the last bit."""
    return torch.tensor([2.0**e for e in exponents_C.tolist()], dtype=torch.float32)


def producers_of(block: nn.Module, run: Callable[[], Any]) -> dict[str, Producer]:
    """{name: producer} in registration order. `run` runs the block once; norms that it does not reach are left out."""
    kinds: dict[str, Kind | None] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if name not in kinds:
            kinds[name] = _norm_kind(module, args, kwargs, output)

    hooks = [
        module.register_forward_hook(partial(note, name), with_kwargs=True)
        for name, module in block.named_modules()
        if _may_be_norm(module)
    ]
    with removing(hooks):
        run()
    producers: dict[str, Producer] = {}
    for name, module in block.named_modules():
        kind = kinds.get(name)
        if is_linear(module) and "weight" in module._parameters:
            producers[name] = Producer(module, "linear", Layer(name, module).shape[0])
        elif kind is not None:
            assert isinstance(module.weight, Tensor)
            producers[name] = Producer(module, kind, module.weight.numel())
    return producers


def _may_be_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and {n for n, _ in module.named_parameters()} <= {"weight", "bias"}


def _norm_kind(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Kind | None:
    """The kind of norm of a module whose weight is a vector; None where it does not scale its last dimension."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, nn.Parameter)
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not isinstance(output, Tensor) or not inputs or output.shape != inputs[0].shape:
        return None
    if output.shape[-1] != weight.numel():
        return None
    scale_C = powers_of_two(torch.arange(weight.numel()) % LARGEST_SHIFT + 1).to(weight)
    kinds: tuple[Kind, ...] = ("norm", "norm_plus_one")
    for kind in kinds:
        scaled_C, _ = divided_norm(weight.data, 1 / scale_C, kind == "norm_plus_one", weight.dtype)
        with for_now() as done:
            done.append(change(weight, DATA, scaled_C))
            if bias is not None:
                done.append(change(bias, DATA, bias.data * scale_C))
            # Call its forward, not the module: hooks would run, among them the one that called this.
            if distance([module.forward(*args, **kwargs)], [output * scale_C]) <= ROUNDING:
                return kind
    return None


def distance(values: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest expected value of its tensor; 0 only for identical tensors, and
    infinite for tensors of other shapes."""
    if [v.shape for v in values] != [e.shape for e in expected]:
        return float("inf")
    worst = 0.0
    for value, other in zip(values, expected, strict=True):
        if not torch.equal(value, other):
            difference = (value.double() - other.double()).abs().max()
            relative = float(difference / other.double().abs().max())
            worst = max(worst, relative if relative == relative else float("inf"))
    return worst
