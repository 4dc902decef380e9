"""The best of some candidates, chosen for each element of a tensor by itself."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# A cost, and tensors that broadcast with it: what is chosen where the cost is the least.
Candidate = tuple[Tensor, Sequence[Tensor]]


def least_cost(first: Candidate, others: Iterable[Candidate]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(The least cost of all, what it was of); of equals the first, which stays where a cost is no number."""
    best, chosen = first[0], tuple(first[1])
    for cost, values in others:
        better = cost < best
        best = torch.where(better, cost, best)
        chosen = tuple(torch.where(better, new, old) for new, old in zip(values, chosen, strict=True))
    return best, chosen
