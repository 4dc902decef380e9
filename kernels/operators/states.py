"""Rotations by Sylvester's matrices, and the codes of key-value caches, by the loops of a CPU."""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.cpu import states
from compress.kernels.operators.register import gradient, operator


def why_not_rotate(x: Tensor, size: int) -> list[str]:
    """Reasons why `rotate_rows` does not take rows of `size` of x; empty when it does."""
    return _why_not(x) or states.why_not_rotate(size)


def why_not_codes(x: Tensor, bits: int, group: int, rotated: bool) -> list[str]:
    """Reasons why `encode_states` and `decode_states` do not take states like x; empty when they do."""
    return _why_not(x) or states.why_not_codes(x.shape[-1], bits, group, rotated)


def _why_not(x: Tensor) -> list[str]:
    if x.device.type != "cpu":
        return [f"the loops are of a CPU; x is on {x.device.type}"]
    return ["the loops compute in float32; x is float64"] if x.dtype == torch.float64 else []


@operator("compress::rotate_rows", lambda x: x.new_empty(x.shape))
def rotate_rows(x: Tensor) -> Tensor:
    """x [..., D] float32 times Sylvester's matrix [D, D], orthogonal, which is its own inverse."""
    return states.rotate_rows(x)


@gradient(rotate_rows)
def _(grad: Tensor, _: Any) -> Tensor:
    return rotate_rows(grad)


def _like_stored(x: Tensor, bits: int, group: int, _: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], states.stride_of(x.shape[-1], bits, group), dtype=torch.int8)


@operator("compress::encode_states", _like_stored)
def encode_states(x: Tensor, bits: int, group: int, rotated: bool) -> Tensor:
    """The bytes, int8, that a cache keeps of keys or values x [B, H, T, D] (`weights.kv_cache_codes`). rotated: of x
    times Sylvester's matrix."""
    return states.encode_rows(x.float(), bits, group, rotated)


def _like_decoded(stored: Tensor, size: int, *_: Any) -> Tensor:
    return stored.new_empty(*stored.shape[:-1], size, dtype=torch.float32)


@operator("compress::decode_states", _like_decoded)
def decode_states(stored: Tensor, size: int, bits: int, group: int, rotated: bool) -> Tensor:
    """Inverse of `encode_states`: float32 [B, H, T, size]."""
    return states.decode_rows(stored, size, bits, group, rotated)
