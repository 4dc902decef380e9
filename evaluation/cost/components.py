"""Bytes of a checkpoint by component: codes, scales, embeddings and so on, down to the headers of its files.

Counted only from the headers and the lengths of the files: the components add up to the bytes on disk exactly. A tensor
belongs to one component: an embedding or head to `embeddings and head`, whatever its format; a part of a compressed
layer to the component of that part; any other to the dense weights, if it has two dimensions or more, or to norms and
the rest.
"""

from typing import Any

from torch import nn

from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.read.compressed_layers import StoredLayer, stored_in
from compress.checkpoint.read.pretrained import empty_model
from compress.checkpoint.read.source import Source
from compress.evaluation.cost.size import measure_size, tensor_sizes
from compress.evaluation.document import Component, SizeResult
from compress.weights.roles import Role
from compress.weights.terms import named

TABLES, CACHE = "embeddings and head", "scales of the key-value cache"
OTHERS, HEADERS = "norms, biases and other", "file headers"
ORDER = (*Role, TABLES, CACHE, OTHERS, HEADERS)


def part_kinds(stored: StoredLayer) -> dict[str, str]:
    """{part: component} of a compressed layer's tensors, by the names that they have in the layer."""
    found: dict[str, str] = {part: about.role or part for part, about in stored.scheme.parts(*stored.shape).items()}
    for index, term in enumerate(stored.scheme.terms):
        own = term.parts(*stored.shape).items()
        found |= named(index, {part: f"{term.kind}: {part}" for part, about in own if about.role is None})
    return {part: found[part] for part in stored.parts}


def tables_of(source: Source) -> set[str]:
    """Names of the embeddings and of the output head; none where transformers makes no model of it."""
    try:
        model: Any = empty_model(source)
    except (InputError, CheckpointError):
        return set()
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return names | {name for name, module in model.named_modules() if head is not None and module is head}


def components(source: Source) -> list[Component]:
    """Bytes by component, in a fixed order, without empty components; their sum is that of the weight files."""
    stored, tables = stored_in(source), tables_of(source)
    kinds = {
        stored_layer.parts[part]: TABLES if name in tables else kind
        for name, stored_layer in stored.layers.items()
        for part, kind in part_kinds(stored_layer).items()
    }
    if stored.caches is not None:
        kinds |= dict.fromkeys((t for each in stored.caches.scales.values() for t, _ in each.values()), CACHE)
    found: dict[str, int] = {}
    for tensor in tensor_sizes(source):
        if tensor.name.rpartition(".")[0] in tables:
            kind = TABLES
        else:
            kind = kinds.get(tensor.name) or (Role.DENSE if len(tensor.shape) > 1 else OTHERS)
        found[kind] = found.get(kind, 0) + tensor.bytes
    found[HEADERS] = sum(path.stat().st_size for path in set(source.weights.values())) - sum(found.values())
    rank = {kind: i for i, kind in enumerate(ORDER)}
    return [
        Component(str(kind), found[kind])
        for kind in sorted(found, key=lambda kind: rank.get(kind, ORDER.index(Role.RANGES)))
    ]


def nominal_bits(source: Source) -> float | None:
    """Bits of a code, over the weights of all compressed layers; None where a layer is not codes on a grid, or not of
    codes alone."""
    layers = [stored for stored in stored_in(source).layers.values() if stored.shares is None]
    weights, bits = 0, 0.0
    for stored in layers:
        codes = stored.scheme.codes
        if codes is None:
            return None
        rows, columns = stored.shape
        weights += rows * columns
        bits += rows * columns * codes.code_bits
    return bits / weights if weights else None


def size_result(source: Source) -> SizeResult:
    """The size of a checkpoint for an evaluation, without the memory that loading it takes."""
    size = measure_size(source)
    return SizeResult(
        bytes=size.bytes,
        components=components(source),
        parameters=size.parameters,
        compressed_parameters=size.compressed_weights,
        bits_per_weight=size.bits_per_weight,
        bits_per_parameter=size.bits_per_parameter,
        nominal_bits_per_weight=nominal_bits(source),
        cache=size.cache,
    )
