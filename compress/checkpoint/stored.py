"""The compressed layers and caches of a checkpoint: found and checked from headers, read when they are asked for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from compress.checkpoint.source import DTYPES, Source
from compress.errors import CheckpointError
from compress.weights.caches import SIDES, CacheScheme
from compress.weights.codes import check_parts, quantized_from, shape_of
from compress.weights.compressed_tensors import read_cache_scheme, scheme_for
from compress.weights.grid import Quantized
from compress.weights.scheme import FLOATS, LAYOUTS, PARTS, Scheme


@dataclass(frozen=True)
class StoredLayer:
    """A compressed layer of a checkpoint: [N, K] = shape, and its tensors by the names that `Scheme.parts` uses.

    shares: the layer whose int8 rows are this one's, too; it has scales of its own, which are the same.
    """

    scheme: Scheme
    shape: tuple[int, int]
    parts: Mapping[str, str]
    shares: str | None = None


def layers_of(source: Source) -> dict[str, StoredLayer]:
    """The compressed layers of a checkpoint, every tensor's shape and dtype checked from headers alone.

    Raises CheckpointError that names the tensor which is missing, superfluous or of the wrong shape, or the layer
    whose scheme cannot be read.
    """
    found = source.headers
    own = set(PARTS) - {"weight"}
    names = {name.rpartition(".")[0] for name in found if name.rpartition(".")[2] in own}
    names |= {
        name.removesuffix(".weight")
        for name, (_, dtype) in found.items()
        if name.endswith(".weight") and dtype in ("I8", "F8_E4M3")
    }
    quantization = source.quantization
    if quantization is None:
        if names:
            raise CheckpointError(
                f"{source.path} holds compressed tensors of {min(names)} but config.json has no quantization_config"
            )
        return {}
    method, layout = quantization.get("quant_method"), quantization.get("format")
    if method != "compressed-tensors":
        raise CheckpointError(f"{source.path} is quantized as {method}; readable: compressed-tensors")
    cache = quantization.get("kv_cache_scheme")
    if layout not in LAYOUTS and layout != "mixed-precision" and (names or not cache):
        raise CheckpointError(
            f"{source.path} is quantized as {method} {layout}; readable: compressed-tensors {', '.join(LAYOUTS)}"
        )
    if quantization.get("transform_config"):
        raise CheckpointError(f"{source.path} transforms what its layers read (transform_config), which cannot be read")
    if not names and not cache:
        raise CheckpointError(f"{source.path} says it is {layout} but holds no compressed layer")
    by_layer: dict[str, dict[str, str]] = {layer: {} for layer in sorted(names)}
    for name in found:
        layer, _, part = name.rpartition(".")
        if layer in by_layer:
            by_layer[layer][part] = name
    shapes = _read(source, [name for name in found if name.endswith(".weight_shape")])
    layers: dict[str, StoredLayer] = {}
    # Last, those without codes of their own.
    for layer, parts in sorted(by_layer.items(), key=lambda item: not {"weight", "weight_packed"} & set(item[1])):
        scheme = scheme_for(layer, quantization)
        if scheme.layout == "int-quantized" and scheme.inputs is None and "weight" not in parts:
            layers[layer] = _sharing(source, layer, scheme, parts, layers)
            continue
        strange = next((name for name in parts.values() if found[name][1] not in DTYPES), None)
        if strange is not None:
            raise CheckpointError(f"{strange} has the dtype {found[strange][1]}; known: {', '.join(DTYPES)}")
        held = {part: (found[name][0], DTYPES[found[name][1]]) for part, name in parts.items()}
        if scheme.layout != "pack-quantized":
            shape = held.get("weight", ((0, 0), None))[0]
            if len(shape) != 2:
                raise CheckpointError(f"{layer}.weight has shape {shape}; it must have two dimensions")
            if 0 in shape:
                raise CheckpointError(f"{layer}.weight has shape {shape}; there is nothing in it")
        else:
            if "weight_shape" not in parts:
                raise CheckpointError(f"{layer}.weight_shape is missing from the checkpoint")
            shape = shape_of(layer, shapes[parts["weight_shape"]])
        check_parts(layer, held, scheme, (shape[0], shape[1]))
        parts.pop("bias", None)
        layers[layer] = StoredLayer(scheme, (shape[0], shape[1]), parts)
    return layers


@dataclass(frozen=True)
class StoredCaches:
    """The key-value caches of a checkpoint: their scheme, and of each attention with scales of its own the names of
    their tensors and the shape of each, by the names that the attention has for them."""

    scheme: CacheScheme
    scales: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]


def caches_of(source: Source) -> StoredCaches | None:
    """How a checkpoint keeps keys and values; None where it says nothing. Raises CheckpointError that names the tensor
    which is missing or of the wrong shape."""
    entry = (source.quantization or {}).get("kv_cache_scheme")
    if not entry:
        return None
    scheme, found = read_cache_scheme(entry), source.headers
    keys = tuple(f"{side}_scale" for side in SIDES)
    holders = sorted({name.rpartition(".")[0] for name in found if name.rpartition(".")[2] in keys})
    if scheme.dynamic and holders:
        raise CheckpointError(f"{holders[0]} has scales of a cache whose scales are fitted to every token")
    if not scheme.dynamic and not holders:
        raise CheckpointError(f"{source.path} has a key-value cache of fixed scales and holds none of them")
    scales = {}
    for holder in holders:
        for key in keys:
            if f"{holder}.{key}" not in found:
                raise CheckpointError(f"{holder}.{key} is missing from the checkpoint")
            shape, dtype = found[f"{holder}.{key}"]
            fits = len(shape) == 3 and shape[1:] == (1, 1) if scheme.granularity == "head" else shape == (1,)
            if not fits or DTYPES.get(dtype) not in FLOATS:
                needed = "[heads, 1, 1]" if scheme.granularity == "head" else "[1]"
                raise CheckpointError(f"{holder}.{key} is {dtype} {list(shape)}; it must be floats {needed}")
        scales[holder] = {key: (f"{holder}.{key}", found[f"{holder}.{key}"][0]) for key in keys}
    return StoredCaches(scheme, scales)


def _sharing(
    source: Source, layer: str, scheme: Scheme, parts: Mapping[str, str], layers: Mapping[str, StoredLayer]
) -> StoredLayer:
    """A layer that has scales and no codes: those of the layer with the very same scales (a tied head)."""
    own = {part: name for part, name in parts.items() if part != "bias"}
    scales = _read(source, own.values())
    for other, stored in layers.items():
        if stored.scheme != scheme or set(stored.parts) != {*own, "weight"}:
            continue
        theirs = _read(source, [stored.parts[part] for part in own])
        if all(torch.equal(scales[name], theirs[stored.parts[part]]) for part, name in own.items()):
            return StoredLayer(scheme, stored.shape, own, other)
    raise CheckpointError(f"{layer}.weight is missing from the checkpoint")


def _read(source: Source, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors by name, each file opened once."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(source.weights[name], []).append(name)
    tensors: dict[str, Tensor] = {}
    for path, inside in sorted(by_file.items()):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in inside}
    return tensors


def read_tensors(source: Source) -> dict[str, Tensor | Quantized]:
    """Every tensor of a checkpoint; compressed layers as `<layer>.weight` -> Quantized."""
    layers = layers_of(source)
    compressed = {name for stored in layers.values() for name in stored.parts.values()}
    result: dict[str, Tensor | Quantized] = {}
    result |= _read(source, [name for name in source.weights if name not in compressed])
    for layer, stored in layers.items():
        if stored.shares is not None:
            continue
        result[f"{layer}.weight"] = quantized_from(layer, _read(source, stored.parts.values()), stored.scheme)
    return result
