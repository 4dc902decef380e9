"""The tensors of a model: buffers that belong to its checkpoint, its size, a copy without values."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Full name, buffer) of every persistent buffer, once for each name that it has."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device; shared tensors stay shared."""
    memo: dict[int, object] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def size_of(model: nn.Module) -> tuple[int, int]:
    """(Number of parameters, bytes of the model's parameters and persistent buffers). Shared tensors count once."""
    tensors: dict[int, Tensor] = {id(p): p for p in model.parameters()}
    parameters = sum(p.numel() for p in tensors.values())
    tensors |= {id(buffer): buffer for _, buffer in stored_buffers(model)}
    return parameters, sum(t.numel() * t.element_size() for t in tensors.values())
