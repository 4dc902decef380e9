"""Reads the tensors that were stored for an edit; errors name a tensor that is missing or of the wrong kind."""

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.base.errors import CheckpointError

WHOLE = (torch.int32, torch.int64)


def numbers(parts: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...]) -> Tensor:
    """A stored tensor of real numbers. shape: None for a dimension of any size. Raises CheckpointError."""
    found = _part(parts, name, shape)
    if not found.is_floating_point():
        raise CheckpointError(f"{name} has dtype {found.dtype}; it must be one of real numbers")
    return found


def indices(parts: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...], low: int, end: int) -> Tensor:
    """A stored tensor of whole numbers in [low, end). shape: None for a dimension of any size. Raises
    CheckpointError."""
    found = _part(parts, name, shape)
    if found.dtype not in WHOLE:
        raise CheckpointError(f"{name} has dtype {found.dtype}; it must be one of whole numbers")
    if found.numel() and not (low <= int(found.min()) and int(found.max()) < end):
        raise CheckpointError(
            f"{name} has numbers from {int(found.min())} to {int(found.max())}; they must be from {low} to {end - 1}"
        )
    return found


def _part(parts: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...]) -> Tensor:
    if name not in parts:
        raise CheckpointError(f"the tensor {name} is missing")
    found = parts[name]
    if found.ndim != len(shape) or any(s not in (None, n) for n, s in zip(found.shape, shape, strict=True)):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise CheckpointError(f"{name} has shape {list(found.shape)}; it must be [{wanted}]")
    return found
