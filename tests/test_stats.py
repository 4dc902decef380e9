"""Calibration statistics: batches, their order and ranks make no difference."""

import pytest
import torch

from compress.comm import Comm
from compress.stats import ChannelAbsMax, ChannelMean, Hessian, MinMax

TOKENS, CHANNELS = 203, 24
CPU = torch.device("cpu")
SPLITS = [[203], [1, 202], [100, 3, 100], [0, 203, 0], [7] * 29, [200, 1, 1, 1]]


def tokens(dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Inputs with outlying channels, one that is never negative, one never positive and one that is never active."""
    x = torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x * torch.logspace(-3, 3, CHANNELS, dtype=torch.float64)
    x[:, 3] = x[:, 3].abs()
    x[:, 5] = -x[:, 5].abs() - 1
    x[:, 7] = 0
    return x.to(dtype)


def observed(statistic, x, split=None, reference=None):
    """The statistic after seeing x in batches of the sizes of `split`."""
    split = [len(x)] if split is None else split
    references = [None] * len(split) if reference is None else reference.split(split)
    for batch, reference_batch in zip(x.split(split), references, strict=True):
        statistic.update(batch, reference_batch)
    return statistic


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


class Recorder:
    """Stands for the other rank: notes what it offers to each collective."""

    def __init__(self) -> None:
        self.offers: list[tuple[torch.Tensor, str]] = []

    def all_reduce(self, tensor, reduction="sum"):
        self.offers.append((tensor.clone(), reduction))
        return tensor


class Merger:
    """Stands for this rank: reduces with what the other one offered, in the same order."""

    def __init__(self, recorder: Recorder) -> None:
        self.offers = list(recorder.offers)

    def all_reduce(self, tensor, reduction="sum"):
        other, theirs = self.offers.pop(0)
        assert theirs == reduction
        assert other.shape == tensor.shape
        assert other.dtype == tensor.dtype
        merge = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[reduction]
        return tensor.copy_(merge(tensor, other))


def merged(mine, other):
    """`mine` after a sync of two ranks that hold `mine` and `other`."""
    recorder = Recorder()
    other.sync(recorder)
    merger = Merger(recorder)
    mine.sync(merger)
    assert not merger.offers
    return mine


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_hessian_does_not_depend_on_the_batches(split):
    x, reference = tokens(), tokens(seed=1)
    result = observed(Hessian(CHANNELS, CPU, dtype=torch.float64, reference=True), x, split, reference).result()
    assert result.tokens == TOKENS
    assert result.hessian.dtype == torch.float64
    # Elementwise, against the size of the two channels: every product of channels counts, not the largest only.
    exact = x.t() @ x / TOKENS
    size = exact.diagonal().sqrt() + 1e-30
    assert ((result.hessian - exact) / size / size[:, None]).abs().max() < 1e-12
    assert relative(result.hessian, exact) < 1e-12
    assert relative(result.cross, reference.t() @ x / TOKENS) < 1e-12


def test_cross_term_has_the_reference_on_its_rows():
    x, reference = tokens()[:1], tokens(seed=1)[:1]
    result = observed(Hessian(CHANNELS, CPU, dtype=torch.float64, reference=True), x, None, reference).result()
    assert torch.equal(result.cross, torch.outer(reference[0], x[0]))
    assert not torch.allclose(result.cross, result.cross.t())


def test_hessian_without_reference_has_no_cross_term():
    assert observed(Hessian(CHANNELS, CPU), tokens(torch.float32)).result().cross is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hessian_of_16_bit_inputs_is_summed_in_float32(dtype):
    x = (tokens() / 1000).to(dtype)
    result = observed(Hessian(CHANNELS, CPU), x, [100, 103]).result()
    assert result.hessian.dtype == torch.float32
    exact = x.double().t() @ x.double() / TOKENS
    # 203 float32 additions of exact products; a sum in 16 bits would be off by 1e-3 and more.
    assert relative(result.hessian.double(), exact) < TOKENS * 2**-24


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes_are_bit_for_bit_those_of_one_pass(dtype, split):
    x = tokens(dtype)
    lowest, highest = observed(MinMax(CHANNELS, CPU), x, split).result()
    assert torch.equal(lowest, x.float().amin(0))
    assert torch.equal(highest, x.float().amax(0))
    assert lowest[3] >= 0 > highest[5]
    largest = observed(ChannelAbsMax(CHANNELS, CPU), x, split).result()
    assert largest.dtype == torch.float32
    assert torch.equal(largest, x.float().abs().amax(0))


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("absolute", [True, False])
def test_channel_mean_does_not_depend_on_the_batches(absolute, split):
    x = tokens()
    mean = observed(ChannelMean(CHANNELS, CPU, absolute=absolute, dtype=torch.float64), x, split).result()
    assert mean.dtype == torch.float32
    exact = (x.abs() if absolute else x).mean(0)
    assert ((mean - exact).abs() <= exact.abs() * 2**-23).all()
    assert mean[5] == pytest.approx(mean[5].abs() if absolute else -mean[5].abs())


def test_no_tokens_give_zeros_and_say_so():
    nothing = torch.zeros(0, CHANNELS)
    hessian = observed(Hessian(CHANNELS, CPU, reference=True), nothing, None, nothing).result()
    assert hessian.tokens == 0
    zeros = torch.zeros(CHANNELS)
    assert torch.equal(hessian.hessian, torch.zeros(CHANNELS, CHANNELS))
    assert torch.equal(hessian.cross, torch.zeros(CHANNELS, CHANNELS))
    assert torch.equal(observed(ChannelAbsMax(CHANNELS, CPU), nothing).result(), zeros)
    assert torch.equal(observed(ChannelMean(CHANNELS, CPU), nothing).result(), zeros)
    for extreme in observed(MinMax(CHANNELS, CPU), nothing).result():
        assert torch.equal(extreme, zeros)


def test_values_that_are_not_finite_are_not_hidden():
    x = tokens(torch.float32)
    x[11, 2], x[12, 4] = float("nan"), float("inf")
    lowest, highest = observed(MinMax(CHANNELS, CPU), x, [100, 103]).result()
    assert torch.isnan(lowest[2])
    assert torch.isnan(highest[2])
    assert torch.isinf(highest[4])
    assert torch.isnan(observed(ChannelAbsMax(CHANNELS, CPU), x, [100, 103]).result()[2])
    assert torch.isnan(observed(ChannelMean(CHANNELS, CPU), x, [100, 103]).result()[2])
    assert torch.isnan(observed(Hessian(CHANNELS, CPU), x, [100, 103]).result().hessian[2, 2])


@pytest.mark.parametrize("first", [0, 1, 77, TOKENS])
def test_sync_of_two_parts_equals_one_pass(first):
    x, reference = tokens(torch.float32), tokens(torch.float32, seed=1)
    parts = [(x[:first], reference[:first]), (x[first:], reference[first:])]

    def two(make):
        mine, other = (observed(make(), part, None, ref) for part, ref in parts)
        return merged(mine, other).result()

    def one(make):
        return observed(make(), x, None, reference).result()

    def hessian():
        return Hessian(CHANNELS, CPU, dtype=torch.float64, reference=True)

    together = two(hessian)
    assert together.tokens == TOKENS
    assert relative(together.hessian, one(hessian).hessian) < 1e-12
    assert relative(together.cross, one(hessian).cross) < 1e-12

    def absmax():
        return ChannelAbsMax(CHANNELS, CPU)

    assert torch.equal(two(absmax), one(absmax))

    def minmax():
        return MinMax(CHANNELS, CPU)

    for extreme, expected in zip(two(minmax), one(minmax), strict=True):
        assert torch.equal(extreme, expected)
    for absolute in (True, False):

        def mean(absolute=absolute):
            return ChannelMean(CHANNELS, CPU, absolute=absolute, dtype=torch.float64)

        assert torch.allclose(two(mean), one(mean), rtol=2**-22, atol=0)


def test_sync_of_one_process_changes_nothing():
    x = tokens(torch.float32)
    statistic = observed(Hessian(CHANNELS, CPU), x)
    before = statistic.result()
    statistic.sync(Comm())
    assert torch.equal(statistic.result().hessian, before.hessian)
    assert statistic.result().tokens == before.tokens
