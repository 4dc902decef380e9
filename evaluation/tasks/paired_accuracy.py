"""Two models on the same questions: is the difference of their accuracies more than chance?

Of N questions, d_i in {-1, 0, 1} is the model's score less the reference's; `gained` are the 1, `lost` the -1.

    McNemar    if both were equally good, gained would be Binomial(gained + lost, 1/2);
               p = P(a split at least as uneven), two-sided
    interval   2.5 and 97.5 % of the means of d over resamples of the questions, pairs kept together; of questions
               that are right or wrong, where fewer than 15 were gained or lost, the exact one of
               `evaluation.quality.exact_intervals`
    Holm       of m tests with p_(1) <= ... <= p_(m): p'_(i) = max over j <= i of min(1, (m - j + 1) p_(j))

Resamples of questions of which none was gained or lost are all alike: a bootstrap would give an interval without width.
The exact one then says how much could have been missed. Values that are all the same and no outcomes have none.

McNemar 1947 (its exact form); Efron 1979, percentile bootstrap; Holm 1979.
"""

from collections.abc import Sequence

import numpy as np

from compress.evaluation.quality.statistics import Values

RESAMPLES = 10_000
TAILS = (0.025, 0.975)
DRAWN = 2**22  # counts at a time: 32 MiB


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value; 1 where nothing was gained or lost."""
    n = gained + lost
    chance, below = 1, 0  # of k of n, and of fewer, times 2^n
    for k in range(min(gained, lost) + 1):
        below += chance
        chance = chance * (n - k) // (k + 1)
    return min(1.0, 2 * below / 2**n)


def interval(differences_N: Values, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """95 % of the mean difference, by a bootstrap over the questions.

    How often each value is drawn is drawn at once, from the multinomial distribution that it has: the same as drawing
    question by question, and as cheap as there are few values.
    """
    values_U, counts_U = np.unique(differences_N, return_counts=True)
    n, generator = len(differences_N), np.random.default_rng(seed)
    step = max(1, DRAWN // len(values_U))
    sizes = [min(step, resamples - first) for first in range(0, resamples, step)]
    means = np.concatenate([generator.multinomial(n, counts_U / n, size) @ values_U / n for size in sizes])
    low, high = np.quantile(means, TAILS)
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, adjusted so that none of them is below a level by chance more often than that."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
