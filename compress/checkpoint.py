"""Checkpoints on disk: the compressed-tensors layout of packed integer weights.

N outputs, K inputs, G groups, n bits. Keys are the layer's path plus

    weight_packed      int32 [N, ceil(K n / 32)]    codes as a bit stream (`compress.kernels.pack`)
    weight_scale       model dtype [N, G]
    weight_zero_point  int32 [ceil(N n / 32), G]    asymmetric only, packed along N
    weight_shape       int64 [2]                    (N, K)

Every other tensor keeps its name. `compress.writer` writes such directories.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.grid import Grid, Quantized
from compress.kernels.pack import pack_rows, unpack_rows, words_of

RECORD = "compress.json"
INDEX = "model.safetensors.index.json"
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def tensors_of(layer: str, quantized: Quantized) -> dict[str, Tensor]:
    """The tensors that stand for one compressed layer."""
    bits = quantized.grid.bits
    scale = quantized.scale.expand(quantized.codes.shape[0], -1) if quantized.scale.shape[0] == 1 else quantized.scale
    tensors = {
        f"{layer}.weight_packed": pack_rows(quantized.codes, bits),
        f"{layer}.weight_scale": scale,
        f"{layer}.weight_shape": torch.tensor(quantized.codes.shape),
    }
    if quantized.zero_point is not None:
        zero_point = quantized.zero_point.expand(scale.shape)
        tensors[f"{layer}.weight_zero_point"] = pack_rows(zero_point.t().contiguous(), bits).t()
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def quantized_from(layer: str, tensors: Mapping[str, Tensor], grid: Grid) -> Quantized:
    """Inverse of `tensors_of`. Raises CheckpointError that names the tensor that is missing or of the wrong shape."""

    def get(part: str, dtype: torch.dtype | None) -> Tensor:
        name = f"{layer}.{part}"
        if name not in tensors:
            raise CheckpointError(f"{name} is missing from the checkpoint")
        if dtype is not None and tensors[name].dtype != dtype:
            raise CheckpointError(f"{name} is {tensors[name].dtype}; it must be {dtype}")
        return tensors[name]

    def expect(part: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{layer}.{part} has shape {tuple(tensor.shape)}; its layer needs {shape}")

    shape = get("weight_shape", None)
    if tuple(shape.shape) != (2,):
        raise CheckpointError(f"{layer}.weight_shape has shape {tuple(shape.shape)}; it must hold two numbers")
    rows, columns = (int(n) for n in shape)
    if grid.group_size is not None and columns % grid.group_size:
        raise CheckpointError(f"{layer}.weight_shape says {columns} inputs; groups of {grid.group_size} do not fit")
    groups = 1 if grid.group_size is None else columns // grid.group_size
    packed, scale = get("weight_packed", torch.int32), get("weight_scale", None)
    expect("weight_packed", packed, (rows, words_of(columns, grid.bits)))
    expect("weight_scale", scale, (rows, groups))
    if not scale.is_floating_point() or not bool(torch.isfinite(scale).all()):
        raise CheckpointError(f"{layer}.weight_scale holds values that are not finite numbers")
    zero_point = None
    if not grid.symmetric:
        packed_zero = get("weight_zero_point", torch.int32)
        expect("weight_zero_point", packed_zero, (words_of(rows, grid.bits), groups))
        zero_point = unpack_rows(packed_zero.t().contiguous(), grid.bits, rows).t().contiguous()
    return Quantized(unpack_rows(packed, grid.bits, columns), scale, zero_point, grid)


def scheme_of(grid: Grid) -> dict[str, Any]:
    """A weight grid in the words of compressed-tensors' `quantization_config`."""
    group = grid.granularity == "group"
    scheme = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": grid.symmetric,
        "dynamic": False,
        "strategy": "group" if group else "channel",
    }
    return {**scheme, "group_size": grid.group_size} if group else scheme


def grid_of(scheme: Mapping[str, Any], what: str) -> Grid:
    """The grid that reads codes of a `quantization_config` scheme. Raises CheckpointError for one we cannot read."""
    known = {"num_bits", "type", "symmetric", "dynamic", "strategy", "group_size"}
    odd = sorted(
        k for k, v in scheme.items() if k not in known and v not in (None, False, {}, "minmax", "memoryless_minmax")
    )
    if odd or scheme.get("type", "int") != "int" or scheme.get("dynamic") or not scheme.get("num_bits"):
        raise CheckpointError(
            f"{what}: weights {dict(scheme)} cannot be read; readable: integer, static, 2 to 8 bits, "
            "per channel or group"
        )
    strategy = scheme.get("strategy") or ("group" if scheme.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise CheckpointError(f"{what}: weight strategy {strategy!r} cannot be read; readable: group, channel")
    bits, symmetric = scheme["num_bits"], scheme.get("symmetric", True)
    if strategy == "channel":
        return Grid(bits=bits, symmetric=symmetric)
    return Grid(bits=bits, symmetric=symmetric, granularity="group", group_size=scheme.get("group_size"))


def fingerprint(parts: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON description."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def checksum(tensor: Tensor) -> str:
    """SHA-256 of a tensor's values."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write or replace a JSON file in one step."""
    scratch = path.with_name(path.name + ".writing")
    with scratch.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises CheckpointError in one line for anything that is not one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
