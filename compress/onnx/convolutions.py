"""Convolutions that stand for compressed ones while a graph is traced.

    DequantizeLinear (weights) -> Conv                                              weights alone
    QuantizeLinear -> DequantizeLinear -> Conv <- DequantizeLinear (weights)        int8 inputs of a fixed range, too

Weights are [N, C / groups, *kernel] with one scale for each output: int8, or uint8 with zero points, or beside rounded
inputs either: ONNX Runtime's fastest products are of int8, and saturate on x86 without VNNI; those of uint8 with the
zero point 128 are exact everywhere. ONNX Runtime computes the second form in integers (QLinearConv)
where the output is rounded again, alone or behind a ReLU. It then rounds the bias to a multiple of the two scales.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.model.convolution import geometry_of
from compress.onnx.layers import MIDDLE, GraphLayer, RoundedInGraph
from compress.weights.decision import Decision
from compress.weights.grid import Quantized
from compress.weights.rounding import ActivationCodes


class GraphConvolution(GraphLayer):
    """A Conv1d, Conv2d or Conv3d with its codes. inputs: how it rounds what it reads, or None. signed: whether
    symmetric codes beside rounded inputs are written as int8."""

    def __init__(
        self, module: nn.Module, weight: Quantized, inputs: ActivationCodes | None, signed: bool = True
    ) -> None:
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        super().__init__(module.out_channels, None)
        signed = weight.zero_point is None and (signed or inputs is None)
        codes = weight.codes.reshape(module.weight.shape).to(torch.int16)
        self.register_buffer("codes", codes.to(torch.int8) if signed else (codes + MIDDLE).to(torch.uint8))
        self.register_buffer("scale", weight.scale.to(torch.float32).flatten().expand(len(codes)).contiguous())
        zero = torch.zeros(1) if weight.zero_point is None else weight.zero_point
        raised = (zero.flatten().to(torch.int16) + MIDDLE).to(torch.uint8).expand(len(codes)).contiguous()
        self.register_buffer("zero", torch.zeros(len(codes), dtype=torch.int8) if signed else raised)
        self.register_buffer("bias", None if module.bias is None else module.bias.detach().to(torch.float32))
        self.geometry = geometry_of(module)
        self.inputs = None if inputs is None else RoundedInGraph(inputs)

    def forward(self, x: Tensor) -> Tensor:
        """The node's result [B, N, *S], in which the bias is already."""
        found = self.product(x)
        return found if self.outputs is None else self.outputs(found)

    def product(self, x: Tensor) -> Tensor:
        """Two or four nodes, and one that pads where `Conv` cannot."""
        g = self.geometry
        even = g.mode == "constant" and all(before == after for before, after in g.padding)
        if not even:
            x = functional.pad(x, [size for pair in reversed(g.padding) for size in pair], mode=g.mode)
        padding = [before for before, _ in g.padding] if even else [0] * len(g.kernel)
        x = x if self.inputs is None else self.inputs(x)
        parts = [self.codes, self.scale] + ([] if self.zero is None else [self.zero])
        weight = self._node("::DequantizeLinear", parts, x.new_empty(self.codes.shape), axis=0)
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(g.kernel) - 1]
        return convolve(x, weight, self.bias, list(g.stride), padding, list(g.dilation), g.groups)


def why_not_convolution(decision: Decision) -> str | None:
    """The reason why a convolution with this decision has no exact form in ONNX, the end of a sentence about it."""
    first, *others = decision.weight.terms
    if others or not isinstance(first, Quantized) or first.grid.type != "int" or not first.grid.signed:
        return "is no convolution of integer codes; quantize it by one pass, like RTN or GPTQ"
    if first.grid.group_size is not None:
        return f"has groups of {first.grid.group_size}; a convolution has one scale per output: give group_size=-1"
    inputs = decision.inputs
    if inputs is None:
        return None
    if inputs.dynamic or inputs.grid.floating or (inputs.scale is not None and inputs.scale.numel() > 1):
        return "fits its inputs to every sample or channel; quantize with activations='static'"
    return None if first.grid.symmetric else "has zero points beside rounded inputs; quantize weights symmetrically"
