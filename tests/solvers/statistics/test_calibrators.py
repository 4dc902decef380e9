"""Calibrators: every method against its definition in loops; batches, their order and ranks make no difference."""

import math
import os
import subprocess
import sys
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from calibrator_worker import CHANNELS, calibrated, micro_batches
from combinations import each, every
from hypothesis import given, settings
from places import RANKS, ROOT, SUPPORT
from scipy.stats import entropy
from thread_ranks import synced

from compress.base.collectives import Comm
from compress.base.errors import CompressError, InputError
from compress.solvers.statistics.calibrators import OPTIONS, calibrator, scale_and_zero_point
from compress.solvers.statistics.clipping import bin_values, bounds, mse_bins, squared_errors, widest_of_least
from compress.solvers.statistics.entropy import _Prefix
from compress.solvers.statistics.histogram import (
    MagnitudeHistogram,
    fold_sides,
    in_order,
    merge_bins,
    merged_edge,
    pool,
    used_bins,
)
from compress.solvers.statistics.observers import Range
from compress.weights.grid import Grid, decode, encode, quantize

CPU = torch.device("cpu")
TOKENS, BINS, COLUMNS = 400, 512, 38
KINDS = {
    "symmetric": {},
    "narrow": {"narrow": True},
    "unsigned": {"signed": False},
    "asymmetric": {"symmetric": False},
    "asymmetric unsigned": {"symmetric": False, "signed": False},
}
SEARCHES = ["percentile", "mse", "kl"]
examples = settings(deadline=None, max_examples=25, derandomize=True)


def make_grid(kind: str, bits: int = 4, granularity: str = "channel") -> Grid:
    return Grid(bits=bits, granularity=granularity, **KINDS[kind])


# --- data ----------------------------------------------------------------------------------------------------------


def random_columns(count: int = 28) -> np.ndarray:
    """[M, count] float32 of several families and magnitudes 1e-5 to 1e5."""
    random = np.random.default_rng(0)
    columns = []
    for i in range(count):
        x = random.standard_normal(TOKENS)
        style = i % 7
        if style == 1:
            x = np.abs(x)
        elif style == 2:
            x = -(np.abs(x) ** 2)
        elif style == 3:
            x = x**3
        elif style == 4:
            x = np.maximum(x, 0)
        elif style == 5:
            x = random.standard_t(1.5, TOKENS)
        elif style == 6:
            x = random.uniform(-0.17, 3, TOKENS)
        columns.append(x * 10.0 ** random.uniform(-5, 5))
    return np.stack(columns, 1).astype(np.float32)


def pathological() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    normal = random.standard_normal(TOKENS)
    outliers = normal.copy()
    outliers[[3, 50]] = 1000.0, -700.0
    spike = np.where(random.uniform(size=TOKENS) < 0.9, 0.0, normal)
    return {
        "spike at zero": spike,
        "one-sided": np.maximum(normal, 0) + 1,
        "heavy outliers": outliers,
        "constant": np.full(TOKENS, -2.5),
        "all zeros": np.zeros(TOKENS),
        "two clusters": np.where(normal > 0, 8, -3) + normal / 50,
        "single value": np.where(np.arange(TOKENS) == 7, 3.0, 0.0),
        "uniform": np.linspace(-1, 1, TOKENS),
        "subnormal": normal * 1e-42,
        "huge": normal * 1e38 / np.abs(normal).max() * 3.4,
    }


@cache
def columns() -> torch.Tensor:
    """[M, COLUMNS] float32: four of every family, then the pathological ones."""
    hard = np.stack(list(pathological().values()), 1).astype(np.float32)
    return torch.from_numpy(np.concatenate([random_columns(), hard], 1))


def found_by(name: str, grid: Grid, x: torch.Tensor, split: list[int] | None = None, **options) -> Range:
    statistic = calibrator(name, grid, **options)(x.shape[1], CPU)
    for part in x.split(split or [len(x)]):
        statistic.update(part, None)
    return statistic.result()


def same(a: Range, b: Range) -> None:
    for field in fields(Range):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), field.name
        else:
            assert one == other, field.name


# --- the definitions, in loops -------------------------------------------------------------------------------------


def reference_histogram(x: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(counts of negative values, of the others, width of a bin)."""
    exponent = max(math.frexp(float(np.abs(x).max()))[1] if x.any() else -10000, -127 + int(math.log2(bins)))
    width = 2.0**exponent / bins
    negative, positive = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    for value in x.astype(np.float64):
        side = negative if value < 0 else positive
        side[int(abs(value) / width)] += 1
    return negative, positive, width


def last_filled(counts: np.ndarray) -> int:
    """Number of bins up to the last that is not empty."""
    return 0 if not counts.any() else int(np.nonzero(counts)[0][-1]) + 1


def reference_bounds(below: int, above: int, width: float, x: np.ndarray, grid: Grid) -> tuple[float, float]:
    lowest, highest = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    if not grid.symmetric:
        return max(lowest, -below * width), min(highest, above * width)
    if not grid.signed:
        return 0.0, min(highest, above * width)
    largest = min(max(-lowest, highest), above * width)
    return -largest, largest


def one_side(negative: np.ndarray, positive: np.ndarray, grid: Grid) -> np.ndarray:
    """What a symmetric range looks at."""
    if grid.signed:
        return negative + positive
    side = positive.copy()
    side[0] += negative.sum()
    return side


def reference_percentile(x: np.ndarray, grid: Grid, bins: int, outside_of: int = 10000) -> tuple[float, float]:
    """At most one value in `outside_of` lies outside."""
    negative, positive, width = reference_histogram(x, bins)

    def keep(side: np.ndarray, allowed: int) -> int:
        for t in range(bins + 1):
            if side[t:].sum() <= allowed:
                return t
        raise AssertionError

    if grid.symmetric:
        t = keep(one_side(negative, positive, grid), len(x) // outside_of)
        return reference_bounds(t, t, width, x, grid)
    allowed = len(x) // (2 * outside_of)
    return reference_bounds(keep(negative, allowed), keep(positive, allowed), width, x, grid)


def reference_quantize(v: np.ndarray, lo: float, hi: float, grid: Grid) -> np.ndarray:
    levels = 2**grid.bits
    least, most = (-levels // 2, levels // 2 - 1) if grid.signed else (0, levels - 1)
    least += int(grid.narrow and grid.signed)
    if not grid.symmetric:
        scale = (hi - lo) / (most - least)
    elif not grid.signed:
        scale = hi / most
    else:
        scale = hi / (levels / 2 - 1) if grid.narrow else hi / (levels / 2 - 0.5)
    info = np.finfo(np.float32)
    scale = float(np.float32(min(max(scale, float(info.tiny)), float(info.max))))
    zero = 0.0 if grid.symmetric else float(np.clip(np.round(least - lo / scale), least, most))
    return (np.clip(np.round(v / scale) + zero, least, most) - zero) * scale


def reference_mse(x: np.ndarray, grid: Grid, bins: int) -> tuple[float, float]:
    negative, positive, width = reference_histogram(x, bins)
    counts = np.concatenate([negative[::-1], positive])
    places = np.array([[j + 0.5 - 1 / math.sqrt(12), j + 0.5 + 1 / math.sqrt(12)] for j in range(-bins, bins)])
    places[bins] = 0
    values = np.clip(places * width, min(float(x.min()), 0.0), max(float(x.max()), 0.0))

    def shrunk(n: int) -> list[int]:
        return [-(-n * int(2**20 * 2 ** (-k / 16)) // 2**20) for k in range(128)]

    def best(pairs: list[tuple[int, int]], least: int) -> tuple[int, int]:
        errors = []
        for below, above in pairs:
            if below + above < least:
                errors.append(math.inf)
                continue
            quantized = reference_quantize(values, *reference_bounds(below, above, width, x, grid), grid)
            errors.append(float((counts[:, None] / 2 * (quantized - values) ** 2).sum()))
        return next(p for p, e in zip(pairs, errors, strict=True) if e <= min(errors) * (1 + 1e-9))

    if grid.symmetric:
        n = last_filled(one_side(negative, positive, grid))
        pairs = [(t if grid.signed else 0, t) for t in shrunk(n)]
        return reference_bounds(*best(pairs, min(2**grid.bits, sum(pairs[0]))), width, x, grid)
    lower, upper = shrunk(last_filled(negative)), shrunk(last_filled(positive))
    least = min(2**grid.bits, lower[0] + upper[0])
    kept = best(list(zip(lower, upper, strict=True)), least)
    for _ in range(2):
        kept = best([(kept[0], t) for t in upper], least)
        kept = best([(t, kept[1]) for t in lower], least)
    return reference_bounds(*kept, width, x, grid)


def reference_divergence(axis: np.ndarray, start: int, length: int, levels: int, ruler: bool) -> float:
    """KL(P || Q) of the window; by scipy where it is the ruler."""
    window = axis[start : start + length].astype(np.float64)
    p = window.copy()
    p[0] += axis[:start].sum()
    p[-1] += axis[start + length :].sum()
    level = np.arange(length) * levels // length
    q = np.zeros(length)
    for one in range(levels) if ruler else ():
        inside = (level == one) & (window > 0)
        if inside.any():
            q[inside] = window[inside].sum() / inside.sum()
    if ruler:
        return float(entropy(p, q)) if q.any() else math.inf
    filled = np.bincount(level, window > 0, levels)
    q = np.where(window > 0, (np.bincount(level, window, levels) / np.maximum(filled, 1))[level], 0.0)
    if ((p > 0) & (q == 0)).any() or not q.any():
        return math.inf
    p, q = p[p > 0] / p.sum(), q[p > 0] / q.sum()
    return float((p * np.log(p / q)).sum())


def reference_kl(x: np.ndarray, grid: Grid, bins: int, zero_bin: str = "neighbour") -> tuple[float, float]:
    negative, positive, width = reference_histogram(x, bins)
    if grid.symmetric:
        axis, zero, levels = one_side(negative, positive, grid), 0, 2 ** (grid.bits - int(grid.signed))
        below, above = 0, last_filled(axis)
    else:
        axis, zero, levels = np.concatenate([negative[::-1], positive]), bins, 2**grid.bits
        below, above = last_filled(negative), last_filled(positive)
    if zero_bin == "neighbour":
        axis = axis.copy()
        axis[zero] = axis[zero + 1]
    n = below + above
    losses = {
        i: reference_divergence(axis, zero - below * i // n, i, levels, ruler=False) for i in range(levels, n + 1)
    }
    least = min(losses.values(), default=math.inf)
    kept = n if least == math.inf else max(i for i, loss in losses.items() if loss <= least + 1e-9)
    kept_below = below * kept // max(n, 1)
    return reference_bounds(kept_below, kept - kept_below, width, x, grid)


REFERENCE = {"percentile": reference_percentile, "mse": reference_mse, "kl": reference_kl}


def check_columns(x: torch.Tensor, found: Range, expected: list[tuple[float, float]]) -> None:
    lo, hi = np.array(expected).T.astype(np.float32)
    for i in range(x.shape[1]):
        assert (found.lo[i].item(), found.hi[i].item()) == (lo[i], hi[i]), i


@every("kind", KINDS)
@every("name", SEARCHES)
def test_ranges_are_those_of_the_definition(name, kind):
    x = columns()[:, [*range(7), *range(28, COLUMNS)]]  # one of every family, and the pathological ones
    grid = make_grid(kind)
    found = found_by(name, grid, x, bins=BINS)
    check_columns(x, found, [REFERENCE[name](column.numpy(), grid, BINS) for column in x.T])


@every("kind", ["symmetric", "asymmetric"])
@every("name", SEARCHES)
def test_ranges_of_eight_bits_and_2048_bins(name, kind):
    x = columns()[:, [0, 4, 28, 30]]
    grid = make_grid(kind, bits=8)
    found = found_by(name, grid, x)
    check_columns(x, found, [REFERENCE[name](column.numpy(), grid, 2048) for column in x.T])


@every("kind", ["symmetric", "asymmetric"])
def test_the_zero_bin_can_be_kept(kind):
    x = columns()[:, 28:]
    found = found_by("kl", make_grid(kind), x, bins=BINS, zero_bin="keep")
    check_columns(x, found, [reference_kl(c.numpy(), make_grid(kind), BINS, zero_bin="keep") for c in x.T])


def test_a_spike_at_zero_decides_only_if_it_is_kept():
    x = torch.randn(20000, 1, generator=torch.Generator().manual_seed(0))
    spiked = torch.cat([x, torch.zeros(200000, 1)])
    grid = Grid(bits=8, granularity="tensor")
    plain = found_by("kl", grid, x).hi
    assert torch.equal(found_by("kl", grid, spiked).hi, plain)
    assert not torch.equal(found_by("kl", grid, spiked, zero_bin="keep").hi, plain)


def test_a_spike_at_zero_does_not_decide_the_squared_error():
    x = torch.randn(20000, 1, generator=torch.Generator().manual_seed(0)) ** 3
    spiked = torch.cat([x, torch.zeros(2000000, 1)])
    for kind in KINDS:
        grid = make_grid(kind, 8, "tensor")
        one, other = (found_by("mse", grid, data, bins=512) for data in (x, spiked))
        assert torch.equal(one.lo, other.lo)
        assert torch.equal(one.hi, other.hi)
        assert one.hi < x.abs().max()


@every("levels", [8, 16])
def test_divergences_are_those_of_scipy(levels):
    worst, infinite = 0.0, 0
    for column in columns()[:, [0, 3, 6, 28, 30, 33, 35]].T:
        negative, positive, _ = reference_histogram(column.numpy(), 64)
        axis = np.concatenate([negative[::-1], positive])
        below, n = last_filled(negative), last_filled(negative) + last_filled(positive)
        lengths = torch.arange(levels, n + 1)
        start = 64 - below * lengths // n
        rows = torch.zeros_like(lengths)
        found = _Prefix(torch.from_numpy(axis)[None]).divergence(rows, start, lengths, levels)
        for s, length, loss in zip(start.tolist(), lengths.tolist(), found.tolist(), strict=True):
            for ruler in (True, False):
                expected = reference_divergence(axis, s, length, levels, ruler)
                assert math.isinf(expected) == math.isinf(loss)
                infinite += math.isinf(expected)
                worst = max(worst, 0.0 if math.isinf(expected) else abs(expected - loss))
    assert worst < 1e-12
    assert infinite


def test_of_equal_losses_the_widest_wins():
    losses = torch.tensor([[3.0, 1.0, 1.0], [1.0, 2.0, 1.0], [math.inf, 2.0, 2.0 - 1e-6]]).double()
    losses[0, 1] += 1e-12
    choices = torch.tensor([[30, 20, 10]]).expand(3, -1)
    assert widest_of_least(losses, choices, 1e-9).tolist() == [20, 30, 10]


def test_mse_tries_no_step_that_is_narrower_than_a_bin():
    """Of 20 million normal values and one of 30, eight bits would rather keep 5: steps of 0.04, where bins are 0.06."""
    x = torch.randn(20000, 1, generator=torch.Generator().manual_seed(0))
    x[0] = 30
    kept = {}
    for bins in (512, 4096):
        histogram = MagnitudeHistogram(1, CPU, bins)
        histogram.update(x, x.abs().amax(0))
        counts = torch.where(histogram.counts > 0, histogram.counts * 1000, 0)
        counts[0, 1, 30 * bins // 32] = 1
        below, above = mse_bins(counts, histogram.width, x.amin(0), x.amax(0), make_grid("symmetric", 8, "tensor"))[0]
        assert below == above
        kept[bins] = above.item()
    assert 128 <= kept[512] <= 128 * 2 ** (1 / 16)
    assert 128 < kept[4096] < 4096 * 6 / 32


# --- exactness over batches, orders and ranks ----------------------------------------------------------------------


def together(shares: list[list[torch.Tensor]], make) -> list[Range | CompressError]:
    """What every rank finds from its share of the micro-batches."""
    ranks = [make() for _ in shares]
    for statistic, share in zip(ranks, shares, strict=True):
        for part in share:
            statistic.update(part, None)
    synced(ranks)
    found: list[Range | CompressError] = []
    for statistic in ranks:
        try:
            found.append(statistic.result())
        except CompressError as error:
            found.append(error)
    return found


SPLITS = [[TOKENS], [1, TOKENS - 1], [100, 0, 200, 100], [57] * 7 + [1]]


@every("granularity", ["tensor", "channel"])
@every("split", SPLITS)
def test_moving_average_of_three_ranks_is_that_of_one_process(split, granularity):
    x = columns()[:, ::4]
    for kind in KINDS:
        grid = make_grid(kind, granularity=granularity)
        make = calibrator("moving-average", grid, momentum=0.3, keep_histogram=True)
        one = make(x.shape[1], CPU)
        parts = list(x.split(split))
        for part in parts:
            one.update(part, None)
        expected = one.result()
        for found in together([parts[r::3] for r in range(3)], lambda: make(x.shape[1], CPU)):  # noqa: B023
            same(found, expected)
        one.sync(Comm())
        same(one.result(), expected)


def test_moving_average_is_the_recurrence():
    grid = make_grid("asymmetric", granularity="tensor")
    batches = [torch.tensor([[-1.0, 4.0]]), torch.zeros(0, 2), torch.tensor([[-3.0, 2.0]]), torch.tensor([[1.0, 8.0]])]
    statistic = calibrator("moving-average", grid, momentum=0.5)(2, CPU)
    for batch in batches:
        statistic.update(batch, None)
    found = statistic.result()
    assert (found.lo.item(), found.hi.item()) == (-0.5, 5.5)  # -1, -2, -.5 and 4, 3, 5.5
    assert (found.lowest.item(), found.highest.item(), found.tokens) == (-3, 8, 3)


@pytest.mark.dist
def test_two_processes_find_what_one_does(tmp_path: Path):
    worker = RANKS / "calibrator_worker.py"
    here = f"{SUPPORT}{os.pathsep}{ROOT}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    command = [sys.executable, str(worker), str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(r), "2"], env=environment, stderr=subprocess.PIPE, text=True) for r in range(2)
    ]
    for rank in ranks:
        _, problem = rank.communicate(timeout=120)
        assert rank.returncode == 0, problem[-3000:]
    expected = calibrated(Comm(), micro_batches())
    for r in range(2):
        for one, found in zip(expected, torch.load(tmp_path / f"found-{r}.pt"), strict=True):
            same(Range(**found), one)
        assert "non-finite values (micro-batches with them: 1)" in (tmp_path / f"error-{r}.txt").read_text()
    assert expected[0].tokens == sum(map(len, micro_batches()))
    assert expected[0].lo.shape == (1,)
    assert expected[-1].lo.shape == (CHANNELS,)


# --- the histogram -------------------------------------------------------------------------------------------------


def test_bins_are_half_open_and_mirror_each_other():
    edges = torch.arange(1, 512) / 512  # each the first value of its bin
    histogram = MagnitudeHistogram(1, CPU, 512)
    histogram.update(torch.cat([edges, -edges])[:, None], torch.tensor([511 / 512]))
    assert histogram.width.item() == 1 / 512
    assert histogram.counts[0].tolist() == [[0] + [1] * 511] * 2
    below = torch.nextafter(edges, torch.zeros(()))
    histogram.update(below[:, None], below.amax(0, keepdim=True))
    assert histogram.counts[0, 1].tolist() == [1] + [2] * 510 + [1]


def test_a_value_that_is_a_power_of_two_needs_the_next_range():
    histogram = MagnitudeHistogram(2, CPU, 512)
    histogram.update(torch.tensor([[1.0, -0.0]]), torch.tensor([1.0, 0.0]))
    assert histogram.width[0].item() == 2 / 512
    assert histogram.counts[0, 1].nonzero().item() == 256
    assert histogram.counts[1, 1, 0] == 1  # -0 is zero, which is not negative


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
@examples
def test_a_histogram_grows_exactly(values, cuts):
    x = torch.tensor(values, dtype=torch.float32)[:, None]
    negative, positive, width = reference_histogram(x.numpy()[:, 0], 512)
    places = [0, *sorted(min(c, len(x)) for c in cuts), len(x)]
    histogram = MagnitudeHistogram(1, CPU, 512)
    for first, last in pairwise(places):
        if last > first:
            histogram.update(x[first:last], x[first:last].abs().amax(0))
    assert histogram.width.item() == width
    assert histogram.counts[0, 0].tolist() == negative.tolist()
    assert histogram.counts[0, 1].tolist() == positive.tolist()


def test_many_values_are_counted_in_pieces(monkeypatch):
    x = columns()
    whole, pieces = MagnitudeHistogram(COLUMNS, CPU, 512), MagnitudeHistogram(COLUMNS, CPU, 512)
    whole.update(x, x.abs().amax(0))
    monkeypatch.setattr("compress.solvers.statistics.histogram.CHUNK", 700)
    pieces.update(x, x.abs().amax(0))
    assert torch.equal(whole.counts, pieces.counts)
    assert whole.counts.sum() == x.numel()


@every("bins", [512, 2048])
def test_a_histogram_merges_to_a_sixteenth_of_every_magnitude(bins):
    values = columns()[:, [5, 0, 30]].flatten()
    histogram = MagnitudeHistogram(1, CPU, bins)
    histogram.update(values[:, None], values.abs().max()[None])
    width = histogram.width.item()
    edges = [*range(16), *(k << octave for octave in range(bins.bit_length() - 5) for k in range(16, 32)), bins]
    assert [merged_edge(i) for i in range(len(edges))] == edges
    for side, x in zip(merge_bins(histogram.counts[0]), (-values[values < 0], values[values >= 0]), strict=True):
        places = np.searchsorted(np.array(edges) * width, x.double().numpy(), side="right") - 1
        assert side == np.bincount(places).tolist()
    assert merge_bins(torch.zeros(2, bins, dtype=torch.int64)) == ([], [])


def test_rows_of_different_widths_are_counted_together():
    x = columns()[:, ::7]
    rows, one = MagnitudeHistogram(x.shape[1], CPU, BINS), MagnitudeHistogram(1, CPU, BINS)
    rows.update(x, x.abs().amax(0))
    one.update(x, x.abs().amax()[None])
    counts, width = pool(rows.counts, rows.width)
    assert torch.equal(counts, one.counts[0])
    assert width == one.width.item()


@cache
def reference_histograms(bins: int) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Of every column; no calibrator and no grid changes them."""
    return [reference_histogram(column, bins) for column in columns().T.numpy()]


@every(("name", "kind"), each(list(OPTIONS), list(KINDS)))
def test_a_kept_histogram_is_of_all_values_and_changes_no_range(name, kind):
    x = columns()
    split = [100, 300]
    kept, plain = (found_by(name, make_grid(kind), x, split, keep_histogram=keep) for keep in (True, False))
    assert plain.counts is None
    for field in ("lo", "hi", "lowest", "highest", "tokens", "method"):
        one, other = getattr(kept, field), getattr(plain, field)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert plain.clipped is None or torch.equal(kept.clipped, plain.clipped)
    for i, (negative, positive, width) in enumerate(reference_histograms(2048)):
        assert kept.width[i].item() == width
        assert np.array_equal(kept.counts[i], [negative, positive])


@every("kind", KINDS)
@every("name", ["minmax", "moving-average"])
def test_what_a_range_clips_is_counted_in_whole_bins(name, kind):
    """Exactly where the bounds are the extremes; else at most the two bins that hold the bounds are not counted."""
    x = columns()
    found = found_by(name, make_grid(kind), x, [100, 300], keep_histogram=True)
    outside = ((x < found.lo) | (x > found.hi)).double().mean(0)
    if name == "minmax":
        assert torch.allclose(found.clipped.double(), outside, atol=1e-7)
        assert bool(found.clipped.any()) == (kind == "unsigned")
        return
    assert (found.clipped <= outside + 1e-6).all()
    places = {bound: (value.abs() / found.width).floor() for bound, value in (("lo", found.lo), ("hi", found.hi))}
    held = [((x.abs() / found.width).floor() == place).double().mean(0) for place in places.values()]
    assert (found.clipped >= outside - held[0] - held[1] - 1e-6).all()
    assert (found.clipped > 0).sum() > 10


# --- what every range is -------------------------------------------------------------------------------------------


@every("kind", KINDS)
@every("name", OPTIONS)
def test_a_range_holds_zero_and_lies_in_the_observed_one(name, kind):
    x = columns()
    grid = make_grid(kind)
    found = found_by(name, grid, x, **({"bins": BINS} if name in SEARCHES else {}))
    assert found.lo.dtype == found.hi.dtype == torch.float32
    assert found.method == name
    assert found.tokens == TOKENS
    assert torch.equal(found.lowest, x.amin(0))
    assert torch.equal(found.highest, x.amax(0))
    assert ((found.lo <= 0) & (found.hi >= 0)).all()
    assert (found.hi <= x.abs().amax(0)).all()
    if grid.symmetric:
        assert torch.equal(found.lo, -found.hi if grid.signed else torch.zeros(COLUMNS))
        assert not torch.signbit(found.lo[found.lo == 0]).any()
    else:
        assert (found.lo >= x.amin(0).clamp(max=0)).all()
        assert (found.hi <= x.amax(0).clamp(min=0)).all()
    if name in SEARCHES:
        outside = ((x < found.lo) | (x > found.hi)).float().mean(0)
        on_bound = ((x == found.lo) | (x == found.hi)).float().mean(0)
        assert (found.clipped >= outside - 1e-6).all()
        assert (found.clipped <= outside + on_bound + 1e-6).all()


@every("kind", KINDS)
@every("name", OPTIONS)
def test_per_channel_is_per_tensor_on_each_channel(name, kind):
    x = columns()[:, ::7]
    options = {"bins": BINS} if name in SEARCHES else {}
    split = [100, 300]
    together = found_by(name, make_grid(kind), x, split, **options)
    for i, column in enumerate(x.T):
        one = found_by(name, make_grid(kind, granularity="tensor"), column[:, None], split, **options)
        assert (one.lo.item(), one.hi.item()) == (together.lo[i].item(), together.hi[i].item())
        assert together.clipped is None or one.clipped is None or one.clipped.item() == together.clipped[i].item()


@every("name", OPTIONS)
def test_per_tensor_is_all_channels_in_one(name):
    x = columns()[:, 28:34]
    grid = make_grid("asymmetric", granularity="tensor")
    same_but_tokens = [found_by(name, grid, x), found_by(name, grid, x.reshape(-1, 1))]
    assert torch.equal(same_but_tokens[0].lo, same_but_tokens[1].lo)
    assert torch.equal(same_but_tokens[0].hi, same_but_tokens[1].hi)
    assert same_but_tokens[0].lo.shape == (1,)


@every("dtype", [torch.bfloat16, torch.float16, torch.float64])
@every("name", OPTIONS)
def test_inputs_of_any_dtype_count_as_float32(name, dtype):
    x = (columns()[:, ::9] / columns()[:, ::9].abs().amax(0).clamp(min=1e-30)).to(dtype)
    same(found_by(name, make_grid("symmetric"), x), found_by(name, make_grid("symmetric"), x.float()))


@every("kind", KINDS)
@every("bits", [2, 4, 8])
def test_mse_is_never_worse_than_minmax_on_its_own_criterion(kind, bits):
    x = columns()
    grid = make_grid(kind, bits)
    found = found_by("mse", grid, x, bins=BINS, keep_histogram=True)
    counts = found.counts
    every = (
        used_bins(counts) if not grid.symmetric else used_bins(fold_sides(counts, grid.signed))[:, None].expand(-1, 2)
    )
    full = bounds(every[:, 0], every[:, 1], found.width, found.lowest, found.highest, grid)
    values = bin_values(found.lowest, found.highest, found.width, BINS)
    lo = torch.stack([found.lo.double(), full[0]], 1)
    hi = torch.stack([found.hi.double(), full[1]], 1)
    mine, widest = squared_errors(in_order(counts), values, lo, hi, torch.ones_like(lo).bool(), grid).unbind(1)
    assert (mine <= widest * (1 + 1e-6)).all()
    if bits < 8:  # and the choice is one: of normal data, four bits clip
        assert (mine < 0.9 * widest).sum() >= 5


@given(
    bits=st.integers(2, 8), kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 1000), power=st.integers(-60, 60)
)
@examples
def test_a_range_scales_with_the_data(bits, kind, seed, power):
    """By a power of two every bin stays what it was."""
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(seed)) ** 3
    for name in OPTIONS:
        one, other = (found_by(name, make_grid(kind, bits), x * s, [20, 30]) for s in (1.0, 2.0**power))
        assert torch.equal(one.hi * 2.0**power, other.hi)
        assert torch.equal(one.lo * 2.0**power, other.lo)


@given(bits=st.integers(2, 8), kind=st.sampled_from(["symmetric", "narrow"]), seed=st.integers(0, 1000))
@examples
def test_a_symmetric_range_does_not_depend_on_the_sign(bits, kind, seed):
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(seed)) ** 3
    for name in ("minmax", "percentile", "kl"):
        same_hi = [found_by(name, make_grid(kind, bits), s * x).hi for s in (1, -1)]
        assert torch.equal(*same_hi)


def test_percentile_keeps_what_it_says():
    x = torch.randn(100000, 1, generator=torch.Generator().manual_seed(0))
    for kind, percentile in [("symmetric", 99.0), ("asymmetric", 99.0), ("asymmetric", 99.99), ("symmetric", 60)]:
        found = found_by("percentile", make_grid(kind, granularity="tensor"), x, percentile=percentile)
        outside = ((x < found.lo) | (x > found.hi)).float().mean().item()
        assert outside == pytest.approx(found.clipped.item(), abs=1e-7)
        assert 1 - percentile / 100 - 0.004 < outside <= 1 - percentile / 100
        if kind == "asymmetric":
            tails = [(x < found.lo).float().mean().item(), (x > found.hi).float().mean().item()]
            assert max(tails) <= (1 - percentile / 100) / 2 + 1e-9
    whole = found_by("percentile", make_grid("asymmetric"), columns(), percentile=100)
    assert torch.equal(whole.lo, columns().amin(0).clamp(max=0))
    assert torch.equal(whole.hi, columns().amax(0).clamp(min=0))


@every("kind", KINDS)
@every("name", OPTIONS)
def test_nothing_seen_and_only_zeros_give_an_empty_range(name, kind):
    for x in (torch.zeros(0, 3), torch.zeros(5, 3)):
        found = found_by(name, make_grid(kind), x)
        for value in (found.lo, found.hi, found.lowest, found.highest):
            assert torch.equal(value, torch.zeros(3))
        assert found.tokens == len(x)
        scale, zero = scale_and_zero_point(found, make_grid(kind))
        assert (scale > 0).all()
        zeros = torch.zeros(1, 3)
        codes = encode(zeros, scale, zero, make_grid(kind))
        assert torch.equal(decode(codes, scale, zero, torch.float32), zeros)


@every("name", OPTIONS)
def test_a_zero_has_no_sign(name):
    found = found_by(name, make_grid("asymmetric"), torch.tensor([[-0.0, 0.0], [0.0, -0.0]]), [1, 1])
    for value in (found.lo, found.hi, found.lowest, found.highest):
        assert not torch.signbit(value).any()


@every("damage", [math.nan, math.inf, -math.inf])
@every("name", OPTIONS)
def test_values_that_are_not_finite_are_refused_on_every_rank(name, damage):
    good, bad = torch.ones(4, 2), torch.ones(4, 2)
    bad[1, 1] = damage
    found = together([[good], [good, bad], []], lambda: calibrator(name, make_grid("symmetric"))(2, CPU))
    assert [type(f) for f in found] == [CompressError] * 3
    assert "non-finite" in str(found[0])


def test_large_float64_values_are_not_finite_in_float32():
    with pytest.raises(CompressError, match="non-finite"):
        found_by("minmax", make_grid("symmetric"), torch.full((1, 1), 1e300, dtype=torch.float64))


# --- scales --------------------------------------------------------------------------------------------------------


@every("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every("kind", KINDS)
def test_the_scale_of_minmax_is_the_grids_own(kind, dtype):
    x = random_columns(12)
    rows = torch.from_numpy(x / np.abs(x).max(0))
    if kind == "unsigned":
        rows = rows.abs()
    found = found_by("minmax", make_grid(kind, 8), rows)
    scale, zero = scale_and_zero_point(found, make_grid(kind, 8), dtype)
    own = quantize(rows.t(), make_grid(kind, 8), dtype)
    # The grid's own fit divides in float32, this in float64: the scale may differ in its last place.
    assert torch.allclose(scale, own.scale[:, 0].float(), rtol=torch.finfo(dtype).eps)
    if own.zero_point is not None:
        assert torch.equal(zero, own.zero_point[:, 0].float())
    codes = encode(rows, scale, zero, make_grid(kind, 8))
    off = (decode(codes, scale, zero, torch.float32) - rows).abs()
    assert (off <= 1.01 * scale).all()


def test_the_scale_of_the_largest_numbers_is_finite():
    x = torch.tensor([[3.4e38], [-3.4e38]])
    found = found_by("minmax", make_grid("asymmetric", 8), x)
    scale, _ = scale_and_zero_point(found, make_grid("asymmetric", 8))
    assert scale.item() == pytest.approx(6.8e38 / 255)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "grid", "options", "message"),
    [
        ("percentil", {}, {}, "unknown calibrator 'percentil'; did you mean 'percentile'"),
        ("percentile", {}, {"percentil": 99}, "unknown option of percentile 'percentil'; did you mean"),
        ("minmax", {}, {"bins": 2048}, "unknown option of minmax 'bins'; allowed: keep_histogram"),
        ("mse", {}, {"momentum": 0.1}, "unknown option of mse 'momentum'; allowed: bins, keep_histogram"),
        ("percentile", {}, {"percentile": 0.9999}, r"is 0\.9999; allowed: a number above 50, up to 100"),
        ("percentile", {}, {"percentile": math.nan}, "is nan; allowed"),
        ("percentile", {}, {"percentile": True}, "is True; allowed"),
        ("moving-average", {}, {"momentum": 0}, "is 0; allowed: a number above 0, up to 1"),
        ("kl", {}, {"bins": 1000}, "is 1000; allowed: powers of two from 512 to 65536"),
        ("kl", {}, {"bins": 256}, "is 256; allowed"),
        ("kl", {}, {"bins": 2048.0}, r"is 2048\.0; allowed"),
        ("kl", {}, {"zero_bin": "drop"}, "is 'drop'; allowed: 'neighbour' or 'keep'"),
        ("mse", {}, {"keep_histogram": 1}, "is 1; allowed: True or False"),
        ("minmax", {"granularity": "token"}, {}, "granularity 'token' of a calibrated range; allowed: tensor, channel"),
        ("minmax", {"granularity": "group", "group_size": 8}, {}, "granularity 'group'"),
        ("minmax", {"signed_scale": True}, {}, "a signed scale for a calibrated range"),
        ("mse", {"range_choice": "mse"}, {}, "range choice 'mse' beside a calibrator"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(name, grid, options, message):
    with pytest.raises(InputError, match=message) as caught:
        calibrator(name, Grid(bits=8, **grid), **options)
    assert "\n" not in str(caught.value)
