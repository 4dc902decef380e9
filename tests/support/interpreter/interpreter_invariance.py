"""Batch-invariant products of the Triton kernels, run as `interpreter_cases` runs the others."""

import pytest
import torch
from combinations import each
from interpreter_cases import guarded, weight_and_truth  # noqa: F401  every test here is held to `guarded`

from compress.kernels import reference, workspace
from compress.kernels.layouts import words as pack
from compress.kernels.operators import words as ops
from compress.kernels.operators.int8_rows import w8a8_linear
from compress.kernels.triton import planar_gemm

TOKENS = (1, 5, 70)


@pytest.mark.parametrize(
    ("bits", "group", "zero", "dtype"), each([4, 8], [32, 128, -1], [True, False], [torch.float16, torch.bfloat16])
)
def test_weight_only(bits, group, zero, dtype, monkeypatch):
    """Split or not, in one launch or in pieces: one configuration, and every token the same."""
    N, K, launched, launch = 40, 8 * pack.planar_block(bits), set(), planar_gemm._launch
    planar, weight = weight_and_truth(bits, N, K, group, zero, dtype, seed=0)
    x = torch.randn(max(TOKENS), K, generator=torch.Generator().manual_seed(0)).to(dtype)
    monkeypatch.setattr(planar_gemm, "_launch", lambda *given: launched.add(given[-1]) or launch(*given))
    monkeypatch.setattr(workspace, "SLICE", 1)  # one tile of tokens at a time

    def product(x):
        return ops.words_linear(x, *planar[:3], None, bits, group, None, True)

    whole = product(x)
    truth = x.double() @ weight.t()
    assert ((whole.double() - truth).abs() <= reference.tolerance(x.double(), weight, truth, dtype)).all()
    for M in TOKENS:
        assert torch.equal(product(x[:M]), whole[:M])
    (shape,) = launched
    assert shape.split_k > 1
    assert workspace.counters(torch.device("cpu")).count_nonzero() == 0
    paths = {ops.weight_only_path(x.new_zeros(M, K), planar, True) for M in (*TOKENS, 5000)}
    assert paths == {("triton", shape)}


def test_int8_weights():
    """Exact sums: by whichever configuration."""
    N, K, g = 40, 256, torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (N, K), generator=g, dtype=torch.int8)
    given = (weight, torch.rand(N, generator=g), reference.row_sums(weight), torch.randn(N, generator=g), None, None)
    x = torch.randn(max(TOKENS), K, generator=g)
    whole = w8a8_linear(x, *given, False)
    for M in TOKENS:
        assert torch.equal(w8a8_linear(x[:M], *given, False), whole[:M])
