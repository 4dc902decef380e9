"""GPTQ as published, small layers to try it on, and how decisions are compared.

`published_gptq` is algorithm 1 of arXiv 2210.17323, column by column in float64, written from the paper and sharing no
code with `compress`. The paper's lazy batches are left out: they change the order of the arithmetic only.
"""

import torch
from places import GOLDEN
from torch import Tensor

from compress.base.collectives import Comm
from compress.passes.protocol.sites import Site
from compress.solvers.statistics.hessian import Hessian, HessianResult
from compress.weights.grid import Grid, Quantized

STORED = GOLDEN / "gptq.safetensors"
# Stored settings (tests/golden/make_gptq.py): name -> (grid, bits, group size, act_order). Scales are float16.
GOLDEN_SETTINGS = {
    "asymmetric_w3_g16": ("asymmetric", 3, 16, "none"),
    "signed_scale_w4_g8": ("signed-scale", 4, 8, "group"),
}
DAMP = 0.01
GRIDS = {
    "asymmetric": {"symmetric": False},
    "symmetric": {},
    "narrow": {"narrow": True},
    "signed-scale": {"signed_scale": True},
}


def make_grid(name: str, bits: int, group_size: int, clip: bool = False) -> Grid:
    return Grid(
        bits=bits,
        granularity="group" if group_size > 0 else "channel",
        group_size=group_size if group_size > 0 else None,
        range_choice="mse" if clip else "minmax",
        **GRIDS[name],
    )


def realistic_layer(rows: int, columns: int, seed: int, tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """(weight [N, K], inputs [tokens, K]) in float64: inputs mixed by a random matrix, channels of log-normal size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(3 * columns if tokens is None else tokens, columns) @ normal(columns, columns) / columns**0.5
    x = x * normal(columns).exp()
    return normal(rows, columns) * (normal(rows, 1) / 2).exp() / columns**0.5, x


def mean_square(x: Tensor) -> Tensor:
    return x.t() @ x / len(x)


def row_losses(error_NK: Tensor, hessian_KK: Tensor) -> Tensor:
    return torch.einsum("ni,ij,nj->n", error_NK, hessian_KK, error_NK)


def published_range(lo: Tensor, hi: Tensor, grid: str, bits: int, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, zero) of ranges [N]; codes run from 0, and `zero` is the code of the value 0."""
    half, top = 2 ** (bits - 1), 2**bits - 1
    absmax = torch.maximum(-lo, hi)
    if grid == "asymmetric":
        scale = ((hi - lo) / top).to(stored).double()
        return scale, torch.round(-lo / scale).clamp(0, top)
    if grid == "symmetric":
        scale = 2 * absmax / top
    elif grid == "narrow":
        scale = absmax / (half - 1)
    else:
        scale = torch.where(hi == absmax, -hi, -lo) / half
    return scale.to(stored).double(), torch.full_like(scale, half)


def published_value(w: Tensor, scale: Tensor, zero: Tensor, grid: str, bits: int, stored: torch.dtype):
    """(code, value) of the grid point nearest w, the value as the stored dtype holds it."""
    code = (torch.round(w / scale) + zero).clamp(1 if grid == "narrow" else 0, 2**bits - 1)
    return code, ((code - zero) * scale).to(stored).double()


def published_scale(
    w_Ng: Tensor, grid: str, bits: int, stored: torch.dtype, importance_g: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Min-max, or with `importance` a search over 40 ranges for the least squared error, weighted per member."""
    lo, hi = w_Ng.amin(1).clamp(max=0), w_Ng.amax(1).clamp(min=0)
    if importance_g is None:
        return published_range(lo, hi, grid, bits, stored)
    found = []
    for step in range(40):
        shrink = 1 - step / 50
        scale, zero = published_range(shrink * lo, shrink * hi, grid, bits, stored)
        value = published_value(w_Ng, scale[:, None], zero[:, None], grid, bits, stored)[1]
        found.append((((value - w_Ng).square() * importance_g).sum(1), scale, zero))
    errors, scales, zeros = (torch.stack(each) for each in zip(*found, strict=True))
    best = errors.argmin(0, keepdim=True)
    return scales.gather(0, best)[0], zeros.gather(0, best)[0]


def published_order(diagonal: Tensor, act_order: str, group_size: int) -> list[int]:
    """none: as they are. static: by falling diagonal. group: so inside each group, and groups by their largest."""
    columns, value = list(range(len(diagonal))), diagonal.tolist()
    if act_order == "none":
        return columns
    if act_order == "static":
        return sorted(columns, key=lambda j: -value[j])
    groups = [columns[first : first + group_size] for first in range(0, len(columns), group_size)]
    groups = [sorted(group, key=lambda j: -value[j]) for group in groups]
    return [j for group in sorted(groups, key=lambda group: -value[group[0]]) for j in group]


def published_gptq(
    weight: Tensor,
    hessian: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    act_order: str = "none",
    stored: torch.dtype = torch.float32,
    clip: bool = False,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [N, K] from 0, scale [N, G], zero [N, G]) of float64 weight and Hessian, for scales of dtype `stored`.

    kept: weights that are not become 0 when their column's turn comes, as in SparseGPT (arXiv 2301.00774, algorithm 1).
    """
    rows, columns = weight.shape
    group_size = columns if group_size < 0 else group_size
    order = published_order(hessian.diagonal(), act_order, group_size)
    w, h = weight[:, order].clone(), hessian[order][:, order]
    alive = torch.ones_like(weight) if kept is None else kept.to(weight.dtype)
    live = alive[:, order]
    importance = h.diagonal() if clip else None
    scale = torch.zeros(rows, columns // group_size, dtype=torch.float64)
    zero = torch.zeros_like(scale)
    if act_order == "static":
        for g in range(columns // group_size):
            members = slice(g * group_size, (g + 1) * group_size)
            weights = hessian.diagonal()[members] if clip else None
            scale[:, g], zero[:, g] = published_scale((weight * alive)[:, members], grid, bits, stored, weights)
    inverse = torch.linalg.inv(h + DAMP * h.diagonal().mean() * torch.eye(columns, dtype=torch.float64))
    upper = torch.linalg.cholesky(inverse, upper=True)
    codes = torch.zeros_like(w)
    for j in range(columns):
        g = order[j] // group_size
        if act_order != "static" and j % group_size == 0:
            members = slice(j, j + group_size)
            weights = None if importance is None else importance[members]
            scale[:, g], zero[:, g] = published_scale((w * live)[:, members], grid, bits, stored, weights)
        code, value = published_value(w[:, j], scale[:, g], zero[:, g], grid, bits, stored)
        codes[:, order[j]], value = torch.where(live[:, j] > 0, code, zero[:, g]), value * live[:, j]
        error = (w[:, j] - value) / upper[j, j]
        w[:, j:] -= error[:, None] * upper[j, j:]
    return codes, scale, zero


def assert_same_decisions(quantized: Quantized, published: tuple[Tensor, Tensor, Tensor], bits: int) -> None:
    codes, scale, zero = published
    half = 2 ** (bits - 1)
    assert torch.equal(quantized.codes.double() + half, codes)
    assert torch.equal(quantized.scale.double(), scale)
    if quantized.zero_point is not None:
        assert torch.equal(quantized.zero_point.double() + half, zero)


def seen(x: Tensor, reference: Tensor | None = None, batch: int = 100) -> HessianResult:
    """The statistics of an input in micro-batches of `batch` tokens."""
    statistic = Hessian(x.shape[1], torch.device("cpu"), dtype=x.dtype, reference=reference is not None)
    for first in range(0, len(x), batch):
        part = slice(first, first + batch)
        statistic.update(x[part], None if reference is None else reference[part])
    return statistic.result()


def make_site(
    weights: dict[str, Tensor],
    x: Tensor,
    reference: Tensor | None = None,
    dtypes: dict[str, torch.dtype] | None = None,
    statistics: torch.dtype = torch.float64,
    batch: int = 100,
) -> Site:
    hessian = seen(x.to(statistics), None if reference is None else reference.to(statistics), batch)
    scale_dtypes = dict.fromkeys(weights, torch.bfloat16) if dtypes is None else dtypes
    return Site(weights, {"hessian": hessian}, scale_dtypes, Comm())


def assert_same_quantized(a: Quantized, b: Quantized) -> None:
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scale, b.scale)
    assert (a.zero_point is None) == (b.zero_point is None)
    assert a.zero_point is None or torch.equal(a.zero_point, b.zero_point)
    assert a.grid == b.grid
