"""Tensors of a device that wait in the host's memory while the device's is short."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True, eq=False)
class OnHost:
    """A tensor's copy in the host's memory, pinned for a GPU, and the device that it came from."""

    tensor: Tensor
    device: torch.device

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @classmethod
    def of(cls, tensor: Tensor) -> "OnHost":
        """The copy of a tensor, made by the time that this returns."""
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return cls(copy.copy_(tensor), tensor.device)

    def back(self) -> Tensor:
        """A copy on the device, made before whatever is begun there afterwards."""
        return self.tensor.to(self.device, copy=True, non_blocking=True)


def aside(tree: Any, known: dict[int, OnHost] | None = None) -> Any:
    """The tree with its tensors on the host. known: of tensors that several trees share, by their ids, while they
    live."""
    copies = {} if known is None else known

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = OnHost.of(leaf)
        return copies[id(leaf)]

    return tree_map(put, tree)


def here(tree: Any) -> Any:
    """The tree with its tensors on their device, those that waited on the host in new copies."""
    return tree_map(lambda leaf: leaf.back() if isinstance(leaf, OnHost) else leaf, tree)
