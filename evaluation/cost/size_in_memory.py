"""The size of a model in memory, as a checkpoint would hold it, without headers: of layers on codes, and of those that
hold the values of codes (`model.fake_quantized`), the packed weights; of all else the tensors as they are.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compress.evaluation.cost.size import OTHERS, TABLES, in_order, kinds_in, nominal_bits, tables_in
from compress.evaluation.document import SizeResult
from compress.inference.layers.compressed_layers import layers_on_codes
from compress.inference.layers.embedding import TiedLinear
from compress.model.fake_quantized import fake_quantized
from compress.model.tensors import stored_buffers
from compress.weights.roles import Role
from compress.weights.scheme import Scheme


@dataclass(frozen=True)
class LayerInMemory:
    """A compressed layer of a model in memory, [N, K]. dtype: of its scales, and of weights that stay numbers."""

    name: str
    scheme: Scheme
    shape: tuple[int, int]
    dtype: torch.dtype


def size_in_memory(model: nn.Module) -> SizeResult | None:
    """The size of a model's tensors; None for a model that is sharded."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    layers = [
        LayerInMemory(name, layer.scheme, (layer.out_features, layer.in_features), layer.dtype)
        for name, layer in layers_on_codes(model)
        if not isinstance(layer, TiedLinear)
    ]
    rounded: dict[int, int] = {}  # elements of parameters that codes stand for
    for name, parameter, found in fake_quantized(model):
        layers.append(LayerInMemory(name, found.scheme, found.shape, parameter.dtype))
        rounded[id(parameter)] = rounded.get(id(parameter), 0) + math.prod(found.shape)
    tables = tables_in(model)
    sizes: dict[str, int] = {}

    def count(kind: str, size: int) -> int:
        sizes[kind] = sizes.get(kind, 0) + size
        return size

    compressed = plain = 0
    for layer in layers:
        kinds = kinds_in(layer.scheme, layer.shape)
        for part, (shape, dtype) in layer.scheme.tensors(*layer.shape, layer.dtype).items():
            kind = TABLES if layer.name.removesuffix(".table") in tables else kinds[part]
            compressed += count(kind, math.prod(shape) * dtype.itemsize)
    for name, parameter in model.named_parameters():
        left = parameter.numel() - rounded.get(id(parameter), 0)
        kind = TABLES if name.rpartition(".")[0] in tables else Role.DENSE if parameter.ndim > 1 else OTHERS
        count(kind, left * parameter.itemsize)
        plain += left
    codes = {id(buffer) for _, layer in layers_on_codes(model) for buffer in layer.buffers()}
    for _, buffer in stored_buffers(model):
        count(OTHERS, 0 if id(buffer) in codes else buffer.nbytes)
    weights, total = sum(math.prod(layer.shape) for layer in layers), sum(sizes.values())
    overall = 8 * total / max(weights + plain, 1)
    return SizeResult(
        bytes=total,
        components=in_order({kind: size for kind, size in sizes.items() if size}),
        parameters=weights + plain,
        compressed_parameters=weights,
        bits_per_weight=8 * compressed / weights if weights else overall,
        bits_per_parameter=overall,
        nominal_bits_per_weight=nominal_bits([(layer.scheme, layer.shape) for layer in layers]),
    )
