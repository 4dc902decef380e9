"""2:4 weights on the CPU: the layout, what is refused, and the operator's contract with PyTorch."""

import pytest
import torch
from combinations import every

from compress.base.errors import InputError
from compress.kernels import reference
from compress.kernels.layouts import words as pack
from compress.kernels.layouts import words24 as pack24
from compress.kernels.operators import sparse24
from compress.kernels.operators import words as ops


def pruned(N=40, K=256, seed=0):
    """(codes uint8 [N, K], kept bool [N, K]), two of four kept at random."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), generator=g).to(torch.uint8)
    order = torch.rand(N, -(-K // 4), 4, generator=g).argsort(-1)
    return codes, (order < 2).view(N, -1)[:, :K]


def arguments(dtype=torch.bfloat16, zero=True, gradient=False, group=64):
    codes, kept = pruned()
    g = torch.Generator().manual_seed(1)
    scale = (torch.randn(40, 256 // group, generator=g) * 0.1).to(dtype)
    zeros = torch.randint(0, 16, scale.shape, generator=g).to(torch.uint8) if zero else torch.full_like(scale, 8).byte()
    weight = pack24.to_sparse24(codes, scale, zeros, dtype, kept)
    x = torch.randn(2, 3, 256, generator=g).to(dtype).requires_grad_(gradient)
    bias = torch.randn(40, generator=g).to(dtype)
    return x, weight.codes, weight.kept, weight.scale, weight.zero if zero else None, bias, group, 4


@every("K", [2, 3, 64, 512, 1000, 1024])
def test_round_trip(K):
    codes, kept = pruned(K=K)
    words, bits = pack24.pack24(codes, kept)
    blocks = -(-K // 512)
    assert (words.shape, bits.shape) == ((40, 64 * blocks), (40, 32 * blocks))
    back, mask = pack24.unpack24(words, bits, K)
    assert torch.equal(mask, kept)
    assert torch.equal(back, codes * kept)


def test_three_bits_per_weight():
    words, bits = pack24.pack24(*pruned(K=1024))
    assert 8 * (words.nbytes + bits.nbytes) == 3 * 40 * 1024


def test_every_way_to_keep_at_most_two_of_four():
    kept = torch.tensor([[bool(m >> i & 1) for i in range(4)] for m in range(16) if m.bit_count() <= 2])
    codes = torch.tensor([[3, 5, 9, 15]], dtype=torch.uint8).expand(len(kept), 4)
    back, mask = pack24.unpack24(*pack24.pack24(codes, kept), 4)
    assert torch.equal(mask, kept)
    assert torch.equal(back, codes * kept)


def test_the_layout_is_the_one_that_is_drawn():
    codes, kept = torch.zeros(1, 512, dtype=torch.uint8), torch.zeros(1, 512, dtype=torch.bool)
    for column, code in ((128 * 3 + 4 * 5 + 0, 7), (128 * 3 + 4 * 5 + 2, 9)):
        codes[0, column], kept[0, column] = code, True
    words, bits = pack24.pack24(codes, kept)
    assert words[0, 32 + 5].item() & 0xFFFF == 0x9700
    assert bits[0, 5].item() & 0xFFFF == 1 << 15 - 6 | 1 << 14 - 6
    assert words.count_nonzero() == bits.count_nonzero() == 1


def test_a_weight_that_is_not_pruned_is_refused_by_place():
    codes, kept = pruned()
    kept[7, 12:16] = torch.tensor([True, False, True, True])
    kept[9, 0:4] = True
    with pytest.raises(InputError, match=r"row 7 keeps 3 of columns 12 to 15, at most 2 .*2 such places"):
        pack24.pack24(codes, kept)
    with pytest.raises(InputError, match="row 0 keeps 4 of columns 0 to 3"):
        pack24.to_sparse24(torch.ones(2, 64, dtype=torch.int8), torch.ones(2, 1), None, torch.float16)


def test_a_pruned_weight_is_zero_and_not_the_zero_point():
    """Also the other way around: without a mask, the weights at the zero point are the pruned ones."""
    codes, kept = pruned()
    zeros = torch.randint(1, 16, (40, 4), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    scale = -torch.rand(40, 4)
    masked = pack24.to_sparse24(codes, scale, zeros, torch.float32, kept)
    dense = pack24.sparse24_weight(masked, 256)
    assert (dense[~kept] == 0).all()
    assert torch.equal(dense[kept], reference.dequantize(codes, scale, zeros)[kept])
    at_zero = torch.where(kept, codes, zeros.repeat_interleave(64, 1))
    found = pack24.to_sparse24(at_zero, scale, zeros, torch.float32)
    assert torch.equal(pack24.sparse24_weight(found, 256), dense)


def test_signed_codes():
    codes, kept = pruned()
    signed = ((codes.to(torch.int16) - 8) * kept).to(torch.int8)
    scale = torch.rand(40, 1)
    weight = pack24.to_sparse24(signed, scale, None, torch.float32)
    assert weight.zero is None
    assert weight.group_size == -1
    assert torch.equal(pack24.sparse24_weight(weight, 256), signed * scale)


def test_quad_planar_is_the_order_of_the_planes():
    x = torch.arange(2 * 600, dtype=torch.float32).view(2, 600)
    ours = pack24.quad_planar(x)
    assert ours.shape == (2, 1024)
    for column in (0, 1, 131, 599):
        quarter, inside = divmod(column, 128)
        assert torch.equal(ours[:, quarter * 128 + inside % 4 * 32 + inside // 4], x[:, column])
    assert ours.count_nonzero() == x.count_nonzero()


@every("zero", [False, True])
@every("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_operator_is_the_reference(dtype, zero):
    given = arguments(dtype, zero)
    x, weight = given[0].double().view(6, 256), pack24.Words24(*given[1:5], given[6])
    dense = pack24.sparse24_weight(weight, 256).double()
    truth = x @ dense.t() + given[5].double()
    out = sparse24.sparse24_linear(*given)
    assert (out.dtype, out.shape) == (dtype, (2, 3, 40))
    assert ((out.double().view(6, 40) - truth).abs() <= reference.tolerance(x, dense, truth, dtype)).all()


@pytest.mark.first
@pytest.mark.parametrize("gradient", [True, False])
def test_contract(gradient):
    torch.library.opcheck(sparse24.sparse24_linear.registered, arguments(gradient=gradient))


def test_gradient():
    given = arguments(torch.float32, gradient=True)
    grad = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(3))
    sparse24.sparse24_linear(*given).backward(grad)
    dense = pack24.sparse24_weight(pack24.Words24(*given[1:5], given[6]), 256)
    torch.testing.assert_close(given[0].grad, grad @ dense)


def test_reasons_and_refusals():
    given = arguments(torch.float32)
    weight = pack24.Words24(*given[1:5], 2)
    reasons = sparse24.why_not_sparse24(given[0], weight)
    assert any("cpu" in r for r in reasons)
    assert any("float32" in r and "bfloat16" in r for r in reasons)
    assert any("group size 2" in r for r in reasons)
    with pytest.raises(InputError, match="x has 600 columns"):
        sparse24.sparse24_linear(torch.zeros(1, 600), *given[1:])


def test_dense_and_sparse_words_agree_on_values():
    """The same codes at the zero point, laid out densely and as 2:4."""
    codes, kept = pruned()
    zeros = torch.full((40, 4), 3, dtype=torch.uint8)
    codes = torch.where(kept, codes, zeros.repeat_interleave(64, 1))
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(40, 4, generator=generator)
    planar = pack.to_planar(codes, scale, zeros, 4, torch.float32)
    x = torch.randn(5, 256, generator=generator)
    dense = ops.words_linear(x, *planar[:3], None, 4, 64)
    sparse = pack24.to_sparse24(codes, scale, zeros, torch.float32)
    found = sparse24.sparse24_linear(x, *sparse[:4], None, 64, 4)
    sizes = x.double().abs() @ pack.planar_weight(planar, 256).double().abs().t()
    assert ((found - dense).abs() <= 2 * 256 * torch.finfo(torch.float32).eps * sizes).all()  # sums in another order
