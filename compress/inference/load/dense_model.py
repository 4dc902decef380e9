"""Loads the model of a compressed checkpoint with dense weights."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from compress.base.errors import InputError
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.compressed_layers import reading, stored_in, weight_of
from compress.checkpoint.read.pretrained import (
    empty_model,
    from_pretrained,
    names_in,
    read_config,
    split_on_meta,
    with_experts_apart,
)
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.unplaced_tensors import beside
from compress.checkpoint.write.record import ROUNDED
from compress.inference.load.block_streaming import Opening
from compress.inference.load.kv_caches import round_cache
from compress.model.attention import attentions, hold_scales
from compress.model.deferred import deferred
from compress.model.disk_names import places_in
from compress.model.experts import Experts
from compress.model.layers import as_stored, transposed_weights
from compress.model.online_rotation import rotate_input
from compress.model.split_experts import join_experts
from compress.weights.matrix import Weight


def load_dequantized(source: Source, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a compressed checkpoint with dense weights: exactly the values of its codes, in this dtype.

    Raises InputError where a layer also rounds its input or output, which dense weights would leave out.
    """
    return _load(source, dtype, {})


def load_as_original(source: Source, notes: list[str], defer: bool = False) -> nn.Module:
    """The model of a compressed checkpoint with dense weights, the values of its codes, for a run that takes it for the
    original: inputs, outputs and key-value caches are not rounded. notes: takes what a person should know of that.
    defer: linear layers make their weights when these are needed (`model.deferred`), where transformers converts none.
    """
    stored = stored_in(source)
    kinds = Counter(str(layer.scheme) for layer in stored.layers.values())
    dropped = [
        *(["inputs"] if any(layer.scheme.inputs is not None for layer in stored.layers.values()) else []),
        *(["key-value caches"] if stored.caches is not None else []),
    ]
    notes.append(
        f"{portable(source.name)} {ROUNDED} ({', '.join(f'{n} layers {kind}' for kind, n in kinds.items())}): "
        "this run begins with the values of its codes, and what it tells of errors is measured against these"
        + (f"; the rounding of {' and '.join(dropped)} is left out" if dropped else "")
    )
    if defer:
        model, layers = without_weights(source, rounding=True, caches=False, apart=True)
        for name, layer in layers.items():
            weight = model.get_parameter(f"{name}.weight")
            read = partial(_values, source, layer, weight.dtype)
            model.get_submodule(name)._parameters["weight"] = deferred(weight, read)
        if layers:
            return model
    return _load(source, None, {}, rounding=True, caches=False)


def dequantize_by_block(source: Source, dtype: torch.dtype | None = None) -> tuple[nn.Module, dict[str, Opening]]:
    """(The model of `load_dequantized`, {layer: opening}): linear layers hold weights only while their opening is
    entered (`run_by_block`). No openings, and all weights loaded, where transformers does not keep the layers as they
    are."""
    model, layers = without_weights(source, dtype)
    if not layers:
        return load_dequantized(source, dtype), {}
    found = dict(model.named_modules())
    openings: dict[str, Opening] = {}
    for name, layer in layers.items():
        module = found[name]
        assert isinstance(module, nn.Linear)
        openings[name] = partial(_fill, module, module.weight.dtype, source, layer)
        module._parameters["weight"] = nn.Parameter(torch.empty(0, dtype=module.weight.dtype), False)
    return model, openings


def without_weights(
    source: Source,
    dtype: torch.dtype | None = None,
    *,
    rounding: bool = False,
    caches: bool = True,
    apart: bool = False,
) -> tuple[nn.Module, dict[str, str]]:
    """(The model of `load_dequantized`, {module: layer of the checkpoint}), without the weights of these linear layers:
    they share one stand-in. An empty dictionary where transformers does not keep the layers as they are.

    rounding: accept layers that round their input, too, which these do not. caches: as in `_load`. apart: experts that
    the files hold one by one stay so, where transformers joins them.
    """
    stored, empty = stored_in(source).layers, empty_model(source)
    split = split_on_meta(source) if apart else None
    if split is None and any(isinstance(module, Experts) for module in empty.modules()):
        return _load(source, dtype, {}, rounding, caches), {}
    modules, place = dict(empty.named_modules()), places_in(empty)
    layers = {place(modules, name): name for name, layer in stored.items() if layer.shares is None}
    layers = {name: layer for name, layer in layers.items() if isinstance(modules.get(name), nn.Linear)}
    # A stand-in that takes no memory, recognised afterwards by its data pointer.
    nothing = torch.zeros(1, 1, dtype=dtype or read_config(source).dtype)
    given = {layer: nothing.expand(stored[layer].shape) for layer in layers.values()}
    model = _load(source, dtype, given, rounding, caches, split)
    found = dict(model.named_modules())
    waiting = {n for n, m in found.items() if isinstance(m, nn.Linear) and m.weight.data_ptr() == nothing.data_ptr()}
    # Otherwise transformers converted some weights, or several modules share one.
    return model, layers if waiting == layers.keys() else {}


@contextmanager
def _fill(module: nn.Linear, dtype: torch.dtype, source: Source, layer: str) -> Iterator[None]:
    """Gives a layer its dense weight for the body."""
    empty = module._parameters["weight"]
    module._parameters["weight"] = nn.Parameter(_values(source, layer, dtype), False)
    try:
        yield
    finally:
        module._parameters["weight"] = empty


def _values(source: Source, layer: str, dtype: torch.dtype) -> Tensor:
    return weight_of(source, layer, dtype).dequantize().to(dtype)


def _load(
    source: Source,
    dtype: torch.dtype | None,
    given: Mapping[str, Tensor],
    rounding: bool = False,
    caches: bool = True,
    split: nn.Module | None = None,
) -> nn.Module:
    """`load_dequantized`. given: {layer in the checkpoint: stand-in for its weight}. rounding: as in
    `without_weights`. caches: whether they are rounded as the checkpoint says. split: the model with experts apart, on
    the meta device, where they are to stay so."""
    layers, stored_caches = stored_in(source).layers, stored_in(source).caches
    active = [layer for layer, stored in layers.items() if stored.scheme.inputs is not None]
    if active and not rounding:
        both = "input and output" if layers[active[0]].scheme.outputs is not None else "input"
        raise InputError(
            f"{source.name} quantizes the {both} of {active[0]} ({len(active)} layers in all), which dense weights "
            "would leave out; load it without dequantize"
        )
    config, unplaced = read_config(source), beside(source)
    wanted = dtype or config.dtype
    transposed, in_model = transposed_weights(empty_model(source)), names_in(source).in_model
    tensors: dict[str, Tensor] = {}
    for name, read in reading(source, without=given, dtype=wanted):
        if name in unplaced:
            continue
        value = read()
        if isinstance(value, Weight):  # one layer's codes at a time
            value = as_stored(value.dequantize().to(wanted or torch.get_default_dtype()), name in transposed)
        tensors[in_model(name)] = value
    tensors |= {f"{layer}.weight" if split is None else in_model(f"{layer}.weight"): v for layer, v in given.items()}
    tensors = join_experts(empty_model(source), tensors) if split is None else tensors
    scales = {
        attention: [tensors.pop(name) for name, _ in found.values()]
        for attention, found in ({} if stored_caches is None else stored_caches.scales).items()
    }
    config.__dict__.pop("quantization_config", None)
    how = {"config": config, "dtype": wanted}
    if split is None:
        model = from_pretrained(source, None, state_dict=tensors, **how)
    else:
        model = with_experts_apart(source, split, tensors, **how)
    modules, place = dict(model.named_modules()), places_in(model)
    for name, layer in layers.items():
        if layer.scheme.rotation is not None:
            rotate_input(modules[place(modules, name)], layer.scheme.rotation)
    if stored_caches is not None and caches:
        for name, attention in attentions(model).items():
            if name in scales:
                hold_scales(attention, scales[name], persistent=False)
            round_cache(attention, stored_caches.scheme)
    return model
