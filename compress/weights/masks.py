"""Which weights of a layer stay: so many of each few in a row of inputs (N:M), or a share, by a score of each.

Shapes: N outputs, K inputs. A score says what a weight is worth, and is never negative. The best are counted out, not
found by a threshold: of equals those that come first stay, and there are exactly as many as asked for, whatever the
scores are. A pattern n:m keeps n of m inputs in a row (NVIDIA's 2:4; some papers count the zeros).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from compress.errors import InputError

# What a weight that is zero already is worth: less than any other.
PRUNED = -1.0
# A layer of which a larger share of the weights is exactly zero has been pruned.
FEW_ZEROS = 0.05
# Of a share that was recorded.
ROUNDING = 1e-6
OTHERS = "take a method that does (gptq, awq or rtn, say)"
# The figure of a layer's record: the share of zeros that it came with.
CAME = "zeros_before"
# Lengths of the patterns that a mask is looked at for, and that hardware or papers know.
LENGTHS = (2, 4, 8, 16, 32)


class Pattern(NamedTuple):
    """`kept` of `length` weights in a row of inputs stay."""

    kept: int
    length: int

    def __str__(self) -> str:
        return f"{self.kept}:{self.length}"

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.length


def parse_pattern(word: str) -> Pattern:
    """From words like 2:4. Raises InputError."""
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", word)
    pattern = Pattern(int(found[1]), int(found[2])) if found else Pattern(0, 0)
    if not 0 < pattern.kept < pattern.length:
        raise InputError(f"pattern {word!r}; allowed: N:M with 0 < N < M, like 2:4, which keeps 2 of 4 inputs in a row")
    return pattern


def pruned_before(column: int, sparsity: float) -> int:
    """How many of so many weights in a row a share prunes: rounded down, of the share as it is written."""
    return int(Fraction(str(sparsity)) * column)


def share_of(pruned: int, count: int) -> float:
    """The share that prunes just so many of `count` weights (`pruned_before`), as it is written."""
    share = pruned / count
    while pruned_before(count, share) < pruned:
        share = math.nextafter(share, 1.0)
    return share


def largest(score: Tensor, count: int) -> Tensor:
    """Bool [..., n]: the `count` largest of each n; of equals the first."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def largest_of_each(score_NK: Tensor, pattern: Pattern) -> Tensor:
    """Bool [N, K]: of every `length` inputs in a row the `kept` largest."""
    return largest(score_NK.unflatten(1, (-1, pattern.length)), pattern.kept).flatten(1)


def largest_share(score_NK: Tensor, pruned: int, together: bool) -> Tensor:
    """Bool [N, K]: all but the `pruned` smallest of each row; of all rows `together`, all but as many for each."""
    if not together:
        return largest(score_NK, score_NK.shape[1] - pruned)
    return largest(score_NK.flatten(), score_NK.numel() - pruned).view_as(score_NK)


@dataclass(frozen=True)
class Choice:
    """Which weights of a layer stay: a pattern, or all but a share, of each row or of all of them together."""

    pattern: Pattern | None
    share: float
    together: bool

    def kept(self, score_NK: Tensor, earlier_NK: Tensor | None, first: int = 0) -> Tensor:
        """Bool [N, K]: which weights stay, by what each is worth, of those that an earlier mask has left. first: the
        inputs before these, whose zeros count towards the share."""
        score = score_NK if earlier_NK is None else score_NK.masked_fill(~earlier_NK, PRUNED)
        if self.pattern is not None:
            kept = largest_of_each(score, self.pattern)
        else:
            rows, columns = score.shape
            each = rows if self.together else 1
            pruned = pruned_before((first + columns) * each, self.share) - pruned_before(first * each, self.share)
            kept = largest_share(score, pruned, self.together)
        return kept if earlier_NK is None else kept & earlier_NK


def pattern_of(kept_NK: Tensor) -> Pattern | None:
    """The shortest pattern of a usual length that a mask has everywhere, exactly; None where there is none."""
    for length in LENGTHS:
        if kept_NK.shape[1] % length == 0:
            counts = kept_NK.unflatten(1, (-1, length)).sum(-1)
            most = int(counts.max())
            if 0 < most < length and bool((counts == most).all()):
                return Pattern(most, length)
    return None


def zeros_in(weight_NK: Tensor) -> tuple[int, int]:
    """(Zeros, weights) in the rows that hold anything else: a row of zeros alone is padding or dead, and stays."""
    values_N = weight_NK.count_nonzero(1)
    rows = int((values_N > 0).sum())
    return rows * weight_NK.shape[1] - int(values_N.sum()), rows * weight_NK.shape[1]


@dataclass(frozen=True)
class Earlier:
    """The pruning that a model comes with. kept: whether its zeros stay zero; recorded: {layer: the share of zeros that
    the record of the earlier command says}."""

    kept: bool = True
    recorded: Mapping[str, float] = field(default_factory=dict)

    def share(self, layer: str, zeros: int, weights: int) -> float | None:
        """The share of zeros of a layer that was pruned: it has more than `FEW_ZEROS`, or as many as were recorded.
        None of any other layer."""
        share = zeros / weights if weights else 0.0
        pruned = share > FEW_ZEROS or 0 < self.recorded.get(layer, math.inf) <= share * (1 + ROUNDING)
        return share if pruned and self.kept else None

    def mask(self, layer: str, weight_NK: Tensor) -> Tensor | None:
        """Bool [N, K], which weights of a layer stay; None where it was not pruned."""
        return None if self.share(layer, *zeros_in(weight_NK)) is None else weight_NK != 0

    def problem(self, layer: str, share: float, method: str, instead: str = OTHERS) -> str:
        """The reason why a method that keeps no zeros cannot treat a layer. instead: a way out that keeps them."""
        return (
            f"{layer} comes pruned ({share:.0%} of its weights are exactly zero), and {method} keeps no zeros; "
            f"{instead}, or let go of the zeros with --drop-zeros (Python: drop_zeros=True)"
        )
