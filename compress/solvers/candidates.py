"""The best of some candidates: of all, or for each element of a tensor by itself."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# A cost, and tensors that broadcast with it: what is chosen where the cost is the least.
Candidate = tuple[Tensor, Sequence[Tensor]]


def least_cost(first: Candidate, others: Iterable[Candidate]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(The least cost, its tensors); of equals the first, which stays where a cost is no number."""
    best, chosen = first[0], tuple(first[1])
    for cost, values in others:
        better = cost < best
        best = torch.where(better, cost, best)
        chosen = tuple(torch.where(better, new, old) for new, old in zip(values, chosen, strict=True))
    return best, chosen


def least_loss(losses: Tensor) -> tuple[int, float]:
    """(The index of the least of losses, its loss as a part of that of the first.)"""
    least = int(losses.argmin())
    return least, float(losses[least] / losses[0].clamp(min=torch.finfo(losses.dtype).tiny))
