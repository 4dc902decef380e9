"""Fewer channels of the hidden state: those that matter least go, from every tensor of a model that has them.

    with data       I_c = sum over norms of E |norm(x)_c|                            what the blocks and the head read
    without         I_c = sum over matrices of |W_c|^2 / mean over c of |W_c|^2      W_c: what reads or writes channel c

and what a norm makes of the channels S that stay is scaled by one number a, for a mean square over fewer channels is
another one:

    with data       a = <n'(x_S), n(x)_S> / <n'(x_S), n'(x_S)>                     the least squares of what it returned
    without         a = sqrt(H / N * share), share: those that stay of the squares of a matrix that writes channels
                    (the median: a pooler behind the hidden state has its shape, and is none of it)

so that where the others are always zero, nothing changes.

Source: Minitron (Muralidharan et al. 2024, arXiv 2407.14679, section 2.2: embedding channels).
Departs from the paper: norms are scaled; nothing is retrained in between; the size of heads and MLPs is another option.

Shapes: H channels of the hidden state, N that stay, [.., H] tokens.
"""

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor


def by_weights(squares: Sequence[Tensor]) -> Tensor:
    """[H] importance by the sums of squares [H] of each matrix that reads or writes the channels."""
    total_H = torch.zeros_like(squares[0])
    for squares_H in squares:
        total_H += squares_H / squares_H.mean().clamp(min=torch.finfo(squares_H.dtype).tiny)
    return total_H


def staying(scores_H: Tensor, count: int) -> Tensor:
    """[N] so many channels of the highest scores, in order; of equal ones the first."""
    return scores_H.argsort(descending=True, stable=True)[:count].sort().values


def scale_by_weights(written: Sequence[Tensor], kept_N: Tensor) -> float:
    """The number for every norm, by the sums of squares [H] of each matrix that writes the channels."""
    shares = [float(squares_H[kept_N].sum() / squares_H.sum()) for squares_H in written if float(squares_H.sum()) > 0]
    if not shares:
        return 1.0
    return (len(written[0]) / len(kept_N) * median(shares)) ** 0.5
