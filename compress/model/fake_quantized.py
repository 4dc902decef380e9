"""Layers that hold the values of codes, and not the codes: those of a model that was quantized in memory.

Each module remembers the scheme that its weight was decided in, so that its packed size is known. A weight that has
been given other values since is an ordinary one again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.model.layers import Layer
from compress.weights.scheme import Scheme

HELD = "_fake_quantized"  # attribute of a module: {(parameter, index of its slice): FakeQuantized}


@dataclass(frozen=True)
class FakeQuantized:
    """A weight [N, K]. digest: of its values."""

    scheme: Scheme
    shape: tuple[int, int]
    digest: int


def remember_scheme(layer: Layer, scheme: Scheme, dtype: torch.dtype) -> None:
    """Note the scheme of a layer's weight, as it is now. dtype: in which the model stores it."""
    held = layer.module.__dict__.setdefault(HELD, {})
    held[layer.key, layer.index] = FakeQuantized(scheme, layer.shape, _digest(layer.weight.to(dtype)))


def fake_quantized(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, FakeQuantized]]:
    """(Name of the module, parameter, its weight as it was decided) of every weight that still has the values of
    codes."""
    for name, module in model.named_modules():
        for (key, index), decided in module.__dict__.get(HELD, {}).items():
            parameter = module._parameters.get(key)
            if parameter is None:
                continue
            values = parameter.data if index is None else parameter.data[index]
            if _digest(values) == decided.digest:
                yield name, parameter, decided


def _digest(values: Tensor) -> int:
    """The same for equal values of any dtype, order and device."""
    return int(torch.hash_tensor(values.detach()).view(torch.int64))
