"""Finds the compressed layers of a loaded model."""

from collections.abc import Iterator

import torch
from torch import nn

from compress.inference.layers.embedding import QuantEmbedding, TiedLinear
from compress.inference.layers.linear import QuantLinear, SumLinear


def weights_on_codes(model: nn.Module, exclude_embeddings: bool = False) -> int:
    """The number of weights that a model holds as codes; a table that is used twice counts once, as an embedding."""
    embeddings = {module.table for module in model.modules() if isinstance(module, QuantEmbedding)}
    layers = [m for _, m in layers_on_codes(model) if not isinstance(m, TiedLinear)]
    return sum(m.in_features * m.out_features for m in layers if not (exclude_embeddings and m in embeddings))


def lay_in_strips(model: nn.Module) -> None:
    """Lay out the codes of all layers as this CPU reads them fastest, one layer after the other, without a second
    copy."""
    for _, layer in compressed_layers(model):
        for part in layer.summands if isinstance(layer, SumLinear) else (layer,):
            if isinstance(part, QuantLinear):
                part.lay_in_strips()


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's codes."""
    return next(module.device for module in model.modules() if isinstance(module, QuantLinear))


def compressed_layers(model: nn.Module) -> Iterator[tuple[str, QuantLinear]]:
    """(Name, layer) of all layers that multiply by codes; fused layers once, under the name of the first."""
    tables = {module.table for module in model.modules() if isinstance(module, QuantEmbedding)}
    for name, module in layers_on_codes(model):
        if module not in tables:
            yield name.removesuffix(".stacked"), module


def layers_on_codes(model: nn.Module) -> Iterator[tuple[str, QuantLinear]]:
    """(Name, layer) of all layers on compressed weights, embedding tables among them, without the summands of sums."""
    modules = dict(model.named_modules())
    inside = {m for layer in modules.values() if isinstance(layer, SumLinear) for m in layer.summands}
    yield from ((n, m) for n, m in modules.items() if isinstance(m, QuantLinear) and m not in inside)
