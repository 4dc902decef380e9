"""The compressed layers and caches of a checkpoint: found and checked from headers, read on demand."""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.checkpoint.read import modelopt
from compress.checkpoint.read.configuration import METHOD as COMPRESSED_TENSORS
from compress.checkpoint.read.gptq_awq import MARK
from compress.checkpoint.read.source import METHODS, Source, once
from compress.checkpoint.read.weight_files import DTYPES
from compress.weights import fine_grained, own_config
from compress.weights.compressed_tensors import LAYOUTS, OWN_PARTS, check_targets, scheme_for
from compress.weights.formats.codes import Int8Table
from compress.weights.kv_cache_codes import SCALES, CacheScheme
from compress.weights.matrix import Weight
from compress.weights.scheme import Scheme, check_parts, shape_of
from compress.weights.terms import FLOATS

NOT_PACKED = ("I8", "F8_E4M3")


@dataclass(frozen=True)
class StoredLayer:
    """A compressed layer of a checkpoint. shape: (N, K). parts: {name in `Scheme.parts`: full name of the tensor};
    dtypes: {name in `Scheme.parts`: stored dtype}. scalars: names of the parts without a dimension.

    shares: the layer whose int8 rows this one uses (a tied head); it stores scales of its own, with equal values.
    """

    scheme: Scheme
    shape: tuple[int, int]
    parts: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]
    shares: str | None = None
    scalars: frozenset[str] = frozenset()

    def read(self, source: Source) -> dict[str, Tensor]:
        """{name in `Scheme.parts`: tensor} of the layer."""
        return {part: source.weights.tensor(name) for part, name in self.parts.items()}


@dataclass(frozen=True)
class StoredCaches:
    """The key-value caches of a checkpoint: their scheme, and the scales {attention: {name in the attention: (full name
    of the tensor, its shape)}}; empty where scales are fitted to every token."""

    scheme: CacheScheme
    scales: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]


@dataclass(frozen=True)
class Stored:
    """The compressed layers and caches of a checkpoint."""

    layers: Mapping[str, StoredLayer]
    caches: StoredCaches | None


@once
def stored_in(source: Source) -> Stored:
    """The compressed layers and caches of a checkpoint. Shapes and dtypes are checked from headers alone, once.

    Raises CheckpointError, which names a tensor that is missing, superfluous or of the wrong shape, or a layer whose
    scheme cannot be read.
    """
    return Stored(_layers(source), _caches(source))


def _layers(source: Source) -> dict[str, StoredLayer]:
    schemes = _schemes(source)
    parts_of: dict[str, dict[str, str]] = {layer: {} for layer in schemes}
    for name in source.headers:
        layer, _, part = name.rpartition(".")
        if layer in parts_of:
            parts_of[layer][part] = name
    layers: dict[str, StoredLayer] = {}
    # Layers without codes of their own come last.
    for layer, parts in sorted(parts_of.items(), key=lambda item: not {"weight", "weight_packed"} & set(item[1])):
        scheme = schemes[layer]
        if isinstance(scheme.terms[0], Int8Table) and "weight" not in parts:
            layers[layer] = _sharing(source, layer, scheme, parts, layers)
        else:
            shape = _shape(source, layer, scheme, parts)
            own = {part: name for part, name in parts.items() if part != "bias"}
            scalars = frozenset(part for part, name in own.items() if source.headers[name][0] == ())
            layers[layer] = StoredLayer(scheme, shape, own, _dtypes(source, own), scalars=scalars)
    return layers


def _dtypes(source: Source, parts: Mapping[str, str]) -> dict[str, torch.dtype]:
    return {part: DTYPES[source.headers[name][1]] for part, name in parts.items()}


def _schemes(source: Source) -> dict[str, Scheme]:
    """{layer: scheme}, from the configuration and the names of the tensors. Raises CheckpointError."""
    coded = {name.rpartition(".")[0] for name in source.headers if name.rpartition(".")[2] in OWN_PARTS}
    coded |= {
        name.removesuffix(".weight")
        for name, (_, dtype) in source.headers.items()
        if name.endswith(".weight") and dtype in NOT_PACKED
    }
    quantization = source.quantization
    if quantization is None:
        words = {name.removesuffix(f".{MARK}") for name in source.headers if name.endswith(f".{MARK}")}
        if coded | words:
            raise CheckpointError(
                f"{source.path} holds compressed tensors of {min(coded | words)} but config.json has no "
                f"quantization_config{', like quantize_config.json; copy it there' if words else ''}"
            )
        return {}
    method = quantization.get("quant_method")
    if method not in SCHEMES:
        readable = ", ".join((*METHODS, fine_grained.METHOD))
        raise CheckpointError(f"{source.path} is quantized as {method}; readable: {readable}")
    if not coded and method in (fine_grained.METHOD, modelopt.METHOD):
        raise CheckpointError(f"{source.path} says it is {method} but holds no compressed layer")
    return SCHEMES[method](source, quantization, sorted(coded))


Schemes = Callable[[Source, Mapping[str, Any], list[str]], dict[str, Scheme]]


def _of_ours(source: Source, quantization: Mapping[str, Any], layers: list[str]) -> dict[str, Scheme]:
    schemes = own_config.read_groups(quantization, source.path)
    if unknown := sorted(set(layers) - schemes.keys()):
        raise CheckpointError(f"no group of the quantization_config targets {unknown[0]}")
    return schemes


def _of_compressed_tensors(source: Source, quantization: Mapping[str, Any], layers: list[str]) -> dict[str, Scheme]:
    layout, cache = quantization.get("format"), quantization.get("kv_cache_scheme")
    if layout not in LAYOUTS and layout != "mixed-precision" and (layers or not cache):
        raise CheckpointError(
            f"{source.path} is quantized as compressed-tensors {layout}; readable: compressed-tensors "
            f"{', '.join(LAYOUTS)}"
        )
    if quantization.get("transform_config"):
        raise CheckpointError(f"{source.path} transforms what its layers read (transform_config), which cannot be read")
    if not layers and not cache:
        raise CheckpointError(f"{source.path} says it is {layout} but holds no compressed layer")
    check_targets(quantization, layers)
    return {layer: scheme_for(layer, quantization) for layer in layers}


# {quant_method: reader of the schemes of layers}. Checkpoints of other methods are shown as these (`source.METHODS`).
SCHEMES: dict[Any, Schemes] = {
    own_config.METHOD: _of_ours,
    COMPRESSED_TENSORS: _of_compressed_tensors,
    fine_grained.METHOD: lambda source, of, layers: dict.fromkeys(
        layers, fine_grained.read_fine_grained(of, source.path)
    ),
    modelopt.METHOD: lambda source, _, layers: {each: modelopt.scheme_of(each, source.headers) for each in layers},
}


def _shape(source: Source, layer: str, scheme: Scheme, parts: Mapping[str, str]) -> tuple[int, int]:
    """(N, K) of a layer, once its tensors are checked against its scheme. Raises CheckpointError."""
    found = source.headers
    strange = next((name for name in parts.values() if found[name][1] not in DTYPES), None)
    if strange is not None:
        raise CheckpointError(f"{strange} has the dtype {found[strange][1]}; known: {', '.join(DTYPES)}")
    headers = {part: (found[name][0], DTYPES[found[name][1]]) for part, name in parts.items()}
    first = scheme.terms[0]
    telling = first.whole or first.telling
    if telling is not None:
        size = headers[telling][0] if telling in headers else (0, 0)
        if len(size) != 2:
            raise CheckpointError(f"{layer}.{telling} has shape {size}; it must have two dimensions")
        if 0 in size:
            raise CheckpointError(f"{layer}.{telling} has shape {size}; there is nothing in it")
        shape = first.size(size[0], size[1])
    elif "weight_shape" not in parts:
        raise CheckpointError(f"{layer}.weight_shape is missing from the checkpoint")
    else:
        shape = shape_of(layer, source.weights.tensor(parts["weight_shape"]))
    check_parts(layer, headers, scheme, shape)
    return shape


def _caches(source: Source) -> StoredCaches | None:
    """The key-value caches of a checkpoint; None where its configuration has no entry for them. Raises CheckpointError,
    which names a tensor that is missing or of the wrong shape."""
    scheme, headers = own_config.caches_of(source.quantization), source.headers
    if scheme is None:
        return None
    holders = sorted({name.rpartition(".")[0] for name in headers if name.rpartition(".")[2] in SCALES})
    if scheme.dynamic and holders:
        raise CheckpointError(f"{holders[0]} has scales of a cache whose scales are fitted to every token")
    if not scheme.dynamic and not holders:
        raise CheckpointError(f"{source.path} has a key-value cache of fixed scales and holds none of them")
    scales = {}
    for holder in holders:
        for key in SCALES:
            if f"{holder}.{key}" not in headers:
                raise CheckpointError(f"{holder}.{key} is missing from the checkpoint")
            shape, dtype = headers[f"{holder}.{key}"]
            fits = len(shape) == 3 and shape[1:] == (1, 1) if scheme.granularity == "head" else shape == (1,)
            if not fits or DTYPES.get(dtype) not in FLOATS:
                needed = "[heads, 1, 1]" if scheme.granularity == "head" else "[1]"
                raise CheckpointError(f"{holder}.{key} is {dtype} {list(shape)}; it must be floats {needed}")
        scales[holder] = {key: (f"{holder}.{key}", headers[f"{holder}.{key}"][0]) for key in SCALES}
    return StoredCaches(scheme, scales)


def _sharing(
    source: Source, layer: str, scheme: Scheme, parts: Mapping[str, str], layers: Mapping[str, StoredLayer]
) -> StoredLayer:
    """The entry of a layer with scales and no codes (a tied head): it shares the codes of the layer with equal scales.
    Raises CheckpointError where there is no such layer."""
    own = {part: name for part, name in parts.items() if part != "bias"}
    scales = source.weights.tensors(own.values())
    for other, stored in layers.items():
        if stored.scheme != scheme or set(stored.parts) != {*own, "weight"}:
            continue
        theirs = source.weights.tensors(stored.parts[part] for part in own)
        if all(torch.equal(scales[name], theirs[stored.parts[part]]) for part, name in own.items()):
            return StoredLayer(scheme, stored.shape, own, _dtypes(source, own), other)
    raise CheckpointError(f"{layer}.weight is missing from the checkpoint")


def weight_of(source: Source, layer: str, dtype: torch.dtype | None = None) -> Weight:
    """The weight of a compressed layer. dtype: of the model that it is for (`widen`). Raises CheckpointError, which
    names the tensor at fault."""
    stored = stored_in(source).layers[layer]
    return read_weight(layer, stored.scheme, widen(stored.read(source), dtype), stored.shape)


def widen(parts: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of a layer, with floats widened to hold both the stored dtype and that of the model (None: as
    stored). Values are then rounded once, to the model's dtype, and not to the stored one before."""
    if dtype is None:
        return dict(parts)
    floats = {name: torch.promote_types(part.dtype, dtype) for name, part in parts.items() if part.dtype in FLOATS}
    return {name: part.to(floats[name]) if name in floats else part for name, part in parts.items()}


def idle_biases(source: Source) -> set[str]:
    """Names of biases of compressed layers that are all zero. Some writers of GPTQ and AWQ store one for every layer,
    whether the model has it or not."""
    names = [name for layer in stored_in(source).layers if (name := f"{layer}.bias") in source.headers]
    return {name for name in names if not bool(source.weights.tensor(name).any())}


def read_weight(layer: str, scheme: Scheme, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Weight:
    """The weight of a layer from its tensors. Raises CheckpointError, which names the tensor at fault."""
    try:
        return scheme.read(parts, *shape)
    except CheckpointError as error:
        raise CheckpointError(f"{layer}.{error}") from None


def read_tensors(
    source: Source, without: Container[str] = (), dtype: torch.dtype | None = None
) -> dict[str, Tensor | Weight]:
    """{name: tensor} of a whole checkpoint, with compressed layers as `<layer>.weight`: Weight (`weight_of`). without:
    compressed layers to leave out."""
    return {name: read() for name, read in reading(source, without, dtype)}


def reading(
    source: Source, without: Container[str] = (), dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Callable[[], Tensor | Weight]]]:
    """(Name, what reads it) of the tensors of `read_tensors`."""
    layers = stored_in(source).layers
    compressed = {name for stored in layers.values() for name in stored.parts.values()}
    for name in source.weights:
        if name not in compressed:
            yield name, partial(source.weights.tensor, name)
    for layer, stored in layers.items():
        if stored.shares is None and layer not in without:
            yield f"{layer}.weight", partial(weight_of, source, layer, dtype)
