"""Zeros of pruning, told from those to which a grid rounded small weights: a 4-bit grid alone makes one weight in seven
zero.

A grid repeats its values. Among consecutive inputs, which have one scale, its zeros are about as many as the weights of
the smallest magnitude that is not zero; of numbers that no grid has rounded, one has that magnitude. Half of every M
consecutive weights zero, throughout, is no accident.

Shapes: N outputs, K inputs.
"""

import torch
from torch import Tensor

# Numbers of consecutive inputs that are compared: those of usual groups.
COMPARED = (16, 64)
# Zeros for each repetition of the smallest magnitude, up to which a grid explains them. 2 bits with one scale for a row
# of normal weights have 2.
EXPLAINED = 2.5
# Lengths of patterns with one half of zeros.
LENGTHS = (2, 4, 8, 16, 32)


def evidence(weight_NK: Tensor) -> Tensor:
    """Counts about a matrix [2 len(COMPARED) + len(LENGTHS)], which add up over parts of its rows: zeros and
    repetitions of the smallest magnitude; groups of each length with more than one half of other weights. Rows of zeros
    alone do not count."""
    size_NK, columns = weight_NK[(weight_NK != 0).any(1)].abs(), weight_NK.shape[1]
    counts = []
    for length in (min(length, columns) for length in COMPARED):
        size = _groups(size_NK, length)
        least = size.masked_fill(size == 0, torch.inf).amin(-1, keepdim=True)
        alike = (size == least).sum(-1)
        counts += [(size == 0).sum(), (alike - 1).clamp(min=0).sum()]
    for length in LENGTHS:
        kept = _groups(size_NK, length).count_nonzero(-1)
        counts.append((kept > length // 2).sum() if columns % length == 0 else torch.ones((), device=kept.device))
    return torch.stack([each.to(torch.int64) for each in counts])


def explained(evidence_: Tensor) -> bool:
    """True where the zeros of a matrix may be those of a grid."""
    pairs, half = evidence_[: 2 * len(COMPARED)].view(-1, 2).tolist(), evidence_[2 * len(COMPARED) :]
    return bool((half > 0).all()) and any(zeros <= EXPLAINED * repeated for zeros, repeated in pairs)


def _groups(size_NK: Tensor, length: int) -> Tensor:
    """[N, K / length, length], without inputs that are left over."""
    return size_NK[:, : size_NK.shape[1] // length * length].unflatten(1, (-1, length))
