"""Weights of many layers ranked as one: the ranking of all scores in one list, from counts that add up."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import TwoRanks
from torch import Tensor, nn

import compress
from compress.base.collectives import Comm
from compress.weights.masks import pruned_before, share_of
from compress.weights.ranking import added, histogram, lowest, proportional

few_values = st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1.0, 3.0, 65504.0, 3e38])


def zeros_of(model: nn.Module) -> dict[str, int]:
    return {n: int((p == 0).sum()) for n, p in model.named_parameters() if n.endswith("proj.weight")}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(few_values, min_size=1, max_size=12), min_size=1, max_size=4), st.data())
def test_each_layer_loses_what_a_list_of_all_scores_takes_of_it(layers: list[list[float]], data: st.DataObject) -> None:
    scores = {str(i): torch.tensor(values)[None] for i, values in enumerate(layers)}
    everything = torch.cat([score.flatten() for score in scores.values()]).sort().values
    pruned = data.draw(st.integers(1, len(everything)))
    counts = lowest({name: histogram(score, Comm()) for name, score in scores.items()}, pruned)
    last = float(everything[pruned - 1])
    assert sum(counts.values()) == pruned
    for name, score in scores.items():
        below, ties = int((score < last).sum()), int((score == last).sum())
        assert below <= counts[name] <= below + ties


def test_sixteen_bit_values_have_bins_of_their_own() -> None:
    halves = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    assert histogram(halves[None], Comm()).counts.tolist() == [1] * len(halves)
    bfloats = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bfloats = bfloats[bfloats.isfinite()]
    assert histogram(bfloats[None], Comm()).counts.tolist() == [1] * len(bfloats)


def test_histograms_of_parts_add_up() -> None:
    score = torch.randn(8, 50, generator=torch.Generator().manual_seed(2)).abs()
    whole = histogram(score, Comm())
    parts = added([histogram(part, Comm()) for part in score.split(3)])
    assert torch.equal(whole.bins, parts.bins)
    assert torch.equal(whole.counts, parts.counts)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 100), st.integers(1, 10**6))
def test_parts_in_proportion_are_whole_and_shares_are_read_back(counts: list[int], percent: int, size: int) -> None:
    total = sum(counts) * percent // 100
    if sum(counts):
        found = proportional({str(i): count for i, count in enumerate(counts)}, total)
        assert sum(found.values()) == total
        assert all(abs(found[str(i)] - total * count / sum(counts)) < 1 for i, count in enumerate(counts))
    pruned = size * percent // 100
    assert pruned_before(size, share_of(pruned, size)) == pruned


class Grouped(nn.Module):
    """A convolution of groups, and one without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Conv2d(8, 12, 3, groups=4, bias=False), nn.Conv2d(12, 6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def test_groups_of_a_convolution_share_with_everything_else() -> None:
    data = [{"x": torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(i))} for i in range(2)]
    for one in (compress.Wanda(allocate="layer-loss"), compress.SparseGPT(allocate="layer-loss")):
        model = Grouped()
        result = compress.quantize(model, one, calibration=data)
        zeros = sum(int((p == 0).sum()) for p in model.parameters())
        weights = sum(p.numel() for p in model.parameters())
        assert weights // 2 - 6 - 12 <= zeros <= weights // 2, one  # a group is decided about as a layer
        assert any(" of a layer zero" in note for note in result.record.notes), one


def test_two_ranks_count_what_one_counts() -> None:
    score = torch.rand(7, 40, generator=torch.Generator().manual_seed(5))
    desk, barrier = [None, None], Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        ranks = [TwoRanks(rank, desk, barrier) for rank in (0, 1)]
        work = [threads.submit(histogram, score[comm.rows_of(7)], comm) for comm in ranks]
        found = [each.result() for each in work]
    alone = histogram(score, Comm())
    for one in found:
        assert torch.equal(one.bins, alone.bins)
        assert torch.equal(one.counts, alone.counts)
