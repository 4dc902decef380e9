"""Bytes on disk and bits per weight, counted from the files of a checkpoint and nothing else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.checkpoint.files import RECORD
from compress.checkpoint.read.compressed_layers import StoredCaches, stored_in
from compress.checkpoint.read.names import stored_name
from compress.checkpoint.read.source import Source, find_source
from compress.checkpoint.read.weight_files import tensor_bytes
from compress.checkpoint.write.coverage import percent
from compress.checkpoint.write.manifest import read_record


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
    made: dict[str, list[Mapping[str, Any]]] = {}  # each layer's records, in the order of the passes
    for layer in record["layers"]:
        made.setdefault(stored_name(source, layer["name"]), []).append(layer)
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
            if holder in made:
                remark = ", ".join(f"{layer['method']} {layer['scheme']}".strip() for layer in made[holder])
                remark = f"{remark}{_pruned(made[holder])}, stored dense{_losses(made[holder][-1], ': ')}"
            rows.append(
                SizeRow(name, shape, tensors[0].dtype.lower(), 8 * total / max(1, math.prod(shape)), total, remark)
            )
            continue
        bits = 8 * total / math.prod(stored.shape)
        remark = _loss(made.get(name, [])) if stored.shares is None else f"shares the codes of {stored.shares}"
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
