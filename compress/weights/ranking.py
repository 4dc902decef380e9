"""Ranks the weights of many layers together without holding their scores, by histograms that can be added.

Scores are never negative, and floats of one sign are ordered like their bits. A bin holds all float32 with the same
exponent and the same first ten bits of the fraction, so that it is at most 1/1024 of its values wide. Each value of
float16 and of bfloat16 has its own bin. Counts are whole numbers: they add up over layers, groups and ranks in any
order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.base.collectives import Comm

# Of the 23 fraction bits of a float32 these are dropped; without the sign that leaves 2^18 bins.
DROPPED = 13
BINS = 2 ** (31 - DROPPED)


@dataclass(frozen=True)
class ScoreHistogram:
    """A histogram of scores. bins [B], ascending, and counts [B], of the bins that are not empty, on the CPU."""

    bins: Tensor
    counts: Tensor


def bin_of(score: Tensor) -> Tensor:
    """The bin of each score, int64; scores beyond float32 are in the last finite bin."""
    largest = torch.finfo(torch.float32).max
    return (score.float().clamp(max=largest).contiguous().view(torch.int32) >> DROPPED).long()


def histogram(score_NK: Tensor, comm: Comm) -> ScoreHistogram:
    """The histogram of a layer's scores. Each rank gives its own rows; the sum over ranks is returned. A collective."""
    counts = torch.bincount(bin_of(score_NK.flatten()), minlength=BINS)
    counts = comm.all_reduce(counts).cpu()
    bins = counts.nonzero().flatten()
    return ScoreHistogram(bins, counts[bins])


def added(parts: Sequence[ScoreHistogram]) -> ScoreHistogram:
    """One histogram of all parts."""
    bins, places = torch.cat([part.bins for part in parts]).unique(return_inverse=True)
    counts = torch.zeros(len(bins), dtype=torch.int64)
    counts.index_add_(0, places, torch.cat([part.counts for part in parts]))
    return ScoreHistogram(bins, counts)


def lowest(layers: Mapping[str, ScoreHistogram], pruned: int) -> dict[str, int]:
    """{layer: its number of the `pruned` lowest scores of all layers}. In the bin in which these end each layer gives
    the same share, up to whole numbers. 0 < pruned <= the number of all scores."""
    whole = added(list(layers.values()))
    up_to = whole.counts.cumsum(0)
    last = int(torch.searchsorted(up_to, pruned))
    bin_, inside = int(whole.bins[last]), int(whole.counts[last])
    rest = pruned - (int(up_to[last]) - inside)
    found = {name: int(layer.counts[layer.bins < bin_].sum()) for name, layer in layers.items()}
    within = {name: int(layer.counts[layer.bins == bin_].sum()) for name, layer in layers.items()}
    for name, more in proportional(within, rest).items():
        found[name] += more
    return found


def proportional(counts: Mapping[str, int], total: int) -> dict[str, int]:
    """Divides `total` in proportion to counts, whose sum is at least `total`: rounded down, and one more for those that
    lost most by rounding, of equals the first."""
    everything = sum(counts.values())
    found = {name: total * count // everything for name, count in counts.items()}
    lost = {name: total * count % everything for name, count in counts.items()}
    for name in sorted(counts, key=lambda n: -lost[n])[: total - sum(found.values())]:
        found[name] += 1
    return found
