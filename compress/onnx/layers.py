"""Layers that stand for compressed ones while a graph is traced. Each becomes the nodes that ONNX Runtime runs.

Their results in torch are zeros: only the graph computes. A node that reads codes names its layer.

    NBits       MatMulNBits (com.microsoft)                 codes of 2, 4 and 8 bits
    InBlocks    DequantizeLinear -> MatMul                  codes of 4 and 8 bits, standard operators
    Static      QuantizeLinear -> DequantizeLinear -> MatMul <- DequantizeLinear     w8a8 with a fixed range of inputs
    Dynamic     largest magnitude of each token -> round -> MatMulInteger            w8a8 fitted to every token

    GraphConvolution    (QuantizeLinear -> DequantizeLinear ->) Conv <- DequantizeLinear     inputs as they are, or int8

A layer that also rounds its output has QuantizeLinear and DequantizeLinear behind it.

Inputs of 8 bits are written unsigned, with the zero point 128. Codes beside them are int8, whose products are
ONNX Runtime's fastest, or unsigned, too. On x86 without VNNI its products of signed weights saturate; those of unsigned
ones are exact everywhere. ONNX Runtime computes a convolution in integers (QLinearConv) where its output is rounded
again, alone or behind a ReLU. It then rounds the bias to a multiple of the two scales.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.model.convolution import geometry_of
from compress.onnx.repacked import BYTE, BlockCodes, pack
from compress.weights.decision import Decision
from compress.weights.grid import Grid, Quantized
from compress.weights.rounding import ActivationCodes

INT4, UINT4 = "INT4", "UINT4"
MIDDLE = 128
LAYER = "compress.layer"
# Below it, onnxruntime would multiply by the reciprocal of a number that is none.
TINY = torch.finfo(torch.float32).tiny


class RoundedInGraph(nn.Module):
    """A tensor rounded by a fixed scale and zero point, to unsigned codes."""

    scale: Tensor
    zero: Tensor

    def __init__(self, codes: ActivationCodes) -> None:
        super().__init__()
        assert codes.scale is not None
        zero = torch.zeros(1) if codes.zero_point is None else codes.zero_point
        raised = zero.reshape(()).to(torch.int16) + (MIDDLE if codes.grid.signed else 0)
        self.register_buffer("scale", codes.scale.to(torch.float32).reshape(()))
        self.register_buffer("zero", raised.to(torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        """Two nodes."""
        held = [self.scale, self.zero]
        like = x.new_empty(x.shape, dtype=torch.uint8)
        codes = torch.onnx.ops.symbolic("::QuantizeLinear", [x, *held], dtype=torch.uint8, shape=like.shape)
        return torch.onnx.ops.symbolic("::DequantizeLinear", [codes, *held], dtype=x.dtype, shape=x.shape)


class GraphLayer(nn.Module):
    """A linear layer in a graph: `product`, a bias, and perhaps a rounded output.

    label: its name in the model, which the node that reads the codes carries under LAYER. narrow: {buffer: the ONNX
    type of 4 bits in which it is written}; torch holds one code in a byte.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None

    def __init__(self, features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.features, self.label = features, ""
        self.narrow: dict[str, str] = {}
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32))
        self.outputs: RoundedInGraph | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The node's result [..., N] of x [..., K]."""
        found = self.product(x)
        found = found if self.bias is None else found + self.bias
        return found if self.outputs is None else self.outputs(found)

    def product(self, x: Tensor) -> Tensor:
        """The product without the bias."""
        raise NotImplementedError

    def _node(self, kind: str, inputs: list[Tensor], like: Tensor, **attributes: Any) -> Tensor:
        """A node of a kind ("domain::name"), whose result has the shape and dtype of `like`."""
        version = 1 if kind.startswith("com.microsoft") else None
        noted = {LAYER: self.label} if any(held is self.codes for held in inputs) else None
        return torch.onnx.ops.symbolic(
            kind,
            inputs,
            attrs=attributes,
            dtype=like.dtype,
            shape=like.shape,
            version=version,
            metadata_props=noted,
        )


class NBits(GraphLayer):
    """`MatMulNBits` on codes in blocks. level: 4 rounds inputs to int8 in the product, 0 does not."""

    def __init__(self, blocks: BlockCodes, bias: Tensor | None, level: int) -> None:
        rows, columns = blocks.codes.shape
        super().__init__(rows, bias)
        count = blocks.scale.shape[1]
        full = nn.functional.pad(blocks.codes, (0, count * blocks.block - columns))
        self.register_buffer("codes", pack(full.unflatten(1, (count, blocks.block)), blocks.bits))
        self.register_buffer("scale", blocks.scale)
        self.register_buffer("zero", None if blocks.zero is None else pack(blocks.zero, blocks.bits))
        self.attributes = {
            "K": columns,
            "N": rows,
            "bits": blocks.bits,
            "block_size": blocks.block,
            "accuracy_level": level,
        }

    def product(self, x: Tensor) -> Tensor:
        """One node."""
        inputs = [x, self.codes, self.scale] + ([] if self.zero is None else [self.zero])
        like = x.new_empty((*x.shape[:-1], self.features))
        return self._node("com.microsoft::MatMulNBits", inputs, like, **self.attributes)


class InBlocks(GraphLayer):
    """`DequantizeLinear` of codes in blocks, and `MatMul`."""

    def __init__(self, blocks: BlockCodes, bias: Tensor | None) -> None:
        super().__init__(len(blocks.codes), bias)
        middle = 2 ** (blocks.bits - 1)
        signed = blocks.zero is None
        codes = (blocks.codes.to(torch.int16) - middle).to(torch.int8) if signed else blocks.codes
        self.register_buffer("codes", codes.t().contiguous())
        self.register_buffer("scale", blocks.scale.t().contiguous())
        self.register_buffer("zero", None if blocks.zero is None else blocks.zero.t().contiguous())
        self.block = blocks.block
        if blocks.bits < BYTE:
            self.narrow = dict.fromkeys(("codes", "zero"), INT4 if signed else UINT4)

    def product(self, x: Tensor) -> Tensor:
        """Two nodes."""
        inputs = [self.codes, self.scale] + ([] if self.zero is None else [self.zero])
        like = x.new_empty(self.codes.shape)
        return x @ self._node("::DequantizeLinear", inputs, like, axis=0, block_size=self.block)


class ByteRows(GraphLayer):
    """Weights of 8 bits beside inputs of 8 bits: codes [K, N], and one scale and zero point for each output."""

    zero: Tensor

    def __init__(self, weight: Quantized, bias: Tensor | None, signed: bool) -> None:
        rows, _ = weight.codes.shape
        super().__init__(rows, bias)
        kind, zero = (torch.int8, 0) if signed else (torch.uint8, MIDDLE)
        self.register_buffer("codes", (weight.codes.to(torch.int16) + zero).to(kind).t().contiguous())
        self.register_buffer("zero", torch.full((rows,), zero, dtype=kind))
        self.register_buffer("scale", weight.scale.to(torch.float32).flatten().expand(rows).contiguous())


class Static(ByteRows):
    """Inputs rounded by a fixed scale and zero point. ONNX Runtime fuses the nodes to an integer product."""

    def __init__(self, weight: Quantized, bias: Tensor | None, inputs: ActivationCodes, signed: bool) -> None:
        super().__init__(weight, bias, signed)
        self.inputs = RoundedInGraph(inputs)

    def product(self, x: Tensor) -> Tensor:
        """Four nodes."""
        like = x.new_empty(self.codes.shape)
        return self.inputs(x) @ self._node("::DequantizeLinear", [self.codes, self.scale, self.zero], like, axis=1)


class Dynamic(ByteRows):
    """Inputs rounded by a scale for every token, symmetrically, as `Grid` of that kind defines it."""

    middle: Tensor

    def __init__(self, weight: Quantized, bias: Tensor | None, grid: Grid, steps: float, signed: bool) -> None:
        super().__init__(weight, bias, signed)
        self.grid, self.steps = grid, steps
        self.zero = self.zero[0].clone()
        self.register_buffer("middle", torch.tensor(MIDDLE, dtype=torch.uint8))

    def product(self, x: Tensor) -> Tensor:
        """About ten nodes, an integer product among them."""
        scale = (x.abs().amax(-1, keepdim=True) / self.steps).clamp(min=TINY)
        rounded = (torch.round(x / scale) + MIDDLE).clamp(self.grid.qmin + MIDDLE, self.grid.qmax + MIDDLE)
        like = x.new_empty((*x.shape[:-1], self.features), dtype=torch.int32)
        inputs = [rounded.to(torch.uint8), self.codes, self.middle, self.zero]
        return self._node("::MatMulInteger", inputs, like).to(x.dtype) * scale * self.scale


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
