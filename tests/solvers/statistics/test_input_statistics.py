"""Calibration statistics: what each is (`tests/contracts/test_statistics.py` has what holds for all)."""

import pytest
import torch
from combinations import every
from thread_ranks import synced

from compress.solvers.statistics.hessian import FEW, Hessian
from compress.solvers.statistics.input_statistics import ChannelMean, MinMax

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


def merged(mine, other):
    """`mine` after a sync of two ranks that hold `mine` and `other`."""
    synced([mine, other])
    return mine


@every("split", SPLITS)
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
    assert relative(result.drift, (reference - x).t() @ x / TOKENS) < 1e-12
    assert result.shrinkage == pytest.approx(published_shrinkage(x), rel=1e-9)


def published_shrinkage(x: torch.Tensor) -> float:
    """Schaefer and Strimmer 2005, table 2, target D, about zero; every product of every pair of channels."""
    products = torch.einsum("mi,mj->mij", x, x)
    variance = products.var(0) / len(x)
    off = ~torch.eye(x.shape[1], dtype=torch.bool)
    return min(1.0, (variance[off].sum() / products.mean(0)[off].square().sum()).item())


def mixed(count: int = TOKENS, seed: int = 3) -> torch.Tensor:
    """Inputs without a mean, mixed by a random matrix."""
    generator = torch.Generator().manual_seed(seed)
    mixing, x = (torch.randn(n, CHANNELS, generator=generator, dtype=torch.float64) for n in (CHANNELS, count))
    return x @ mixing


def test_shrinkage_is_that_of_the_paper_and_falls_with_the_tokens():
    found = []
    for count in (2, 8, 40, TOKENS):
        x = mixed(count)
        result = observed(Hessian(CHANNELS, CPU, dtype=torch.float64), x).result()
        assert result.shrinkage == pytest.approx(published_shrinkage(x), rel=1e-9)
        shrunk, off = result.shrunk().hessian, ~torch.eye(CHANNELS, dtype=torch.bool)
        assert torch.equal(shrunk.diagonal(), result.hessian.diagonal())
        assert torch.allclose(shrunk[off], result.hessian[off] * (1 - result.shrinkage), rtol=1e-12)
        found.append(result.shrinkage)
    assert found == sorted(found, reverse=True)
    assert found[1] > 0.5
    assert found[-1] < 0.2


def test_shrinking_brings_the_hessian_closer_to_that_of_all_tokens():
    x = mixed(40 * TOKENS)
    whole, result = x.t() @ x / len(x), observed(Hessian(CHANNELS, CPU, dtype=torch.float64), x[:16]).result()
    assert (result.shrunk().hessian - whole).norm() < 0.8 * (result.hessian - whole).norm()


def test_one_token_says_nothing_about_pairs_of_channels():
    result = observed(Hessian(CHANNELS, CPU), tokens()[:1]).result()
    assert result.shrinkage == 1
    assert torch.equal(result.shrunk().hessian, torch.diag(result.hessian.diagonal()))


def test_shrinkage_of_inputs_whose_fourth_power_is_beyond_float32():
    plain, large = (observed(Hessian(CHANNELS, CPU), (mixed(20) * c).float()).result().shrinkage for c in (1, 1e12))
    assert 0 < plain < 1
    assert large == pytest.approx(plain, rel=1e-3)


def test_contrast_compares_the_halves_of_micro_batches():
    x, reference = mixed(), mixed(seed=4)
    result = observed(Hessian(CHANNELS, CPU, dtype=torch.float64, reference=True), x, [100, 103], reference).result()
    first = torch.tensor([i < 50 or 100 <= i < 151 for i in range(TOKENS)])
    means = [(reference[part] - x[part]).t() @ x[part] / len(x[part]) for part in (first, ~first)]
    assert relative(result.contrast, (means[0] - means[1]) * (101 * 102) ** 0.5 / TOKENS) < 1e-12
    alone = observed(Hessian(CHANNELS, CPU, reference=True), x, [1] * TOKENS, reference).result()
    assert alone.contrast is None


def test_contrast_has_the_noise_of_the_drift_and_not_its_signal():
    x = mixed()
    noise = torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def sizes(reference):
        statistic = Hessian(CHANNELS, CPU, dtype=torch.float64, reference=True)
        result = observed(statistic, x, [100, 103], reference).result()
        return result.drift.norm().item(), result.contrast.norm().item()

    drift, contrast = sizes(x + noise)
    assert contrast == pytest.approx(drift, rel=0.2)
    drift, contrast = sizes(2 * x)
    assert contrast < 0.3 * drift


def test_drift_has_the_reference_on_its_rows():
    x, reference = tokens()[:1], tokens(seed=1)[:1]
    result = observed(Hessian(CHANNELS, CPU, dtype=torch.float64, reference=True), x, None, reference).result()
    assert torch.equal(result.drift, torch.outer(reference[0] - x[0], x[0]))
    assert not torch.allclose(result.drift, result.drift.t())


def test_hessian_without_reference_has_no_drift():
    result = observed(Hessian(CHANNELS, CPU), tokens(torch.float32)).result()
    assert result.drift is None
    assert result.contrast is None


@every("dtype", [torch.bfloat16, torch.float16])
def test_hessian_of_16_bit_inputs_is_summed_in_float32(dtype):
    x = (tokens() / 1000).to(dtype)
    result = observed(Hessian(CHANNELS, CPU), x, [100, 103]).result()
    assert result.hessian.dtype == torch.float32
    exact = x.double().t() @ x.double() / TOKENS
    # 203 float32 additions of exact products; a sum in 16 bits would be off by 1e-3 and more.
    assert relative(result.hessian.double(), exact) < TOKENS * 2**-24


@every("split", SPLITS)
@every("dtype", [torch.float32, torch.bfloat16])
def test_extremes_are_bit_for_bit_those_of_one_pass(dtype, split):
    x = tokens(dtype)
    lowest, highest = observed(MinMax(CHANNELS, CPU), x, split).result()
    assert torch.equal(lowest, x.float().amin(0))
    assert torch.equal(highest, x.float().amax(0))
    assert lowest[3] >= 0 > highest[5]


@every("split", SPLITS)
@every("absolute", [True, False])
def test_channel_mean_does_not_depend_on_the_batches(absolute, split):
    x = tokens()
    mean = observed(ChannelMean(CHANNELS, CPU, absolute=absolute, dtype=torch.float64), x, split).result()
    assert mean.dtype == torch.float32
    exact = (x.abs() if absolute else x).mean(0)
    assert ((mean - exact).abs() <= exact.abs() * 2**-23).all()
    assert mean[5] == pytest.approx(mean[5].abs() if absolute else -mean[5].abs())


def test_a_hessian_of_no_tokens_says_so():
    nothing = torch.zeros(0, CHANNELS)
    hessian = observed(Hessian(CHANNELS, CPU, reference=True), nothing, None, nothing).result()
    assert hessian.tokens == 0
    assert torch.equal(hessian.hessian, torch.zeros(CHANNELS, CHANNELS))
    assert torch.equal(hessian.drift, torch.zeros(CHANNELS, CHANNELS))
    assert hessian.shrinkage == 0
    assert hessian.contrast is None


@every("count", [0, 1, 2, 61, FEW * CHANNELS - 1, FEW * CHANNELS])
def test_few_tokens_come_in_two_halves_of_every_batch_however_they_are_split_over_ranks(count):
    x, reference = tokens()[:count], tokens(seed=1)[:count]
    parts = [slice(0, count // 3), slice(count // 3, count)]

    def hessian(*batches):
        statistic = Hessian(CHANNELS, CPU, dtype=torch.float64, reference=True)
        for batch in batches:
            statistic.update(x[batch], reference[batch])
        return statistic

    alone = hessian(*parts).result()
    for result in (alone, merged(hessian(parts[0]), hessian(parts[1])).result()):
        assert result.few == (count < FEW * CHANNELS)
        if not result.few or count < 2:
            assert result.halves == ()
            continue
        rows = [list(range(count))[part] for part in parts]
        first = [i for part in rows for i in part[: len(part) // 2]]
        second = sorted(set(range(count)) - set(first))
        for half, members in zip(result.halves, (first, second), strict=True):
            expected = observed(
                Hessian(CHANNELS, CPU, dtype=torch.float64, reference=True), x[members], None, reference[members]
            ).result()
            assert half.tokens == len(members)
            # The second half is a difference, exact for channels of the size of the largest.
            assert relative(half.hessian, expected.hessian) < 1e-12
            assert relative(half.drift, expected.drift) < 1e-12
            assert half.shrinkage == pytest.approx(expected.shrinkage, abs=1e-9)
            assert torch.equal(half.contrast, result.contrast * (count / len(members)) ** 0.5)
