"""Weights of many layers ranked as one: the ranking of all scores in one list, from counts that add up."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build, tokens
from thread_ranks import TwoRanks
from torch import Tensor, nn

import compress
from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.weights.masks import pruned_before, share_of
from compress.weights.ranking import added, edge, histogram, lowest, proportional

few_values = st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1.0, 3.0, 65504.0, 3e38])


def zeros_of(model: nn.Module) -> dict[str, int]:
    return {n: int((p == 0).sum()) for n, p in model.named_parameters() if n.endswith("proj.weight")}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(few_values, min_size=1, max_size=12), min_size=1, max_size=4), st.data())
def test_each_layer_loses_what_a_list_of_all_scores_takes_of_it(layers: list[list[float]], data: st.DataObject) -> None:
    scores = {str(i): torch.tensor(values)[None] for i, values in enumerate(layers)}
    everything = torch.cat([score.flatten() for score in scores.values()]).sort().values
    pruned = data.draw(st.integers(1, len(everything)))
    counts, boundary = lowest({name: histogram(score, Comm()) for name, score in scores.items()}, pruned)
    last = float(everything[pruned - 1])
    assert sum(counts.values()) == pruned
    assert boundary.low <= last < boundary.high
    assert boundary.inside == sum(int((score == last).sum()) for score in scores.values())
    for name, score in scores.items():
        below, ties = int((score < last).sum()), int((score == last).sum())
        assert below <= counts[name] <= below + ties
        assert abs(counts[name] - below - ties * boundary.pruned / boundary.inside) < 1


def test_sixteen_bit_values_have_bins_of_their_own_and_others_a_thousandth_of_themselves() -> None:
    halves = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    assert histogram(halves[None], Comm()).counts.tolist() == [1] * len(halves)
    bfloats = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bfloats = bfloats[bfloats.isfinite()]
    assert histogram(bfloats[None], Comm()).counts.tolist() == [1] * len(bfloats)
    found = histogram(torch.rand(1, 1000, generator=torch.Generator().manual_seed(1)), Comm())
    for bin_ in found.bins.tolist():
        assert edge(bin_) < edge(bin_ + 1) <= edge(bin_) * (1 + 1 / 1024)


def test_histograms_of_parts_add_up() -> None:
    score = torch.randn(8, 50, generator=torch.Generator().manual_seed(2)).abs()
    whole = histogram(score, Comm())
    parts = added([histogram(part, Comm()) for part in score.split(3)])
    assert torch.equal(whole.bins, parts.bins)
    assert torch.equal(whole.counts, parts.counts)
    assert whole.size == 400


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


def test_magnitude_over_the_model_prunes_the_smallest_of_all_its_weights() -> None:
    model, whole = build("llama", torch.bfloat16), build("llama", torch.bfloat16)
    # One layer far smaller than the others, and one far larger.
    for each in (model, whole):
        each.model.layers[0].mlp.up_proj.weight.data *= 1e-4
        each.model.layers[1].mlp.down_proj.weight.data *= 1e4
    result = compress.quantize(model, compress.Magnitude(per="model", sparsity=0.6))
    names = [n for n in dict(model.named_parameters()) if n.endswith("proj.weight")]
    sizes = torch.cat([whole.get_parameter(n).data.abs().flatten() for n in names]).float()
    pruned = len(sizes) * 6 // 10
    threshold = sizes.sort().values[pruned - 1]
    assert sum(zeros_of(model).values()) == pruned
    for name in names:
        before, after = whole.get_parameter(name), model.get_parameter(name)
        assert not after[before.abs().float() < threshold].any()
        stays = before.abs().float() > threshold
        assert torch.equal(after[stays], before[stays])
    assert zeros_of(model)["model.layers.0.mlp.up_proj.weight"] == 32 * 64
    assert not zeros_of(model)["model.layers.1.mlp.down_proj.weight"]
    said = "\n".join(result.record.notes)
    assert f"{pruned} weights of 14 layers are ranked as one: scores below {float(threshold):.4g} become zero" in said
    assert "magnitude leaves nothing of model.layers.0.mlp.up_proj: all of its weights become zero" in said
    assert "0.0% (model.layers.1.mlp.down_proj) to 100.0% (model.layers.0.mlp.up_proj)" in said
    figures = {layer.name: layer.figures["sparsity"] for layer in result.record.layers}
    assert figures["model.layers.0.mlp.up_proj"] == 1


def test_wanda_over_the_model_compares_layers_by_their_inputs_as_they_are() -> None:
    """Scores of the original model, as loops find them, say how many weights each layer loses."""
    model, inputs = build("llama"), {}
    layers = {n: m for n, m in model.named_modules() if n.endswith("proj")}

    def note(name: str):
        return lambda module, args: inputs.setdefault(name, []).append(args[0].detach().flatten(0, 1).double())

    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    with torch.no_grad():
        model(input_ids=tokens(6))
    for hook in hooks:
        hook.remove()
    norms = {name: torch.cat(seen).square().sum(0).sqrt() for name, seen in inputs.items()}
    scores = {name: layer.weight.detach().double().abs() * norms[name] for name, layer in layers.items()}
    threshold = torch.cat([score.flatten() for score in scores.values()]).sort().values[18432 // 2]
    compress.quantize(model, compress.Wanda(per="model"), calibration=tokens(6))
    found = zeros_of(model)
    assert sum(found.values()) == 18432 // 2
    for name, score in scores.items():
        near = int(((score / threshold).log().abs() < 2 / 1024).sum())
        assert abs(found[f"{name}.weight"] - int((score < threshold).sum())) <= near
    assert len(set(found.values())) > 5


class Grouped(nn.Module):
    """A convolution of groups, and one without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Conv2d(8, 12, 3, groups=4, bias=False), nn.Conv2d(12, 6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def test_groups_of_a_convolution_are_ranked_with_everything_else() -> None:
    data = [{"x": torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(i))} for i in range(2)]
    for one in (compress.Magnitude(per="model"), compress.Wanda(per="model"), compress.Wanda(allocate="layer-loss")):
        model = Grouped()
        result = compress.quantize(model, one, calibration=data)
        zeros = sum(int((p == 0).sum()) for p in model.parameters())
        weights = sum(p.numel() for p in model.parameters())
        assert weights // 2 - 6 - 12 <= zeros <= weights // 2, one  # a group is decided about as a layer
        assert any(" of a layer zero" in note for note in result.record.notes), one


def test_ranking_by_the_model_and_shares_by_name_exclude_each_other() -> None:
    with pytest.raises(InputError, match="per model finds out how many zeros each layer has, and sparsities say it"):
        compress.Magnitude(per="model", sparsities=(("a", 0.5),))


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
