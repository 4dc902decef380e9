"""Statistics of pairs against scipy's, and against what they promise."""

import numpy as np
import pytest
from scipy.stats import binomtest, bootstrap, sem

from compress.evaluation.statistics import mean_of_independent
from compress.evaluation.tasks.paired import holm, interval, mcnemar


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (3, 9), (7, 7), (8, 7), (40, 12), (0, 2000)])
def test_mcnemar_is_scipys_binomial_test(gained: int, lost: int) -> None:
    expected = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9, abs=0)


def test_holm_is_its_definition() -> None:
    """p'_(i) = max over j <= i of min(1, (m - j + 1) p_(j)), written out."""
    draw = np.random.default_rng(0)
    for p in [[], [0.03], [0.01, 0.04, 0.03, 0.005], [0.5, 0.5, 0.5], list(draw.random(7)), list(draw.random(7) / 9)]:
        order = sorted(p)
        m = len(p)
        stepped = {value: max(min(1.0, (m - j) * order[j]) for j in range(order.index(value) + 1)) for value in p}
        assert holm(p) == pytest.approx([stepped[value] for value in p])
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # the textbook's four


def test_the_interval_is_scipys_percentile_bootstrap() -> None:
    draw = np.random.default_rng(1)
    for values in (draw.choice([-1.0, 0.0, 1.0], 200, p=[0.1, 0.75, 0.15]), draw.normal(0.1, 1, 80)):
        theirs = bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=2, vectorized=True)
        near = 0.05 * float(np.ptp(theirs.confidence_interval))
        assert interval(values) == pytest.approx(tuple(theirs.confidence_interval), abs=near)
        assert interval(values) == interval(values)
        low, high = interval(values)
        assert high - low == pytest.approx(2 * 1.96 * mean_of_independent(values).error, rel=0.05)


def test_of_many_samples_the_interval_holds_the_truth_95_times_in_100() -> None:
    draw, truth, held = np.random.default_rng(3), 0.05, 0
    for _ in range(400):
        values = draw.choice([-1.0, 0.0, 1.0], 300, p=[0.1, 0.75, 0.15])
        low, high = interval(values, resamples=500)
        held += low <= truth <= high
    assert 0.92 < held / 400 < 0.98


def test_pairs_tell_what_two_accuracies_cannot() -> None:
    """Models that agree on nearly all questions: the paired error is a fraction of either's own."""
    draw = np.random.default_rng(4)
    theirs = draw.random(500) < 0.6
    ours = theirs ^ (draw.random(500) < 0.02)
    difference = ours.astype(float) - theirs
    assert mean_of_independent(difference).error == pytest.approx(sem(difference))
    assert mean_of_independent(difference).error < mean_of_independent(ours.astype(float)).error / 3
    assert mean_of_independent(np.array([1.0])).error is None
