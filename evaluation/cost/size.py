"""Bytes on disk and bits per weight, and bytes by component, counted from the files of a checkpoint and nothing else.

The components (codes, scales, embeddings and so on, down to the headers of files) add up to the bytes on disk exactly.
A tensor belongs to one component: an embedding or head to `embeddings and head`, whatever its format; a part of a
compressed layer to the component of that part; any other to the dense weights, if it has two dimensions or more, or to
norms and the rest.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.files import RECORD
from compress.checkpoint.read.compressed_layers import StoredCaches, StoredLayer, stored_in
from compress.checkpoint.read.pretrained import empty_model, stored_name
from compress.checkpoint.read.source import Source, find_source
from compress.checkpoint.read.weight_files import tensor_bytes
from compress.checkpoint.write.coverage import percent
from compress.checkpoint.write.manifest import read_record
from compress.evaluation.document import Component, SizeResult
from compress.weights.roles import Role
from compress.weights.scheme import Scheme
from compress.weights.terms import named


@dataclass(frozen=True)
class TensorSize:
    """One tensor as the file's header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes in the file. Raises CheckpointError for a dtype that is not known."""
        return tensor_bytes(self.name, self.shape, self.dtype)


@dataclass(frozen=True)
class Size:
    """bytes: the weight files, headers included. bits_per_weight: of compressed layers, scales and zero points included
    (of any tensor, where nothing is compressed). bits_per_parameter: of the whole model. cache: the format of keys and
    values, None where they are not compressed."""

    bytes: int
    bits_per_weight: float
    bits_per_parameter: float
    parameters: int
    compressed_weights: int
    cache: str | None = None


def tensor_sizes(source: Source) -> list[TensorSize]:
    """Every tensor of a checkpoint, from the headers."""
    return [TensorSize(name, shape, dtype) for name, (shape, dtype) in source.headers.items()]


def measure_size(source: Source) -> Size:
    """The size of a checkpoint."""
    layers, caches = stored_in(source).layers, stored_in(source).caches
    tensors = tensor_sizes(source)
    with_parts = {name for stored in layers.values() for name in stored.parts.values()}
    scales = set(_cache_holders(caches))  # scales of caches are not parameters of the model
    compressed_bytes = sum(t.bytes for t in tensors if t.name in with_parts)
    compressed_weights = sum(math.prod(stored.shape) for stored in layers.values() if stored.shares is None)
    plain = [t for t in tensors if t.name not in with_parts]
    parameters = compressed_weights + sum(math.prod(t.shape) for t in plain if t.name not in scales)
    total = compressed_bytes + sum(t.bytes for t in plain)
    overall = 8 * total / parameters
    return Size(
        bytes=sum(path.stat().st_size for path in set(source.weights.values())),
        bits_per_weight=8 * compressed_bytes / compressed_weights if compressed_weights else overall,
        bits_per_parameter=overall,
        parameters=parameters,
        compressed_weights=compressed_weights,
        cache=None if caches is None else str(caches.scheme),
    )


@dataclass(frozen=True)
class SizeRow:
    """One line of `compress inspect`: a layer or another tensor. bits: per weight, scales included."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    bits: float
    bytes: int
    remark: str


def inspect_checkpoint(model: str) -> tuple[list[SizeRow], Size]:
    """Every layer of a checkpoint and its size, from headers, the configuration and the run's record."""
    source = find_source(model)
    layers, caches = stored_in(source).layers, stored_in(source).caches
    holders = {name: layer for layer, stored in layers.items() for name in stored.parts.values()}
    holders |= _cache_holders(caches)
    recorded = (source.path / RECORD).exists()
    record = read_record(source.path) if recorded else {"layers": [], "left_alone": {}}
    records: dict[str, list[Mapping[str, Any]]] = {}  # each layer's records, in the order of the passes
    for layer in record["layers"]:
        records.setdefault(stored_name(source, layer["name"]), []).append(layer)
    alone = {stored_name(source, name): why for name, why in record["left_alone"].items()}
    parts: dict[str, list[TensorSize]] = {}
    for tensor in tensor_sizes(source):
        parts.setdefault(holders.get(tensor.name, tensor.name), []).append(tensor)
    rows = []
    for name, tensors in parts.items():
        total = sum(t.bytes for t in tensors)
        stored = layers.get(name)
        if caches is not None and name in caches.scales:
            rows.append(
                SizeRow(name, tensors[0].shape, str(caches.scheme), 8.0, total, "scales of the key-value cache")
            )
            continue
        if stored is None:
            shape, holder = tensors[0].shape, name.removesuffix(".weight")
            remark = alone.get(holder) or alone.get(name, "")
            if holder in records:
                remark = ", ".join(f"{layer['method']} {layer['scheme']}".strip() for layer in records[holder])
                remark = f"{remark}{_pruned(records[holder])}, stored dense{_losses(records[holder][-1], ': ')}"
            rows.append(
                SizeRow(name, shape, tensors[0].dtype.lower(), 8 * total / max(1, math.prod(shape)), total, remark)
            )
            continue
        bits = 8 * total / math.prod(stored.shape)
        remark = _loss(records.get(name, [])) if stored.shares is None else f"shares the codes of {stored.shares}"
        rows.append(SizeRow(name, stored.shape, str(stored.scheme), bits, total, remark))
    return sorted(rows, key=lambda row: _natural(row.name)), measure_size(source)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts names with numbers in numeric order: layers.9 before layers.10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in name.split(".")]


def _cache_holders(caches: StoredCaches | None) -> dict[str, str]:
    """{tensor: attention} of the scales of key-value caches."""
    held = {} if caches is None else caches.scales
    return {tensor: name for name, scales in held.items() for tensor, _ in scales.values()}


def _pruned(layers: Sequence[Mapping[str, Any]]) -> str:
    """The share of a pruned layer's weights that are zero, with its pattern, in words; empty where it was not
    pruned."""
    masks = [layer["figures"] for layer in layers if "sparsity" in layer["figures"]]
    if not masks:
        return ""
    pattern = f", {masks[-1]['pattern']}" if "pattern" in masks[-1] else ""
    return f" ({percent(float(masks[-1]['sparsity']))} zero{pattern})"


def _loss(layers: Sequence[Mapping[str, Any]]) -> str:
    if not layers:
        return ""
    layer = layers[-1]
    methods = ", ".join(each["method"] for each in layers) + _pruned(layers)
    return methods + _losses(layer, ": ")


def _losses(layer: Mapping[str, Any], before: str) -> str:
    """The layer's loss beside the loss of its method's baseline, in words; empty where no baseline was recorded."""
    kept = (("loss", "loss", ".2e"), ("rtn", "rtn_loss", ".2e"), ("wanda", "wanda_loss", ".2e"), ("damp", "damp", "g"))
    figures = layer["figures"]
    if not {"rtn_loss", "wanda_loss"} & figures.keys():
        return ""
    said = [f"{word} {figures[key]:{form}}" for word, key, form in kept if isinstance(figures.get(key), int | float)]
    return before + ", ".join(said)


TABLES, CACHE = "embeddings and head", "scales of the key-value cache"
OTHERS, HEADERS = "norms, biases and other", "file headers"
ORDER = (*Role, TABLES, CACHE, OTHERS, HEADERS)


def part_kinds(stored: StoredLayer) -> dict[str, str]:
    """{part: component} of a compressed layer's tensors, by the names that they have in the layer."""
    found = kinds_in(stored.scheme, stored.shape)
    return {part: found[part] for part in stored.parts}


def kinds_in(scheme: Scheme, shape: tuple[int, int]) -> dict[str, str]:
    """{part: component} of the tensors that a scheme stores a layer [N, K] in."""
    found: dict[str, str] = {part: about.role or part for part, about in scheme.parts(*shape).items()}
    for index, term in enumerate(scheme.terms):
        own = term.parts(*shape).items()
        found |= named(index, {part: f"{term.kind}: {part}" for part, about in own if about.role is None})
    return found


def tables_of(source: Source) -> set[str]:
    """Names of the embeddings and of the output head; none where transformers makes no model of it."""
    try:
        model: Any = empty_model(source)
    except (InputError, CheckpointError):
        return set()
    return tables_in(model)


def tables_in(model: Any) -> set[str]:
    """Names of the embeddings and of the output head of a model."""
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
    sizes: dict[str, int] = {}
    for tensor in tensor_sizes(source):
        if tensor.name.rpartition(".")[0] in tables:
            kind = TABLES
        else:
            kind = kinds.get(tensor.name) or (Role.DENSE if len(tensor.shape) > 1 else OTHERS)
        sizes[kind] = sizes.get(kind, 0) + tensor.bytes
    sizes[HEADERS] = sum(path.stat().st_size for path in set(source.weights.values())) - sum(sizes.values())
    return in_order(sizes)


def in_order(sizes: Mapping[str, int]) -> list[Component]:
    """Components in the order of a report."""
    rank = {kind: i for i, kind in enumerate(ORDER)}
    return [
        Component(str(kind), sizes[kind])
        for kind in sorted(sizes, key=lambda kind: rank.get(kind, ORDER.index(Role.RANGES)))
    ]


def nominal_bits(layers: Sequence[tuple[Scheme, tuple[int, int]]]) -> float | None:
    """Bits of a code, over the weights of all compressed layers; None where a layer is not codes on a grid, or not of
    codes alone."""
    weights, bits = 0, 0.0
    for scheme, (rows, columns) in layers:
        if scheme.codes is None:
            return None
        weights += rows * columns
        bits += rows * columns * scheme.codes.code_bits
    return bits / weights if weights else None


def size_result(source: Source) -> SizeResult:
    """The size of a checkpoint for an evaluation, without the memory that loading it takes."""
    size = measure_size(source)
    own = [(stored.scheme, stored.shape) for stored in stored_in(source).layers.values() if stored.shares is None]
    return SizeResult(
        bytes=size.bytes,
        components=components(source),
        parameters=size.parameters,
        compressed_parameters=size.compressed_weights,
        bits_per_weight=size.bits_per_weight,
        bits_per_parameter=size.bits_per_parameter,
        nominal_bits_per_weight=nominal_bits(own),
        cache=size.cache,
    )
