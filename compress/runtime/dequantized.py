"""The model of a compressed checkpoint with dense weights."""

import torch
from torch import nn

from compress.checkpoint.pretrained import from_pretrained, read_config
from compress.checkpoint.source import Source
from compress.checkpoint.stored import read_tensors, stored_in
from compress.errors import InputError
from compress.model.attention import attentions, hold_scales
from compress.runtime.caches import round_cache
from compress.weights.terms import Weight


def load_dequantized(source: Source, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a compressed checkpoint with dense weights: exactly what its codes stand for.

    Raises InputError where a layer also quantizes its input or output, which dense weights would not show.
    """
    layers, caches = stored_in(source).layers, stored_in(source).caches
    active = [layer for layer, stored in layers.items() if stored.scheme.inputs is not None]
    if active:
        both = "input and output" if layers[active[0]].scheme.outputs is not None else "input"
        raise InputError(
            f"{source.name} quantizes the {both} of {active[0]} ({len(active)} layers in all), which dense weights "
            "would leave out; load it without dequantize"
        )
    tensors = {
        name: value.dequantize() if isinstance(value, Weight) else value for name, value in read_tensors(source).items()
    }
    scales = {
        attention: [tensors.pop(name) for name, _ in held.values()]
        for attention, held in ({} if caches is None else caches.scales).items()
    }
    config = read_config(source)
    del config.quantization_config
    target = dtype if dtype is not None else config.dtype
    model = from_pretrained(source, None, config=config, state_dict=tensors, dtype=target)
    if caches is not None:
        for name, attention in attentions(model).items():
            if name in scales:
                hold_scales(attention, scales[name], persistent=False)
            round_cache(attention, caches.scheme)
    return model
