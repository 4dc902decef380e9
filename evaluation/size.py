"""Bytes on disk and bits per weight, counted from the files of a checkpoint and nothing else."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open

from compress.checkpoint import PARTS, RECORD, read_json
from compress.errors import CheckpointError
from compress.source import Source, find_source, grids_of

BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


@dataclass(frozen=True)
class TensorSize:
    """One tensor as the file's header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes in the file. Raises CheckpointError for a dtype that is not known."""
        if self.dtype not in BYTES:
            raise CheckpointError(f"{self.name} has the dtype {self.dtype}; known: {', '.join(BYTES)}")
        return math.prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Size:
    """bytes: the weight files, headers included. bits_per_weight: what a weight of a compressed layer takes with its
    scales and zero points (of any tensor, where nothing is compressed). bits_per_parameter: the whole model."""

    bytes: int
    bits_per_weight: float
    bits_per_parameter: float
    parameters: int
    compressed_weights: int


def tensor_sizes(source: Source) -> list[TensorSize]:
    """Every tensor of a checkpoint, from the headers."""
    sizes = []
    for path in sorted(set(source.weights.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                piece = file.get_slice(name)
                sizes.append(TensorSize(name, tuple(piece.get_shape()), piece.get_dtype()))
    return sizes


def measure_size(source: Source) -> Size:
    """Count a checkpoint."""
    grids = grids_of(source)
    tensors = tensor_sizes(source)
    with_parts = {f"{layer}.{part}" for layer in grids for part in PARTS}
    compressed_bytes = sum(t.bytes for t in tensors if t.name in with_parts)
    compressed_weights = 0
    for layer in grids:
        with safe_open(source.weights[f"{layer}.weight_shape"], framework="pt") as file:
            compressed_weights += int(file.get_tensor(f"{layer}.weight_shape").prod())
    plain = [t for t in tensors if t.name not in with_parts]
    parameters = compressed_weights + sum(math.prod(t.shape) for t in plain)
    total = compressed_bytes + sum(t.bytes for t in plain)
    overall = 8 * total / parameters
    return Size(
        bytes=sum(path.stat().st_size for path in set(source.weights.values())),
        bits_per_weight=8 * compressed_bytes / compressed_weights if compressed_weights else overall,
        bits_per_parameter=overall,
        parameters=parameters,
        compressed_weights=compressed_weights,
    )


@dataclass(frozen=True)
class Row:
    """One line of `compress inspect`: a layer or another tensor. bits: per weight, scales included."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    bits: float
    bytes: int
    remark: str


def inspect_checkpoint(model: str) -> tuple[list[Row], Size]:
    """Every layer of a checkpoint and its size, from headers, the configuration and the run's record."""
    source = find_source(model)
    grids = grids_of(source)
    record_path = source.path / RECORD
    record = read_json(record_path) if record_path.exists() else {"layers": [], "left_alone": {}}
    made = {layer["name"]: layer for layer in record["layers"]}
    parts: dict[str, list[TensorSize]] = {}
    for tensor in tensor_sizes(source):
        layer, _, part = tensor.name.rpartition(".")
        parts.setdefault(layer if layer in grids and part in PARTS else tensor.name, []).append(tensor)
    rows = []
    for name, tensors in parts.items():
        total = sum(t.bytes for t in tensors)
        grid = grids.get(name)
        if grid is None:
            shape, layer = tensors[0].shape, name.removesuffix(".weight")
            remark = record["left_alone"].get(layer) or record["left_alone"].get(name, "")
            if layer in made:
                remark = f"{made[layer]['method']} {made[layer]['scheme']}, stored dense"
            rows.append(Row(name, shape, tensors[0].dtype.lower(), 8 * total / max(1, math.prod(shape)), total, remark))
            continue
        with safe_open(source.weights[f"{name}.weight_shape"], framework="pt") as file:
            shape = tuple(int(n) for n in file.get_tensor(f"{name}.weight_shape"))
        group = "channel" if grid.group_size is None else f"g{grid.group_size}"
        scheme = f"w{grid.bits}a16 {group} {'symmetric' if grid.symmetric else 'asymmetric'}"
        rows.append(Row(name, shape, scheme, 8 * total / math.prod(shape), total, _loss(made.get(name))))
    return rows, measure_size(source)


def _loss(layer: Mapping[str, Any] | None) -> str:
    if layer is None:
        return ""
    figures = layer["figures"]
    if "rtn_loss" not in figures:
        return layer["method"]
    return f"{layer['method']}: loss {figures['loss']:.2e}, rtn {figures['rtn_loss']:.2e}, damp {figures['damp']:g}"
