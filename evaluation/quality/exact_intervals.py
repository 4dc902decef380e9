"""Shares of few questions: exact intervals, where a standard error is not reliable.

Of N independent questions k have some property. The Clopper-Pearson interval holds every share p under which neither so
few nor so many are less likely than half of 1 - level:

    low    P(K >= k | low)  = (1 - level) / 2        0 where k = 0
    high   P(K <= k | high) = (1 - level) / 2        1 where k = N

A standard error is estimated from the same sample: it is zero where k is 0 or N, whatever N is, and far off near that.
There the interval is a figure's own.

A paired difference. Two models answer N questions, of which n are right by one of them alone, and g of these n by the
first. With q = P(only one of them is right) and t = P(it is the first, where only one is),

    d = q (2 t - 1)

q has an interval of 99 % from (n, N), t one of 96 % from (g, n); both hold at once with 95 % or more, so d lies between
the least and the largest value that it has on the two. Where t's interval does not hold 1/2, which is where a sign test
(McNemar's) of 4 % rejects, d's does not hold zero.

Clopper and Pearson 1934, Biometrika 26.
"""

import numpy as np
from scipy.special import betaincinv

from compress.evaluation.document import Figure
from compress.evaluation.quality.kl_and_perplexity import Values, mean_of_independent

LEVEL = 0.95
DISAGREEING, OF_THEM = 0.99, 0.96  # levels of q and t: 0.01 + 0.04 = 1 - LEVEL
FEW = 10  # right or wrong answers, of which a binomial distribution is near a normal one
FEW_UNEQUAL = 15  # questions that one of two models alone has right; from then on a bootstrap holds 94 % or more


def clopper_pearson(k: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """The interval of a share of which k of n were seen; 0 to 1 where n is 0."""
    tail = (1 - level) / 2
    low = 0.0 if k == 0 else float(betaincinv(k, n - k + 1, tail))
    high = 1.0 if k == n else float(betaincinv(k + 1, n - k, 1 - tail))
    return low, high


def paired_interval(gained: int, lost: int, n: int) -> tuple[float, float]:
    """95 % or more of the difference of two shares of the same n questions."""
    unequal = gained + lost
    least, most = clopper_pearson(unequal, n, DISAGREEING)
    low, high = (2 * share - 1 for share in clopper_pearson(gained, unequal, OF_THEM))
    return low * (most if low < 0 else least), high * (most if high > 0 else least)


def share_of(values_N: Values) -> Figure:
    """The mean of values that are 0 or 1, with an interval of its own where few are one of the two; of other values,
    their mean."""
    mean, n = mean_of_independent(values_N), len(values_N)
    if not np.isin(values_N, (0, 1)).all():
        return mean
    k = int(values_N.sum())
    return Figure(mean.value, mean.error, interval=clopper_pearson(k, n) if min(k, n - k) < FEW else None)


def difference_of(ours_N: Values, theirs_N: Values) -> Figure:
    """The mean difference of two models' scores, question by question, with an exact interval where few questions tell
    the two apart; for values other than 0 and 1, the mean with its error alone."""
    mean, n = mean_of_independent(ours_N - theirs_N), len(ours_N)
    if not (np.isin(ours_N, (0, 1)).all() and np.isin(theirs_N, (0, 1)).all()):
        return mean
    gained, lost = int((ours_N > theirs_N).sum()), int((ours_N < theirs_N).sum())
    few = gained + lost < FEW_UNEQUAL
    return Figure(mean.value, mean.error, interval=paired_interval(gained, lost, n) if few else None)
