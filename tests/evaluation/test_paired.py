"""Statistics of pairs against scipy's, and against what they promise."""

import math
from importlib import metadata

import numpy as np
import pytest
from packaging.version import Version
from scipy.stats import binomtest, bootstrap, sem

from compress.evaluation.quality.exact_intervals import clopper_pearson, difference_of, paired_interval, share_of
from compress.evaluation.quality.kl_and_perplexity import mean_of_independent
from compress.evaluation.tasks.results import holm, interval, mcnemar


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
    seed = {"rng" if Version(metadata.version("scipy")) >= Version("1.15") else "random_state": 2}
    for values in (draw.choice([-1.0, 0.0, 1.0], 200, p=[0.1, 0.75, 0.15]), draw.normal(0.1, 1, 80)):
        theirs = bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, vectorized=True, **seed)
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


def test_the_interval_of_a_share_is_scipys_exact_one() -> None:
    for n in (1, 10, 300):
        for k in {0, 1, n // 3, n}:
            expected = binomtest(k, n).proportion_ci(0.95, method="exact")
            assert clopper_pearson(k, n) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert share_of(np.zeros(10)).interval == (0.0, pytest.approx(0.3085, abs=1e-4))  # a table's
    assert share_of(np.zeros(10)).error is None
    assert share_of(np.arange(300) % 2.0).interval is None  # the standard error will do


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.02, 0.02), (0.3, 0.0), (0.05, 0.4), (0.3, 0.3), (1.0, 0.0)])
def test_few_questions_hold_the_difference_95_times_in_100_or_more(rates: tuple[float, float]) -> None:
    """Over every outcome of n questions, each by its probability."""
    gains, losses = rates
    for n in (1, 5, 12):
        held = 0.0
        for gained in range(n + 1):
            for lost in range(n + 1 - gained):
                ways = math.comb(n, gained) * math.comb(n - gained, lost)
                chance = ways * gains**gained * losses**lost * (1 - gains - losses) ** (n - gained - lost)
                low, high = paired_interval(gained, lost, n)
                assert -1 <= low <= (gained - lost) / n <= high <= 1
                held += chance * (low - 1e-12 <= gains - losses <= high + 1e-12)
        assert held >= 0.95, n


def test_an_interval_of_few_questions_leaves_zero_out_where_the_sign_test_rejects() -> None:
    for gained in range(12):
        for lost in range(12):
            low, high = paired_interval(gained, lost, 200)
            assert (low > 0 or high < 0) == (mcnemar(gained, lost) < 0.04), (gained, lost)


def test_models_that_answer_alike_may_still_differ() -> None:
    same = difference_of(np.ones(10), np.ones(10))
    assert (same.value, same.error) == (0.0, None)
    assert same.interval == pytest.approx((-0.4113, 0.4113), abs=1e-4)
    many = difference_of(np.arange(200) % 2.0, np.arange(200) // 2 % 2.0)
    assert many.interval is None
    assert many.error is not None
