"""Channel permutation: which inputs share a group of N:M, so that more of what is worth much stays.

Pool and Yu (NeurIPS 2021, "Channel permutations for N:M sparsity"). Shapes: R rows (outputs of all that reads the
channels), U channels, M of one group.

    maximise over orders of the channels    sum over rows and groups of the N largest scores of the group

Paper -> code: the score -> what the pass ranks by, |W| for magnitude; the search -> `better_order`: channels are dealt
out by their sums so that large ones do not meet, where that is better than their own order; then groups in random
pairs exchange the two channels that gain most, for so many rounds.

Departs from the paper:
- pairs of groups are drawn, and each exchanges at most one pair of channels a round; the paper keeps all gains of all
  pairs of channels, whose number grows as the square of the channels, and takes random steps out of optima.
- of many rows some are looked at, evenly spread; an order that keeps less of all rows is not taken.
"""

import torch
from torch import Tensor

from compress.weights.masks import Pattern

# Rows by which orders are compared.
ROWS = 512
# Exchanges that gain less, as a part of what is kept, are rounding.
LEAST_GAIN = 1e-7


def kept_of(score_RU: Tensor, pattern: Pattern) -> float:
    """The sum of the scores that a pattern keeps."""
    return float(_largest(score_RU.unflatten(1, (-1, pattern.length)), pattern).sum(dtype=torch.float64))


def better_order(score_RU: Tensor, pattern: Pattern, rounds: int) -> Tensor:
    """[U] which channel comes to each place: at least as much is kept as in their own order. U: a multiple of M."""
    rows = torch.linspace(0, len(score_RU) - 1, min(ROWS, len(score_RU))).round().long()
    some = score_RU[rows.to(score_RU.device)]
    same = torch.arange(score_RU.shape[1], device=score_RU.device)
    order = max((same, deal(some, pattern)), key=lambda o: kept_of(some[:, o], pattern))
    generator = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        order = exchange(some, order, pattern, generator)
    return order if kept_of(score_RU[:, order], pattern) > kept_of(score_RU, pattern) else same


def deal(score_RU: Tensor, pattern: Pattern) -> Tensor:
    """Channels by their sums, the largest of each group first."""
    falling = score_RU.sum(0, dtype=torch.float64).argsort(descending=True, stable=True)
    return falling.view(pattern.length, -1).t().flatten()


def exchange(score_RU: Tensor, order_U: Tensor, pattern: Pattern, generator: torch.Generator) -> Tensor:
    """The order after groups in random pairs [P] have exchanged the two channels that gain most, if any do."""
    groups = order_U.view(-1, pattern.length).clone()
    drawn = torch.randperm(len(groups), generator=generator).to(order_U.device)
    first, second = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 : len(drawn) // 2 * 2]
    if not len(first):
        return order_U
    one_RPM, other_RPM = score_RU[:, groups[first]], score_RU[:, groups[second]]
    before_P = (_largest(one_RPM, pattern) + _largest(other_RPM, pattern)).sum(0)
    gains = []
    for i in range(pattern.length):
        for j in range(pattern.length):
            one, other = one_RPM.clone(), other_RPM.clone()
            one[..., i], other[..., j] = other_RPM[..., j], one_RPM[..., i]
            gains.append((_largest(one, pattern) + _largest(other, pattern)).sum(0) - before_P)
    gain_P, best_P = torch.stack(gains).max(0)
    better = gain_P > LEAST_GAIN * before_P
    from_first, from_second = best_P[better] // pattern.length, best_P[better] % pattern.length
    first, second = first[better], second[better]
    moved = groups[first, from_first]
    groups[first, from_first] = groups[second, from_second]
    groups[second, from_second] = moved
    return groups.flatten()


def _largest(score: Tensor, pattern: Pattern) -> Tensor:
    """[...] the sum of the N largest of each M, the last dimension."""
    return score.topk(pattern.kept, dim=-1, sorted=False).values.sum(-1)
