"""Sparse rows and tiles on a GPU: every path of their operators against the values of all terms. `pytest -m gpu`."""

import pytest
import torch
from sums import entries_of, error, planar_of, tiles_of

from compress.kernels.layouts import tiles as pack_tiles
from compress.kernels.layouts import words as pack
from compress.kernels.operators import sparse, tiles
from compress.kernels.operators import words as ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HALF = (torch.float16, torch.bfloat16)


def on_gpu(parts):
    return [part.cuda() if isinstance(part, torch.Tensor) else part for part in parts]


@pytest.mark.kernels(
    "sparse_kernels.product_kernel",
    "sparse_kernels.add_kernel",
    "tile_gemm.tile_kernel",
    "tile_gemm.dequantize_tiles_kernel",
)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("M", [1, 3, 16, 17, 65, 2050])
@pytest.mark.parametrize(("N", "K"), [(1100, 1024), (7, 160)])
@pytest.mark.parametrize("wide", [True, False])
def test_products_and_gradients(M, N, K, dtype, wide):
    """wide: entries and the ranges of tiles in float32."""
    stored = torch.float32 if wide else dtype
    entries, extra = entries_of(N, K, 0.02, stored)
    planar, weight = planar_of(N, K, 4, 32, True, dtype), tiles_of(N, K, 3, 16, 16, 3, stored)
    x, bias = torch.randn(M, K).to(dtype), torch.randn(N).to(dtype)
    dense = pack.planar_weight(planar, K).double(), pack_tiles.tile_weight(weight, K).double()
    cases = (
        (sparse.sparse_linear, (*entries, bias, K), (extra,)),
        (ops.words_linear, (*planar[:3], bias, 4, 32, None, False, None, False, *entries), (dense[0], extra)),
        (tiles.tiles_linear, (*weight[:3], bias, *weight[3:], *entries), (dense[1], extra)),
        (tiles.tiles_linear, (*weight[:3], bias, *weight[3:], None, None, None), (dense[1],)),
    )
    for op, given, terms in cases:
        values, own = sum(terms), x.cuda().requires_grad_()
        out = op(own, *on_gpu(given))
        assert error(out.detach().cpu(), x, values, bias, terms) <= 1
        (back,) = torch.autograd.grad(out, own, out.detach())
        turned = tuple(term.t().contiguous() for term in terms)
        assert error(back.cpu(), out.detach().cpu(), sum(turned), None, turned) <= 1


def test_the_paths_are_those_of_triton():
    x = torch.zeros(1, 64, device="cuda").half()
    weight = tiles_of(16, 64, 3, 16, 16, 3, torch.float16)
    assert tiles.why_not_tiles(x, weight) == []
    assert sparse.why_not_sparse(x, x) == []
