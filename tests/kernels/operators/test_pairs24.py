"""2:4 weights as pairs: their places, what they stand for, and the operator's contract with PyTorch."""

import pytest
import torch
from combinations import every
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.base.errors import InputError
from compress.kernels import reference
from compress.kernels.layouts import pairs24 as pack_pairs24
from compress.kernels.layouts.words import pack_rows, unpack_rows
from compress.kernels.operators import blocks, sparse24


def kept(N: int, K: int, seed: int = 0) -> torch.Tensor:
    """bool [N, K]: none, one or two of every four."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.rand(N, K // 4, 4, generator=draw).argsort(-1)
    return (order < torch.randint(3, (N, K // 4, 1), generator=draw)).flatten(1)


def arguments(codes: bool, dtype=torch.bfloat16, gradient=False, N=40, K=192, group=64):
    draw = torch.Generator().manual_seed(1)
    mask = kept(N, K)
    position = pack_pairs24.positions_of(mask)
    held = (torch.randn(N, K, generator=draw) * mask).to(dtype)
    scale = zero = None
    if codes:
        scale = torch.randn(K // group, N, generator=draw).to(dtype) * 0.01
        zero = torch.randint(0, 256, scale.shape, dtype=torch.uint8, generator=draw)
        held = torch.randint(0, 256, (N, K), dtype=torch.uint8, generator=draw)
    x = torch.randn(2, 3, K, generator=draw).to(dtype).requires_grad_(gradient)
    bias = torch.randn(N, generator=draw).to(dtype)
    words = pack_pairs24.pack_positions(position)
    return x, pack_pairs24.take(held, position), words, scale, zero, bias, group, 8 if codes else 16


@settings(max_examples=25, deadline=None, derandomize=True)
@given(N=st.integers(1, 20), quads=st.integers(1, 40), seed=st.integers(0, 1000))
def test_places_and_values_come_back(N, quads, seed):
    mask = kept(N, 4 * quads, seed)
    position = pack_pairs24.positions_of(mask)
    first, second = position.view(N, -1, 2).unbind(-1)
    assert (second > first).all()
    assert int(second.max()) <= 3
    words = pack_pairs24.pack_positions(position)
    assert words.shape == (N, pack_pairs24.position_words(4 * quads))
    assert torch.equal(pack_pairs24.unpack_positions(words, 4 * quads), position)
    assert torch.equal(position, unpack_rows(words, 2, 2 * quads, signed=False))
    values = torch.randn(N, 4 * quads, generator=torch.Generator().manual_seed(seed)) * mask
    assert torch.equal(pack_pairs24.spread(pack_pairs24.take(values, position), position), values)
    others = torch.full_like(values, 7.0)
    assert torch.equal(pack_pairs24.spread(pack_pairs24.take(values, position), position, others)[mask], values[mask])


def test_what_is_kept_beside_too_few_is_always_the_same():
    """Of a quad by its kept columns: the first of the others fill it up."""
    mask = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 1]]).bool()
    assert pack_pairs24.positions_of(mask).tolist() == [[0, 1], [0, 1], [0, 2], [0, 3], [1, 3]]
    assert pack_rows(torch.tensor([[1, 3]], dtype=torch.uint8), 2, signed=False).item() == 1 | 3 << 2
    with pytest.raises(InputError, match="not 2:4: row 1 keeps 3 of columns 0 to 3"):
        pack_pairs24.positions_of(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]]).bool())


@every("codes", [False, True])
@every("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_operator_is_the_reference(codes, dtype, monkeypatch):
    given = arguments(codes, dtype)
    dense = pack_pairs24.pairs_weight(pack_pairs24.Pairs(*given[1:5], given[6]))
    x = given[0].double().view(6, -1)
    truth = x @ dense.double().t() + given[5].double()
    # Codes of few tokens are not rounded to the dtype of their scales.
    allowed = reference.tolerance(x, dense.double(), truth, dtype)
    allowed += codes * reference.weight_rounding(x, dense.double(), dtype)
    monkeypatch.setattr(blocks, "UNPACKED_BYTES", 8 * blocks.BYTES_PER_WEIGHT * 192)
    assert len(list(blocks.row_blocks(40, 192))) == 5
    out = sparse24.sparse24_linear(*given)
    assert (out.dtype, out.shape) == (dtype, (2, 3, 40))
    assert ((out.double().view(6, 40) - truth).abs() <= allowed).all()
    wider = (given[0].double(), *given[1:])
    torch.testing.assert_close(sparse24.sparse24_linear(*wider).view(6, 40), truth)


@every("codes", [False, True])
@every("gradient", [True, False])
def test_contract(codes, gradient):
    torch.library.opcheck(sparse24.sparse24_linear.registered, arguments(codes, gradient=gradient))


@every("codes", [False, True])
def test_gradient(codes):
    given = arguments(codes, torch.float32, gradient=True)
    grad = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(3))
    sparse24.sparse24_linear(*given).backward(grad)
    dense = pack_pairs24.pairs_weight(pack_pairs24.Pairs(*given[1:5], given[6]))
    torch.testing.assert_close(given[0].grad, grad @ dense)


def test_other_widths_are_refused():
    with pytest.raises(InputError, match="x has 600 columns"):
        sparse24.sparse24_linear(torch.zeros(1, 600), *arguments(False)[1:])
