"""int8 layers computed as other runtimes compute them, to tell a runtime's arithmetic from a damaged checkpoint.

Two habits that ours does not have. Inputs by absmax / 127: a token's largest magnitude is code 127 (compressed-tensors
and compress divide by 127.5, and use -128 too). Pairs in 16 bits: a CPU without VNNI multiplies with `vpmaddubsw`,
which adds the products of two neighbours and cuts the sum off at 16 bits; oneDNN then feeds it inputs raised by 128, so
that pairs of large weights of one sign overflow.

M tokens, N outputs, K inputs, P pairs of inputs.
"""

import torch
from torch import Tensor, nn

from compress.inference.layers.linear import Int8Linear

LARGEST = 127
RAISED = 128  # signed inputs become unsigned by it
PAIR_MIN, PAIR_MAX = -(2**15), 2**15 - 1
CHUNK = 2**13  # pairs at a time: each takes a column of M numbers


def exact(x_MK: Tensor, codes_NK: Tensor) -> Tensor:
    """Integer products [M, N], in float64: exact up to 2**53."""
    return x_MK.double() @ codes_NK.double().T


def cut_off(x_MK: Tensor, codes_NK: Tensor) -> Tensor:
    """The error of products in 16-bit pairs, [M, N]: to be added to `exact`. An odd last input has no neighbour."""
    if codes_NK.shape[1] % 2:
        x_MK, codes_NK = nn.functional.pad(x_MK, (0, 1)), nn.functional.pad(codes_NK, (0, 1))
    raised_MP2 = (x_MK.to(torch.int32) + RAISED).unflatten(1, (-1, 2))
    codes_NP2 = codes_NK.to(torch.int32).unflatten(1, (-1, 2))
    most = 2 * RAISED - 1
    high, low = codes_NP2.clamp(min=0).sum(-1) * most, codes_NP2.clamp(max=0).sum(-1) * most
    rows, pairs = ((high > PAIR_MAX) | (low < PAIR_MIN)).nonzero(as_tuple=True)
    lost_MN = torch.zeros(len(x_MK), len(codes_NK), dtype=torch.float64)
    for n, p in zip(rows.split(CHUNK), pairs.split(CHUNK), strict=True):
        sums = (raised_MP2[:, p] * codes_NP2[n, p]).sum(-1)
        lost_MN.index_add_(1, n, (sums.clamp(PAIR_MIN, PAIR_MAX) - sums).double())
    return lost_MN


class Emulated(nn.Module):
    """An int8 layer with symmetric inputs, computed in these ways."""

    def __init__(self, layer: Int8Linear, dynamic: bool, pairs: bool) -> None:
        super().__init__()
        self.layer, self.dynamic, self.pairs = layer, dynamic, pairs

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1]).float()
        fixed = self.layer.input_scale
        if self.dynamic or fixed is None:
            scale_M1 = x_MK.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
        else:
            scale_M1 = fixed.expand(len(x_MK), 1)
        codes_MK = (x_MK / scale_M1).round().clamp(-LARGEST - 1, LARGEST)
        sums = exact(codes_MK, self.layer.codes)
        if self.pairs:
            sums += cut_off(codes_MK, self.layer.codes)
        y = (sums * scale_M1 * self.layer.weight_scale).to(x.dtype)
        y = y if self.layer.bias is None else y + self.layer.bias
        return y.reshape(*x.shape[:-1], -1)


def emulate(model: nn.Module, *, dynamic: bool, pairs: bool) -> int:
    """Let every int8 layer of a loaded model compute in these ways, in place; returns the number of layers.

    dynamic: inputs by absmax / 127 for every token, also where the checkpoint fixes their scale. pairs: products in
    pairs of 16 bits.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    for name, layer in layers.items():
        if layer.scheme.inputs is None or not layer.scheme.inputs.symmetric or layer.output_scale is not None:
            raise ValueError(f"{name} is {layer.scheme}; only symmetric inputs and dense outputs are emulated")
        model.set_submodule(name, Emulated(layer, dynamic, pairs))
    return len(layers)
