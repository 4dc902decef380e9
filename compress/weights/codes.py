"""A layer's tensors on disk from its codes, and back; `weights.scheme` says which they are."""

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.kernels.pack import pack_rows, unpack_rows
from compress.weights.grid import Grid, Quantized
from compress.weights.rounding import ActivationCodes
from compress.weights.scheme import Scheme, scheme_of


def tensors_of(
    layer: str,
    quantized: Quantized,
    inputs: ActivationCodes | None = None,
    outputs: ActivationCodes | None = None,
    table: bool = False,
) -> dict[str, Tensor]:
    """The tensors that stand for one compressed layer. table: as `scheme_of` has it."""
    scheme = scheme_of(quantized.grid, inputs, outputs, table=table)
    bits = quantized.grid.bits
    scale = quantized.scale.expand(quantized.codes.shape[0], -1) if quantized.scale.shape[0] == 1 else quantized.scale
    tensors = {"weight_scale": scale[:1, 0] if scheme.one_scale else scale}
    if scheme.layout != "pack-quantized":
        tensors["weight"] = quantized.codes
    else:
        tensors["weight_packed"] = pack_rows(quantized.codes, bits)
        tensors["weight_shape"] = torch.tensor(quantized.codes.shape)
    if quantized.zero_point is not None:
        zero_point = quantized.zero_point.expand(scale.shape)
        packed = scheme.layout == "pack-quantized"
        tensors["weight_zero_point"] = pack_rows(zero_point.t().contiguous(), bits).t() if packed else zero_point
    for side, codes in (("input", inputs), ("output", outputs)):
        if codes is not None and codes.scale is not None:
            tensors[f"{side}_scale"] = codes.scale.reshape(1)
            if codes.zero_point is not None:
                tensors[f"{side}_zero_point"] = codes.zero_point.reshape(1)
    return {f"{layer}.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def check_parts(
    layer: str, found: Mapping[str, tuple[tuple[int, ...], torch.dtype]], scheme: Scheme, shape: tuple[int, int]
) -> None:
    """Hold the shapes and dtypes that a layer's tensors have to its scheme. Raises CheckpointError that names one."""
    rows, columns = shape
    group = scheme.weights.group_size
    if group is not None and columns % group:
        raise CheckpointError(f"{layer} has {columns} inputs; groups of {group} do not fit")
    for name, part in scheme.parts(rows, columns).items():
        if name not in found:
            if part.optional:
                continue
            raise CheckpointError(f"{layer}.{name} is missing from the checkpoint")
        size, dtype = found[name]
        if size != part.shape and not (part.shape == (1,) and size == ()):
            raise CheckpointError(f"{layer}.{name} has shape {size}; its layer needs {part.shape}")
        if dtype not in part.dtypes:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in part.dtypes)
            raise CheckpointError(f"{layer}.{name} is {str(dtype).removeprefix('torch.')}; it must be {allowed}")
    if unknown := sorted(set(found) - set(scheme.parts(rows, columns)) - {"bias"}):
        raise CheckpointError(f"{layer}.{unknown[0]} is no part of a layer stored as {scheme.layout}")


def shape_of(layer: str, stored: Tensor) -> tuple[int, int]:
    """(N, K) from a `weight_shape`. Raises CheckpointError where it is not two positive numbers."""
    if tuple(stored.shape) != (2,):
        raise CheckpointError(f"{layer}.weight_shape has shape {tuple(stored.shape)}; it must hold two numbers")
    rows, columns = (int(n) for n in stored)
    if rows < 1 or columns < 1:
        raise CheckpointError(f"{layer}.weight_shape says {rows} x {columns}")
    return rows, columns


def check_codes(layer: str, codes: Tensor) -> None:
    """Raises CheckpointError where float codes are no numbers."""
    if codes.is_floating_point() and bool(codes.isnan().any()):
        raise CheckpointError(f"{layer}.weight holds codes that are not numbers")


def quantized_from(layer: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> Quantized:
    """Inverse of `tensors_of`. Raises CheckpointError that names the tensor at fault."""
    parts = {name.removeprefix(f"{layer}."): tensor for name, tensor in tensors.items()}
    if scheme.layout == "pack-quantized" and "weight_shape" not in parts:
        raise CheckpointError(f"{layer}.weight_shape is missing from the checkpoint")
    stored = parts.get("weight_shape")
    shape = tuple(parts["weight"].shape) if stored is None else shape_of(layer, stored)
    rows, columns = shape
    check_parts(layer, {name: (tuple(t.shape), t.dtype) for name, t in parts.items()}, scheme, (rows, columns))
    scale = parts["weight_scale"]
    if not bool(torch.isfinite(scale).all()):
        raise CheckpointError(f"{layer}.weight_scale holds values that are not finite numbers")
    if scheme.layout != "pack-quantized":
        check_codes(layer, parts["weight"])
        scale = scale.reshape(1, 1) if scheme.one_scale else scale
        return Quantized(parts["weight"], scale, parts.get("weight_zero_point"), scheme.weights)
    bits, zero_point = scheme.weights.bits, None
    if not scheme.weights.symmetric:
        zero_point = unpack_rows(parts["weight_zero_point"].t().contiguous(), bits, rows).t().contiguous()
    return Quantized(unpack_rows(parts["weight_packed"], bits, columns), scale, zero_point, scheme.weights)


def inputs_from(layer: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> ActivationCodes | None:
    """How the input of a layer is rounded, from its tensors."""
    if scheme.inputs is None or scheme.dynamic:
        return None if scheme.inputs is None else ActivationCodes(scheme.inputs)
    return _fixed(f"{layer}.input", tensors, scheme.inputs)


def outputs_from(layer: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> ActivationCodes | None:
    """How the output of a layer is rounded, from its tensors."""
    return None if scheme.outputs is None else _fixed(f"{layer}.output", tensors, scheme.outputs)


def _fixed(what: str, tensors: Mapping[str, Tensor], grid: Grid) -> ActivationCodes:
    zero_point = None if grid.symmetric else tensors.get(f"{what}_zero_point")
    return ActivationCodes(
        grid, tensors[f"{what}_scale"].reshape(1, 1), None if zero_point is None else zero_point.reshape(1, 1)
    )
