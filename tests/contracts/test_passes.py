"""What holds for every pass that writes quantized weights. A new pass joins `PASSES` and gets all of it."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, dataclass, replace
from functools import cache
from threading import Barrier
from typing import ClassVar

import pytest
import torch
from combinations import each, every
from thread_ranks import TwoRanks
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.passes.awq import AWQ
from compress.passes.binary import Binary
from compress.passes.embeddings import Embeddings
from compress.passes.gptq import GPTQ
from compress.passes.k_quants import KQuants
from compress.passes.low_rank import LowRank
from compress.passes.lqs import LQS
from compress.passes.options.weight_format import WeightFormat
from compress.passes.protocol.base import Pass, but, only
from compress.passes.protocol.recipe import options_of
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Decide, Rewrite
from compress.passes.rtn import RTN
from compress.passes.spqr import SpQR
from compress.passes.ternary import Ternary
from compress.passes.trellis import Trellis
from compress.weights.decision import Decision
from compress.weights.formats.dense import dense
from compress.weights.grid import Quantized, quantize
from compress.weights.number_formats import SCHEMES
from compress.weights.scheme import parts_of

# One instance per pass, with the options that make it exact to repeat; the grid is set by each test.
PASSES: list[Pass] = [
    RTN(),
    RTN(clip=True),
    GPTQ(statistics="float64"),
    GPTQ(statistics="float64", drift=0.0, act_order="static"),
    Ternary(statistics="float64", packing="words"),
    Binary(statistics="float64"),
    AWQ(statistics="float64"),
    AWQ(statistics="float64", clip=False),
    RTN(outliers=0.03),
    GPTQ(statistics="float64", outliers=0.03),
    AWQ(statistics="float64", outliers=0.03),
    SpQR(statistics="float64"),
    SpQR(statistics="float64", threshold=0.2, act_order="none"),
    KQuants(statistics="float64", shrink=False),
    KQuants(scheme="q3_k", rounding="nearest"),
    Trellis(statistics="float64", scheme="w2a16", run=64),
    Embeddings(),
    LowRank(statistics="float64"),
    LowRank(statistics="float64", rank=5, factor_bits=8, outliers=0.05, iterations=1),
    LQS(statistics="float64", rank=3, iterations=1),
    LQS(statistics="float64", rank=2, factor_bits=8, outliers=0.05, iterations=2),
]
LAYOUTS = [
    {"scheme": "w2a16", "group_size": 16, "grid": "asymmetric"},
    {"scheme": "w3a16", "group_size": 32, "grid": "signed-scale"},
    {"scheme": "w4a16", "group_size": -1, "grid": "symmetric"},
    {"scheme": "w8a16", "group_size": 96, "grid": "narrow"},
    {"scheme": "mxfp4a16", "group_size": 32},
    {"scheme": "mxfp6e3m2a16", "group_size": 32},
]
COLUMNS, TOKENS = 96, 400
SUPER_BLOCK = 256
# An odd number of rows in all, and the border between two ranks inside a layer.
HEIGHTS = {"model.layers.0.self_attn.q_proj": 37, "model.layers.0.self_attn.k_proj": 8}
SCALE_DTYPES = dict(zip(HEIGHTS, (torch.bfloat16, torch.float16), strict=True))


def describe(value) -> str:
    if isinstance(value, Pass):
        return f"{value.name}{PASSES.index(value)}"
    return "-".join(str(v) for v in value.values())


ON_GRIDS = [one for one in PASSES if isinstance(one, WeightFormat)]
ON_LAYOUTS = each(PASSES, LAYOUTS)
# A number of a layer that all of its site share: a layer alone would have another.
SHARING = {"scheme": "nvfp4a16", "group_size": 16}
every_layout = every("layout", LAYOUTS)
every_pass_on_a_grid = every("one", ON_GRIDS)
every_pass_on_a_layout = pytest.mark.parametrize(("one", "layout"), ON_LAYOUTS, ids=describe)


def laid_out(one: Pass, layout: dict) -> Pass:
    """The pass with those options of a layout that it has; tiles have groups, and K-quants schemes of their own."""
    chosen = {key: value for key, value in layout.items() if key in options_of(type(one))}
    if isinstance(one, SpQR | Embeddings) and "scheme" in layout and SCHEMES[layout["scheme"]].of_levels:
        del chosen["scheme"]  # these take integers alone
    if isinstance(one, KQuants | Trellis):
        return one
    if isinstance(one, SpQR) and chosen.get("group_size") == -1:
        chosen["group_size"] = COLUMNS
    return replace(one, **chosen)


def columns_of(one: Pass) -> int:
    return SUPER_BLOCK if isinstance(one, KQuants) else COLUMNS


def make_weights(columns: int = COLUMNS) -> dict[str, Tensor]:
    """Float32, rows of different size, a few outliers."""
    generator = torch.Generator().manual_seed(11)
    weights = {}
    for name, rows in HEIGHTS.items():
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        weight = weight * (torch.randn(rows, 1, generator=generator) / 2).exp()
        weight[torch.rand(rows, columns, generator=generator) < 0.005] *= 6
        weights[name] = weight
    return weights


def make_inputs(columns: int = COLUMNS) -> Tensor:
    """Float64 tokens: channels mixed by a random matrix, of log-normal size."""
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(TOKENS, columns, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
    return x * torch.randn(columns, generator=generator, dtype=torch.float64).exp()


def make_site(one: Pass, weights: dict[str, Tensor], x: Tensor) -> Site:
    """The site as calibration would hand it over; the model before this layer is not compressed."""
    stats = {}
    for name, factory in one.needs().items():
        statistic = factory(x.shape[1], torch.device("cpu"))
        for batch in x.split(150):
            statistic.update(batch, batch if one.stage(Decide).reference else None)
        stats[name] = statistic.result()
    return Site(weights, stats, {name: SCALE_DTYPES[name] for name in weights}, Comm())


@cache
def decided(one: Pass) -> tuple[Site, dict[str, Decision]]:
    """A site and what a pass decides of it, for all tests that ask: neither is to be changed."""
    site = make_site(one, make_weights(columns_of(one)), make_inputs(columns_of(one)))
    return site, one.apply(site)


def same(a, b) -> bool:
    ours, theirs = parts_of(a), parts_of(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def codes_of(decision: Decision) -> Quantized:
    return decision.weight.terms[0]


def finite(decision: Decision) -> bool:
    return all(bool(torch.isfinite(t.float()).all()) for t in decision.parts().values() if t.is_floating_point())


@every(("one", "layout"), [(one, layout) for one, layout in ON_LAYOUTS if one in ON_GRIDS])
def test_decisions_have_the_shapes_and_dtypes_of_the_layer_and_its_grid(one, layout):
    one = laid_out(one, layout)
    weights, (_, decisions) = make_weights(), decided(laid_out(one, layout))
    assert set(decisions) == set(weights)
    for name, weight in weights.items():
        quantized, grid = codes_of(decisions[name]), codes_of(decisions[name]).grid
        assert grid == one.weight_grid()
        groups = 1 if layout["group_size"] < 0 else COLUMNS // layout["group_size"]
        assert quantized.codes.shape == weight.shape
        assert quantized.codes.dtype == grid.storage
        assert grid.qmin <= quantized.codes.int().min()
        assert quantized.codes.int().max() <= grid.qmax
        assert quantized.scale.shape == (len(weight), groups)
        assert quantized.scale.dtype == grid.scale_dtype(SCALE_DTYPES[name])
        assert torch.isfinite(quantized.scale).all()
        assert (quantized.zero_point is None) == one.weight_grid().symmetric
        if quantized.zero_point is not None:
            assert quantized.zero_point.shape == quantized.scale.shape
            assert quantized.zero_point.dtype == grid.storage
        assert decisions[name].weight.dequantize().shape == weight.shape


@every_pass_on_a_layout
def test_two_calls_decide_the_same_and_leave_their_inputs_alone(one, layout):
    one = laid_out(one, layout)
    site, first = decided(one)
    second = one.apply(site)
    for name, before in make_weights(columns_of(one)).items():
        assert torch.equal(site.weights[name], before)
        assert same(first[name].weight, second[name].weight)
        assert first[name].figures == second[name].figures


# A range searched without calibration serves the weights, not the outputs.
@every(
    ("one", "layout"),
    [(one, layout) for one, layout in ON_LAYOUTS if one in ON_GRIDS and (one.needs() or not one.clip)],
)
def test_output_error_is_at_most_that_of_round_to_nearest(one, layout):
    one = laid_out(one, layout)
    weights, x = make_weights(), make_inputs()
    hessian = x.t() @ x / len(x)
    # A bound that is not met by rounding, for the passes that know the inputs.
    share = 0.75 if one.needs() and one.stage(Rewrite) is None else 1.0
    for name, decision in decided(one)[1].items():
        weight = weights[name].double()
        nearest = quantize(weights[name], one.weight_grid().with_range("minmax"), SCALE_DTYPES[name])
        loss, nearest_loss = (
            torch.einsum("ni,ij,nj->", weight - q.dequantize(torch.float64), hessian, weight - q.dequantize().double())
            for q in (decision.weight, nearest)
        )
        assert loss <= share * nearest_loss


@every_pass_on_a_layout
def test_a_layer_is_decided_alone_as_with_its_neighbours(one, layout):
    one = laid_out(one, layout)
    site, together = decided(one)
    for name, weight in site.weights.items():
        assert same(one.apply(replace(site, weights={name: weight}))[name].weight, together[name].weight)


@every("one", [one for one in ON_GRIDS if not isinstance(one, Embeddings | SpQR | KQuants | Ternary | Binary)])
def test_layers_of_a_site_share_a_global_scale_whatever_their_rank_and_outliers(one):
    one = laid_out(one, SHARING)
    _, decisions = decided(one)
    weights = make_weights()
    reached = one.weight_grid().reaching(max(float(weight.abs().max()) for weight in weights.values()))
    assert reached.global_scale is not None
    assert reached.global_scale != 1
    assert {codes_of(decision).grid for decision in decisions.values()} == {reached}
    assert len({one.weight_grid().reaching(float(weight.abs().max())).global_scale for weight in weights.values()}) > 1
    for name, decision in decisions.items():
        assert finite(decision)
        assert (decision.weight.dequantize() - weights[name]).norm() < 0.3 * weights[name].norm()
    if not isinstance(one, LQS):  # gptq again, with a low rank beside it
        _same_by_two_ranks(one)


@every_pass_on_a_layout
def test_two_ranks_decide_what_one_decides(one, layout):
    _same_by_two_ranks(laid_out(one, layout))


def _same_by_two_ranks(one: Pass) -> None:
    site, expected = decided(one)
    desk, barrier = [None, None], Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        work = [threads.submit(one.apply, replace(site, comm=TwoRanks(rank, desk, barrier))) for rank in (0, 1)]
        ranks = [each.result() for each in work]
    for name, alone in expected.items():
        for decisions in ranks:
            assert same(decisions[name].weight, alone.weight)
            for key, figure in decisions[name].figures.items():
                other = alone.figures[key]
                assert figure == (other if isinstance(other, str) else pytest.approx(other, rel=1e-9)), key


@every_pass_on_a_layout
def test_zero_rows_and_dead_inputs_give_finite_decisions(one, layout):
    one = laid_out(one, layout)
    weights, x = make_weights(columns_of(one)), make_inputs(columns_of(one))
    first, last = HEIGHTS
    weights[first][3] = 0
    weights[last][:] = 0
    x[:, [0, 50, COLUMNS - 1]] = 0
    decisions = one.apply(make_site(one, weights, x))
    assert torch.all(decisions[first].weight.dequantize()[3] == 0)
    assert torch.all(decisions[last].weight.dequantize() == 0)
    for decision in decisions.values():
        assert torch.isfinite(decision.weight.dequantize()).all()
        assert finite(decision)
        assert all(math.isfinite(f) for f in decision.figures.values() if not isinstance(f, str))


@dataclass(frozen=True, kw_only=True)
class Half(Pass):
    """Halves weights, on no grid: what anybody may add."""

    name: ClassVar[str] = "half"
    keeps_zeros: ClassVar[bool] = True

    def apply(self, site: Site) -> dict[str, Decision]:
        return {name: Decision(dense(weight / 2)) for name, weight in site.weights.items()}


@every(("one", "layout"), each([*(o for o in PASSES if o.keeps_zeros), Half()], LAYOUTS))
def test_a_pass_that_keeps_zeros_keeps_those_of_an_earlier_mask(one, layout):
    one, x = laid_out(one, layout), make_inputs()
    before = make_weights()
    kept = {name: weight.abs() > weight.abs().median() for name, weight in before.items()}
    site = make_site(one, {name: weight * kept[name] for name, weight in before.items()}, x)
    decided = {name: Decision(dense(site.weights[name]), kept=kept[name]) for name in kept}
    for name, decision in one.apply(replace(site, decided=decided, before=before)).items():
        assert torch.all(decision.weight.dequantize()[~kept[name]] == 0)
        assert finite(decision)


@every(("one", "layout"), ON_LAYOUTS)
def test_figures_are_plain_numbers_or_words(one, layout):
    for decision in decided(laid_out(one, layout))[1].values():
        assert decision.figures
        assert all(type(figure) in (float, int, str) for figure in decision.figures.values())


@every("one", PASSES)
def test_configuration_is_frozen(one):
    with pytest.raises(FrozenInstanceError):
        one.scheme = "w2a16"


@every_pass_on_a_grid
def test_check_refuses_group_sizes_that_do_not_divide(one):
    shapes = {"model.a.q_proj": (64, 256), "model.a.down_proj": (64, 352), "model.b.down_proj": (64, 352)}
    with pytest.raises(InputError) as refused:
        replace(one, group_size=128).check(shapes)
    message = str(refused.value)
    assert "group size 128 does not divide the 352 inputs of model.a.down_proj (2 layers in all)" in message
    assert "q_proj" not in message
    assert "sizes that work: 16, 32, -1 " in message
    for size in (16, 32, -1):
        replace(one, group_size=size).check(shapes)
    per_tensor = {"refit": 0} if isinstance(one, GPTQ) else {}
    per_tensor |= {} if isinstance(one, Embeddings) else {"outliers": 0.0}
    laid_out(one, {"group_size": -1, "per_tensor": True, **per_tensor}).check(shapes)


NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.11.mlp.up_proj", "lm_head"]


@every(
    ("patterns", "matching"),
    [
        (["*.mlp.*"], [1, 2]),
        (["*.down_proj", "lm_head"], [1, 3]),
        (["model.layers.1.*"], []),
        (["model.layers.1?.*"], [2]),
        (["down_proj"], []),
        (["*.MLP.*"], []),
        (["*"], [0, 1, 2, 3]),
        ([], []),
    ],
)
@every("one", PASSES)
def test_only_and_but_select_layers_by_full_name(one, patterns, matching):
    chosen = [NAMES[i] for i in matching]
    assert [name for name in NAMES if one.wants(name)] == NAMES
    assert [name for name in NAMES if only(one, *patterns).wants(name)] == chosen
    assert [name for name in NAMES if but(one, *patterns).wants(name)] == [n for n in NAMES if n not in chosen]


@every("one", PASSES)
def test_combinators_nest_as_conditions_that_all_hold(one):
    nested = but(only(one, "*.mlp.*"), "*.down_proj")
    assert [name for name in NAMES if nested.wants(name)] == ["model.layers.11.mlp.up_proj"]
    assert [name for name in NAMES if only(but(one, "lm_head"), "lm_head").wants(name)] == []


@every_pass_on_a_layout
def test_combinators_are_their_inner_pass_in_everything_else(one, layout):
    one = laid_out(one, layout)
    site, expected = decided(one)
    for combined in (only(one, "*.mlp.*"), but(one, "*.mlp.*"), both := but(only(one, "*.mlp.*"), "*.down_proj")):
        assert (combined.reads, combined.writes) == (one.reads, one.writes) == ("dense weight", "quantized weight")
        assert combined.stage(Decide).reference == one.stage(Decide).reference
        assert set(combined.needs()) == set(one.needs())
        if isinstance(one, WeightFormat) and one.group_size > 0:
            with pytest.raises(InputError, match="does not divide"):
                combined.check({"a": (4, 40)})
    decisions = both.apply(site)
    assert set(decisions) == set(expected)
    assert all(same(decisions[name].weight, expected[name].weight) for name in expected)


@every_layout
def test_rounding_to_nearest_is_the_grid_and_its_figure_is_the_relative_error(layout):
    one, weights = RTN(**layout), make_weights()
    for name, decision in one.apply(make_site(one, weights, make_inputs())).items():
        assert same(decision.weight, quantize(weights[name], one.weight_grid(), SCALE_DTYPES[name]))
        weight = weights[name].double()
        error = (decision.weight.dequantize(torch.float64) - weight).norm() / weight.norm()
        assert decision.figures["weight_error"] == pytest.approx(error.item(), rel=1e-5)
