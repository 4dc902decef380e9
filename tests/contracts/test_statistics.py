"""What holds for every calibration statistic: it is a sum, a minimum or a maximum over tokens, so neither batches nor
their order nor ranks make a difference. A new statistic joins `STATISTICS` and gets all of it.

Not here, because what they find depends on the micro-batches: a moving average, which says so in its name
(`tests/solvers/statistics/test_calibrators.py`), and a sample of tokens, which stays with its rank.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from combinations import each, every
from thread_ranks import synced
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.solvers.removal import AffineHessian
from compress.solvers.statistics.calibrators import OPTIONS, calibrator
from compress.solvers.statistics.hessian import Hessian
from compress.solvers.statistics.input_statistics import ChannelMean, ChannelNorm, MinMax, StatisticFactory
from compress.weights.grid import Grid

TOKENS, CHANNELS = 203, 24
CPU = torch.device("cpu")
SPLITS = [[203], [1, 202], [100, 3, 100], [0, 203, 0], [7] * 29, [200, 1, 1, 1]]
SINGLE, DOUBLE = 2**-22, 1e-12  # of sums in float64 that are rounded to float32, or not
BATCHED = {"contrast_of_all", "halves"}  # what a Hessian says about its own micro-batches

GRIDS = {
    "symmetric": Grid(bits=4, granularity="tensor"),
    "unsigned": Grid(bits=4, granularity="channel", signed=False),
    "asymmetric": Grid(bits=4, granularity="channel", symmetric=False),
}
# What is counted does not depend on the kind of grid, only on whether channels are counted apart.
CALIBRATORS = {
    f"{name} {kind}": calibrator(
        name, GRIDS[kind], keep_histogram=True, **({"bins": 512} if "bins" in OPTIONS[name] else {})
    )
    for name, kind in each([name for name in OPTIONS if name != "moving-average"], list(GRIDS))
}
# How each is made, and how far its values may be from those of one pass, relative to the largest.
STATISTICS: Mapping[str, tuple[StatisticFactory, float]] = {
    "extremes": (MinMax, 0.0),
    "mean magnitude": (partial(ChannelMean, dtype=torch.float64), SINGLE),
    "norm": (ChannelNorm, DOUBLE),
    "mean": (partial(ChannelMean, absolute=False, dtype=torch.float64), SINGLE),
    "Hessian": (partial(Hessian, dtype=torch.float64), DOUBLE),
    "Hessian and drift": (partial(Hessian, dtype=torch.float64, reference=True), DOUBLE),
    "Hessian with a bias": (partial(AffineHessian, dtype=torch.float64, reference=True), DOUBLE),
    **{name: (make, 0.0) for name, make in CALIBRATORS.items()},
}
every_statistic = every("name", STATISTICS)


def tokens(seed: int = 0) -> Tensor:
    """Inputs with outlying channels, one that is never negative, one never positive and one that is never active."""
    x = torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(-3, 3, CHANNELS)
    x[:, 3] = x[:, 3].abs()
    x[:, 5] = -x[:, 5].abs() - 1
    x[:, 7] = 0
    return x


def batches(split: list[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tokens().split(split), tokens(1).split(split), strict=True))


def observed(name: str, seen: list[tuple[Tensor, Tensor]]) -> Any:
    statistic = STATISTICS[name][0](CHANNELS, CPU)
    for x, reference in seen:
        statistic.update(x, reference)
    return statistic


def values(result: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a result, by name."""
    if is_dataclass(result):
        yield from ((f.name, getattr(result, f.name)) for f in fields(result) if f.name not in BATCHED)
    else:
        yield from enumerate(result if isinstance(result, tuple) else (result,))


def same(name: str, result: Any, expected: Any, where: object) -> None:
    slack = STATISTICS[name][1]
    for (part, one), (_, other) in zip(values(result), values(expected), strict=True):
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype, (part, where)
            off = (one.double() - other.double()).abs().max() if slack else not torch.equal(one, other)
            assert off <= slack * (other.double().abs().max() if slack else 0), (part, where)
        else:
            assert one == pytest.approx(other, rel=slack or None) if isinstance(other, float) else one == other, part


@every_statistic
def test_batches_make_no_difference(name: str) -> None:
    expected = observed(name, batches([TOKENS])).result()
    for split in SPLITS:
        same(name, observed(name, batches(split)).result(), expected, split)


@every_statistic
def test_neither_their_order_nor_who_has_them_makes_a_difference(name: str) -> None:
    """Three ranks; in some cases one of them has nothing."""
    expected = observed(name, batches([TOKENS])).result()
    order = random.Random(0)
    for split in SPLITS:
        shares: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
        for batch in order.sample(batches(split), len(split)):
            shares[order.randrange(3)].append(batch)
        ranks = [observed(name, share) for share in shares]
        synced(ranks)
        for rank in ranks:
            same(name, rank.result(), expected, split)


@every_statistic
def test_a_sync_alone_changes_nothing(name: str) -> None:
    statistic = observed(name, batches([100, 103]))
    statistic.sync(Comm())
    same(name, statistic.result(), observed(name, batches([100, 103])).result(), "alone")


@every_statistic
def test_no_tokens_are_zeros(name: str) -> None:
    for seen in ([], [(tokens()[:0], tokens()[:0])]):
        for part, value in values(observed(name, seen).result()):
            if isinstance(value, Tensor) and part != "width":  # of a histogram's bins: the least there is
                assert not value.any(), part
            assert part != "tokens" or value == 0


@every_statistic
def test_a_value_that_is_not_finite_is_not_hidden(name: str) -> None:
    for bad in (float("nan"), float("inf")):
        x = tokens()
        x[11, 2] = bad
        statistic = observed(name, [(x[:100], tokens(1)[:100]), (x[100:], tokens(1)[100:])])
        try:
            found = [value for _, value in values(statistic.result()) if isinstance(value, Tensor)]
        except CompressError:
            continue
        assert any(not value.isfinite().all() for value in found), bad
