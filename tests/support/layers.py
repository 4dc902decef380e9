"""What holds for every layer that computes on what is stored."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from compress.inference.check.dense_twin import error
from compress.inference.layers.linear import QuantLinear


def holds(layer: QuantLinear, values: Tensor, parts: Mapping[str, Tensor], x: Tensor) -> None:
    """A layer made of stored parts stands for these values, has the parts in its state dict bit for bit, multiplies as
    far from the values as is allowed, and is the same again from its state dict."""
    assert torch.equal(layer.dequantize(), values)
    state = layer.state_dict()
    assert state.keys() == parts.keys()
    assert all(torch.equal(state[name], part) and state[name].dtype == part.dtype for name, part in parts.items())
    assert error(layer, x, layer(x)) <= 1
    again = copy.deepcopy(layer)
    for buffer in again.buffers():
        buffer.zero_()
    again.load_state_dict(state)
    assert torch.equal(again(x), layer(x))
