"""Masks of kept weights, by a score for each: n of every m consecutive inputs (N:M), or a share of all.

Shapes: N outputs, K inputs. A score is the importance of a weight, never negative. The best weights are counted, not
found by a threshold: of equal scores the first stay, and exactly the number asked for is kept, whatever the scores are.
A pattern n:m keeps n of m consecutive inputs (NVIDIA's 2:4; some papers count the zeros).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.weights.rounded_zeros import evidence, explained

# The score of a weight that is zero already: below any other.
PRUNED = -1.0
# A layer counts as pruned where a larger share of its weights is exactly zero, and no grid explains that.
FEW_ZEROS = 0.05
# Relative rounding of a recorded share.
ROUNDING = 1e-6
OTHERS = "take a method that does (gptq, awq or rtn, say)"
# The figure in a layer's record for the share of zeros before the run.
CAME = "zeros_before"
# Lengths of patterns that are looked for in a mask: those of hardware and papers.
LENGTHS = (2, 4, 8, 16, 32)


class Pattern(NamedTuple):
    """A pattern that keeps `kept` of every `length` consecutive inputs."""

    kept: int
    length: int

    def __str__(self) -> str:
        return f"{self.kept}:{self.length}"

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.length


def parse_pattern(word: str) -> Pattern:
    """Parses a pattern like 2:4. Raises InputError."""
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", word)
    pattern = Pattern(int(found[1]), int(found[2])) if found else Pattern(0, 0)
    if not 0 < pattern.kept < pattern.length:
        raise InputError(f"pattern {word!r}; allowed: N:M with 0 < N < M, like 2:4, which keeps 2 of 4 inputs in a row")
    return pattern


def pruned_before(column: int, sparsity: float) -> int:
    """The number of pruned weights among `column`, rounded down. The share is taken as the decimal number written."""
    return int(Fraction(str(sparsity)) * column)


def share_of(pruned: int, count: int) -> float:
    """The share that prunes exactly `pruned` of `count` weights (`pruned_before`)."""
    share = pruned / count
    while pruned_before(count, share) < pruned:
        share = math.nextafter(share, 1.0)
    return share


def largest(score: Tensor, count: int) -> Tensor:
    """Bool [..., n]: True for the `count` largest of each n; of equals the first."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def largest_of_each(score_NK: Tensor, pattern: Pattern) -> Tensor:
    """Bool [N, K]: True for the `kept` largest of every `length` consecutive inputs."""
    return largest(score_NK.unflatten(1, (-1, pattern.length)), pattern.kept).flatten(1)


def largest_share(score_NK: Tensor, pruned: int, together: bool) -> Tensor:
    """Bool [N, K]: True for all but the `pruned` smallest of each row, or, with `together`, of the whole matrix."""
    if not together:
        return largest(score_NK, score_NK.shape[1] - pruned)
    return largest(score_NK.flatten(), score_NK.numel() - pruned).view_as(score_NK)


@dataclass(frozen=True)
class Choice:
    """The rule for the kept weights of a layer: a pattern, or all but a share of each row or (together) of the
    matrix."""

    pattern: Pattern | None
    share: float
    together: bool

    def kept(self, score_NK: Tensor, earlier_NK: Tensor | None, first: int = 0) -> Tensor:
        """Bool [N, K]: True for the weights kept by their scores, among those that an earlier mask keeps. first: the
        number of inputs before these, whose zeros count towards the share."""
        score = score_NK if earlier_NK is None else score_NK.masked_fill(~earlier_NK, PRUNED)
        if self.pattern is not None:
            mask = largest_of_each(score, self.pattern)
        else:
            rows, columns = score.shape
            each = rows if self.together else 1
            pruned = pruned_before((first + columns) * each, self.share) - pruned_before(first * each, self.share)
            mask = largest_share(score, pruned, self.together)
        return mask if earlier_NK is None else mask & earlier_NK


def pattern_of(kept_NK: Tensor) -> Pattern | None:
    """The shortest pattern of a usual length (LENGTHS) that a mask has everywhere, exactly; None where there is
    none."""
    for length in LENGTHS:
        if kept_NK.shape[1] % length == 0:
            counts = kept_NK.unflatten(1, (-1, length)).sum(-1)
            most = int(counts.max())
            if 0 < most < length and bool((counts == most).all()):
                return Pattern(most, length)
    return None


def zeros_in(weight_NK: Tensor) -> tuple[int, int]:
    """(Zeros, weights) in the rows that are not all zeros: a row of zeros is padding or dead, and does not count."""
    values_N = weight_NK.count_nonzero(1)
    rows = int((values_N > 0).sum())
    return rows * weight_NK.shape[1] - int(values_N.sum()), rows * weight_NK.shape[1]


@dataclass(frozen=True)
class Earlier:
    """The pruning that a model comes with. kept: its zeros stay zero. recorded: {layer: its share of zeros in the
    record of the earlier command}."""

    kept: bool = True
    recorded: Mapping[str, float] = field(default_factory=dict)

    def share(self, layer: str, zeros: int, weights: int, of_a_grid: bool = False) -> float | None:
        """The share of zeros of a pruned layer, one above `FEW_ZEROS` that no grid explains, or the recorded one. None
        for any other layer, and where zeros are not kept."""
        share = zeros / weights if weights else 0.0
        recorded = 0 < self.recorded.get(layer, math.inf) <= share * (1 + ROUNDING)
        pruned = recorded or (share > FEW_ZEROS and not of_a_grid)
        return share if pruned and self.kept else None

    def mask(self, layer: str, weight_NK: Tensor) -> Tensor | None:
        """Bool [N, K], True for the kept weights of a layer; None for one that was not pruned."""
        zeros, weights = zeros_in(weight_NK)
        of_a_grid = zeros > FEW_ZEROS * weights and explained(evidence(weight_NK))
        return None if self.share(layer, zeros, weights, of_a_grid) is None else weight_NK != 0

    def problem(self, layer: str, share: float, method: str, instead: str = OTHERS) -> str:
        """The message for a method that keeps no zeros and a pruned layer. instead: the advice that keeps them."""
        return (
            f"{layer} comes pruned ({share:.0%} of its weights are exactly zero), and {method} keeps no zeros; "
            f"{instead}, or let go of the zeros with --drop-zeros (Python: drop_zeros=True)"
        )
