"""Every method's mathematics from tensors alone, as a notebook calls it: the bits that the method itself decides."""

from collections.abc import Callable

import pytest
import torch
from published import assert_same_quantized, mean_square, realistic_layer
from torch import Tensor

import compress
from compress.base.collectives import Comm
from compress.passes.protocol.base import Pass
from compress.passes.protocol.sites import FoldSite, Reader, Site
from compress.solvers.awq import awq
from compress.solvers.binary import binary
from compress.solvers.gptq import gptq
from compress.solvers.hessian_with_drift import POLISH_DAMP
from compress.solvers.k_quants.solve import k_quant
from compress.solvers.low_rank import svd_llm
from compress.solvers.lqs import lqs
from compress.solvers.outliers import nearest
from compress.solvers.scores import magnitude, taylor, wanda
from compress.solvers.smoothquant import smoothquant
from compress.solvers.sparsegpt import sparsegpt
from compress.solvers.spqr import spqr
from compress.solvers.statistics.hessian import Hessian
from compress.solvers.statistics.input_statistics import ChannelMean, ChannelNorm, MinMax, TokenSample
from compress.solvers.trellis.solve import trellis
from compress.weights.decision import Decision
from compress.weights.grid import Grid
from compress.weights.masks import Choice, parse_pattern
from compress.weights.survivors import survivors

STORED = torch.bfloat16
WEIGHT, X = realistic_layer(48, 64, seed=5)
H = mean_square(X)
DAMPED = {"polish_damp": POLISH_DAMP + X.shape[1] / len(X)}  # as few tokens ask for
WIDE, WIDE_X = realistic_layer(8, 256, seed=6)
# The statistics are taken as they are: what they are worth, and drift, is asked outside of the mathematics.
AS_IS = {"drift": 0.0, "shrink": False, "statistics": "float64"}
CODES = {"scheme": "w3a16", "group_size": 16}


def decided(one: Pass, weight: Tensor = WEIGHT, x: Tensor = X) -> Decision:
    """What a pass decides for a layer, whose input it is shown in one micro-batch."""
    hessian, norm = Hessian(x.shape[1], x.device, dtype=torch.float64), ChannelNorm(x.shape[1], x.device)
    for statistic in (hessian, norm):
        statistic.update(x, None)
    stats = {"hessian": hessian.result(), "norm": norm.result()}
    assert torch.equal(stats["hessian"].hessian, mean_square(x))
    return one.apply(Site({"layer": weight}, stats, {"layer": STORED}, Comm()))["layer"]


def grid_of(one: Pass) -> Grid:
    return one.weight_grid()  # type: ignore[attr-defined]


GPTQS = {
    "as it is": {},
    "ordered": {"act_order": "group", "clip": False},
    "static": {"act_order": "static", "outliers": 0.02},
    "the paper": {"refit": 0, "sweeps": 0, "clip": False, "grid": "asymmetric", "damp": 0.05},
}


@pytest.mark.parametrize("name", list(GPTQS))
def test_gptq(name):
    one = compress.GPTQ(**CODES, **AS_IS, **GPTQS[name])
    how = {key: getattr(one, key) for key in ("damp", "act_order", "refit", "sweeps", "outliers")}
    found, method = gptq(WEIGHT, H, grid=grid_of(one), scale_dtype=STORED, **DAMPED, **how).weight, decided(one).weight
    if one.outliers:
        found, method = found.terms, method.terms
        assert torch.equal(found[1].dequantize(), method[1].dequantize())
        found, method = found[0], method[0]
    assert_same_quantized(found, method)


def rtn() -> tuple[Tensor, Pass]:
    one = compress.RTN(**CODES, outliers=0.01)
    return nearest(WEIGHT, grid_of(one), STORED, 0.01).dequantize(), one


def ternary() -> tuple[Tensor, Pass]:
    one = compress.Ternary(group_size=16, **AS_IS)
    return gptq(WEIGHT, H, grid=grid_of(one), refit=2, sweeps=2, scale_dtype=STORED, **DAMPED).weight.dequantize(), one


def of_signs() -> tuple[Tensor, Pass]:
    one = compress.Binary(group_size=16, **AS_IS)
    found = binary(WEIGHT, H, group_size=16, refit=2, sweeps=2, scale_dtype=STORED, **DAMPED)
    return found.dequantize(), one


def tiles() -> tuple[Tensor, Pass]:
    one = compress.SpQR(outliers=0.02, **AS_IS)
    how = {"act_order": "group", "outliers": 0.02, "refit": 1, "sweeps": 2}
    return spqr(WEIGHT, H, format_=one.tiles, scale_dtype=STORED, **DAMPED, **how).weight.dequantize(), one


def tiles_of_the_paper() -> tuple[Tensor, Pass]:
    paper = {"threshold": 0.2, "damp": 1.0, "act_order": "none", "search": False, "refit": 0, "sweeps": 0}
    one = compress.SpQR(**AS_IS, **paper)
    return spqr(WEIGHT, H, format_=one.tiles, scale_dtype=STORED, **paper).weight.dequantize(), one


def paths() -> tuple[Tensor, Pass]:
    one = compress.Trellis(scheme="w2a16", **AS_IS)
    how = {"act_order": "static", "refit": 2, "sweeps": 1}
    return trellis(
        WEIGHT, H, format_=one.format(WEIGHT.shape[1]), scale_dtype=STORED, **DAMPED, **how
    ).weight.dequantize(), one


def beside_each_other() -> tuple[Tensor, Pass]:
    one = compress.LQS(**CODES, **AS_IS, rank=3, iterations=2, outliers=0.01)
    how = {"rank": 3, "iterations": 2, "outliers": 0.01, "refit": 2, "sweeps": 2}
    return lqs(WEIGHT, H, grid=grid_of(one), scale_dtype=STORED, **DAMPED, **how).weight.dequantize(), one


def low_rank() -> tuple[Tensor, Pass]:
    one = compress.LowRank(rank=5, outliers=0.02, iterations=2, **AS_IS)
    return svd_llm(WEIGHT, H, rank=5, outliers=0.02, iterations=2, scale_dtype=STORED)[0].dequantize(), one


def two_of_four() -> tuple[Tensor, Pass]:
    how = Choice(parse_pattern("2:4"), 0.5, together=False)
    found = sparsegpt(WEIGHT, H, how=how, scale_dtype=STORED, **DAMPED)
    return found.dequantize(), compress.SparseGPT(pattern="2:4", **AS_IS)


def by_size() -> tuple[Tensor, Pass]:
    kept = Choice(None, 0.5, together=False).kept(magnitude(WEIGHT), None)
    return survivors(WEIGHT, kept, STORED).values, compress.Magnitude(sparsity=0.5)


def by_products() -> tuple[Tensor, Pass]:
    kept = Choice(None, 0.5, together=False).kept(wanda(WEIGHT, X.float().norm(dim=0)), None)
    return survivors(WEIGHT, kept, STORED).values, compress.Wanda(sparsity=0.5)


@pytest.mark.parametrize(
    "made",
    [
        rtn,
        ternary,
        of_signs,
        tiles,
        tiles_of_the_paper,
        paths,
        beside_each_other,
        low_rank,
        two_of_four,
        by_size,
        by_products,
    ],
)
def test_a_method_decides_what_its_mathematics_finds(made: Callable[[], tuple[Tensor, Pass]]):
    found, one = made()
    weight = decided(one).weight
    assert torch.equal(found, weight.dequantize(found.dtype))
    assert not torch.equal(found, WEIGHT.to(found.dtype))


@pytest.mark.parametrize("scheme", ["q3_k", "q4_k", "iq4_xs"])
def test_super_blocks(scheme: str):
    one = compress.KQuants(scheme=scheme, **AS_IS)
    how = {"refit": 2, "sweeps": 2, "polish_damp": POLISH_DAMP + WIDE_X.shape[1] / len(WIDE_X)}
    found = k_quant(WIDE, mean_square(WIDE_X), format_=one.format, **how)
    assert torch.equal(found.weight.blocks, decided(one, WIDE, WIDE_X).weight.blocks)


def test_scales_of_a_fold():
    x, weight = X.float(), WEIGHT.float()
    stats = {}
    for name, statistic in (
        ("extremes", MinMax(x.shape[1], x.device)),
        ("mean", ChannelMean(x.shape[1], x.device)),
        ("hessian", Hessian(x.shape[1], x.device)),
        ("sample", TokenSample(x.shape[1], x.device, per_batch=len(x))),
    ):
        statistic.update(x, None)
        stats[name] = statistic.result()
    reader = Reader(weight, stats, torch.arange(x.shape[1]), STORED)
    site = FoldSite({"layer": reader}, x.shape[1], Comm())

    one = compress.AWQ(**CODES)
    scale_K, power, share = awq(weight, stats["hessian"].hessian, stats["mean"], grid=grid_of(one), scale_dtype=STORED)
    made = one.scaling(site)
    assert torch.equal(made.scale_C, scale_K)
    assert made.figures == {"power": power, "loss": share}
    assert share < 1

    other = compress.SmoothQuant()
    grids = {"grid": grid_of(other), "input_grid": other.input_grid()}
    scale_K, alpha, share = smoothquant(stats["sample"], weight, **grids)
    made = other.scaling(site)
    assert torch.equal(made.scale_C, scale_K)
    assert made.figures == {"alpha": alpha, "loss": share}
    assert share < 1


def test_taylor_is_the_first_order_change():
    gradient = torch.randn_like(WEIGHT)
    assert torch.equal(taylor(WEIGHT, gradient), (WEIGHT * gradient) ** 2)
