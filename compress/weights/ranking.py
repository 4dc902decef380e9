"""Weights of many layers ranked as one, without holding their scores: histograms that add up.

Scores are never negative, and floats of one sign order as their bits do: a bin is of all float32 of one exponent and
one ten first places after the point, 1/1024 wide at most, as a part of its values. Each value of a float16 or a
bfloat16 has a bin of its own. Counts are whole numbers: they add up over layers, groups and ranks in any order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.system.comm import Comm

# Of the 23 places of a float32 these are dropped; without its sign it has so many bins.
DROPPED = 13
BINS = 2 ** (31 - DROPPED)


@dataclass(frozen=True)
class ScoreHistogram:
    """bins [B], ascending, and counts [B], of those bins that are not empty, on the CPU. total: of the scores."""

    bins: Tensor
    counts: Tensor
    total: float

    @property
    def size(self) -> int:
        """How many scores there are."""
        return int(self.counts.sum())

    def above(self, score: float) -> int:
        """How many scores are in bins above that of a score."""
        return int(self.counts[self.bins > int(bin_of(torch.tensor(score)))].sum())


@dataclass(frozen=True)
class Boundary:
    """Where the lowest scores end: the bin from `low` on, below `high`, in which there are `inside`, of which so many
    are `pruned`."""

    low: float
    high: float
    inside: int
    pruned: int


def bin_of(score: Tensor) -> Tensor:
    """The bin of each score, int64; what is beyond float32 is in the last of its finite bins."""
    largest = torch.finfo(torch.float32).max
    return (score.float().clamp(max=largest).contiguous().view(torch.int32) >> DROPPED).long()


def edge(bin_: int) -> float:
    """The least score of a bin."""
    return float(torch.tensor(bin_ << DROPPED, dtype=torch.int32).view(torch.float32))


def histogram(score_NK: Tensor, comm: Comm) -> ScoreHistogram:
    """Of the scores of a layer, or of this rank's rows of them: what the ranks have adds up. A collective."""
    counts = torch.bincount(bin_of(score_NK.flatten()), minlength=BINS)
    total = score_NK.sum(dtype=torch.float64)
    counts, total = comm.all_reduce(counts).cpu(), comm.all_reduce(total)
    bins = counts.nonzero().flatten()
    return ScoreHistogram(bins, counts[bins], float(total))


def added(parts: Sequence[ScoreHistogram]) -> ScoreHistogram:
    """One histogram of all parts."""
    bins, places = torch.cat([part.bins for part in parts]).unique(return_inverse=True)
    counts = torch.zeros(len(bins), dtype=torch.int64)
    counts.index_add_(0, places, torch.cat([part.counts for part in parts]))
    return ScoreHistogram(bins, counts, sum(part.total for part in parts))


def lowest(layers: Mapping[str, ScoreHistogram], pruned: int) -> tuple[dict[str, int], Boundary]:
    """({layer: how many of the `pruned` lowest scores of all layers are its own}, where they end).

    Of the bin in which they end each layer gives the same part, as far as whole numbers go. 0 < pruned <= all of them.
    """
    whole = added(list(layers.values()))
    up_to = whole.counts.cumsum(0)
    last = int(torch.searchsorted(up_to, pruned))
    bin_, inside = int(whole.bins[last]), int(whole.counts[last])
    rest = pruned - (int(up_to[last]) - inside)
    found = {name: int(layer.counts[layer.bins < bin_].sum()) for name, layer in layers.items()}
    within = {name: int(layer.counts[layer.bins == bin_].sum()) for name, layer in layers.items()}
    for name, more in proportional(within, rest).items():
        found[name] += more
    return found, Boundary(edge(bin_), edge(bin_ + 1), inside, rest)


def proportional(counts: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` shared out in proportion to counts that sum to as much or more: rounded down, and one more for those
    that lost most by that, of equals the first."""
    everything = sum(counts.values())
    found = {name: total * count // everything for name, count in counts.items()}
    lost = {name: total * count % everything for name, count in counts.items()}
    for name in sorted(counts, key=lambda n: -lost[n])[: total - sum(found.values())]:
        found[name] += 1
    return found
