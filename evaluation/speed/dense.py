"""The dense model that a compressed one is held against: the same values, and the same layers multiplied together."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.fused import FusedLinear

# Layers that read one tensor, under the names that decoders have for them.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def densify(model: nn.Module) -> None:
    """Replace every compressed layer by a linear layer with the values that its codes stand for, one after the other.

    A layer that rounds its input to int8 becomes one that does not: a baseline of speed, not of accuracy.
    """
    for name, layer in list(compressed_layers(model)):
        bias: Any = layer.bias
        model.set_submodule(name, _linear(layer.dequantize(), bias))


def fuse_dense(model: nn.Module) -> None:
    """Multiply linear layers that read one tensor together, as `lowbit.fuse` does for compressed ones."""
    for parent in list(model.modules()):
        for names in SIBLINGS:
            layers = [getattr(parent, name, None) for name in names]
            if all(isinstance(layer, nn.Linear) for layer in layers):
                _fuse(parent, names, cast(list[nn.Linear], layers))


def fused_groups(model: nn.Module) -> int:
    """Groups of layers that are one product."""
    return sum(isinstance(m, FusedLinear) and m.stacked is not None for m in model.modules())


def _linear(weight_NK: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        made = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=bias is not None)
    made.weight = nn.Parameter(weight_NK, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made


def _fuse(parent: nn.Module, names: Sequence[str], layers: Sequence[nn.Linear]) -> None:
    biases = [layer.bias for layer in layers]
    bias = None if any(b is None for b in biases) else torch.cat([b.detach() for b in biases])
    if bias is None and any(b is not None for b in biases):
        return
    stacked: Any = _linear(torch.cat([layer.weight.detach() for layer in layers]), bias)
    first, start = None, 0
    for name, layer in zip(names, layers, strict=True):
        stop = start + layer.out_features
        made = FusedLinear(first, stacked if first is None else None, start, stop, layer is layers[-1])
        first, start = first or made, stop
        setattr(parent, name, made)
