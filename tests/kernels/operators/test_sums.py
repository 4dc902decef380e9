"""The operators of sparse rows and of tiles on the CPU: contract with PyTorch, gradients, compilation, other paths."""

import pytest
import torch
from combinations import every
from sums import entries_of, error, planar_of, tiles_of

from compress.base.errors import InputError
from compress.kernels import reference
from compress.kernels.cpu import build as cpu
from compress.kernels.layouts import tiles as pack_tiles
from compress.kernels.layouts import words as pack
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.strips import pack_strips
from compress.kernels.operators import blocks, sparse, tiles
from compress.kernels.operators import words as ops

N, K = 48, 192


def arguments(kind, dtype=torch.float32, gradient=False, bias=True, with_entries=True):
    """(operator, its arguments, fp64 [N, K] values) of a kind."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, K, generator=g).to(dtype).requires_grad_(gradient)
    added = torch.randn(N, generator=g).to(dtype) if bias else None
    entries, extra = entries_of(N, K, 0.1, dtype)
    if kind == "sparse":
        return sparse.sparse_linear, (x, *entries, added, K), extra
    if kind == "codes":
        planar = planar_of(N, K, 4, 64, True, dtype)
        values = pack.planar_weight(planar, K).double() + extra
        return ops.words_linear, (x, *planar[:3], added, 4, 64, None, False, None, False, *entries), values
    if kind == "strips":
        planar = planar_of(N, K, 4, 64, True, dtype)
        exact = planar._replace(scale=planar.scale.double())
        given = (x, *pack_strips(planar, K)[:3], added, 4, 64, None, False, None, False, *entries)
        return ops.words_linear, given, pack.planar_weight(exact, K) + extra
    weight = tiles_of(N, K, 3, 16, 16, 3, dtype)
    values = pack_tiles.tile_weight(weight, K).double() + (extra if with_entries else 0)
    given = entries if with_entries else (None, None, None)
    return tiles.tiles_linear, (x, *weight[:3], added, *weight[3:], *given), values


KINDS = ("sparse", "codes", "strips", "tiles")


def bias_of(given):
    return given[4]


@every("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@every("kind", KINDS)
def test_products(kind, dtype):
    op, given, values = arguments(kind, dtype)
    out = op(*given)
    assert out.dtype == dtype
    assert out.shape == (2, 3, N)
    x = given[0].reshape(6, K)
    assert error(out.view(6, N), x, values, bias_of(given)) <= 1
    moved = given[0].transpose(0, 1)
    assert torch.equal(op(moved, *given[1:]), op(moved.contiguous(), *given[1:]))
    assert op(given[0][:0], *given[1:]).shape == (0, 3, N)


@every("kind", KINDS)
@every("off", [True, False])
def test_without_compiled_kernels_torch_gives_the_same(kind, off):
    op, given, values = arguments(kind, with_entries=off)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "why_not", lambda: ("off",))
        out = op(*given)
    assert error(out.view(6, N), given[0].view(6, K), values, bias_of(given)) <= 1


def test_groups_that_no_kernel_takes_are_unpacked(monkeypatch):
    monkeypatch.setattr(blocks, "UNPACKED_BYTES", blocks.BYTES_PER_WEIGHT * K * 7)  # two tiles of three rows
    weight, x = tiles_of(N, K, 5, 24, 3, 4, torch.float32), torch.randn(5, K)
    out = tiles.tiles_linear(x, *weight[:3], None, *weight[3:], None, None, None)
    values = pack_tiles.tile_weight(weight, K).double()
    assert error(out, x, values) <= 1
    grad = torch.randn(5, N)
    back = tiles.tiles_gradient(grad, x.shape, *weight[:3], None, *weight[3:])
    torch.testing.assert_close(back, (grad.double() @ values).float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gradient", "bias"), [(True, True), (False, False)])
def test_contract(kind, gradient, bias):
    op, given, _ = arguments(kind, torch.bfloat16, gradient, bias, with_entries=gradient)
    torch.library.opcheck(op.registered, given)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    op, given, values = arguments(kind, gradient=True)
    grad = torch.randn(2, 3, N, generator=torch.Generator().manual_seed(3))
    op(*given).backward(grad)
    torch.testing.assert_close(given[0].grad, (grad.double() @ values).float(), rtol=1e-4, atol=1e-5)


def test_gradient_operators_and_their_own_gradients():
    entries, extra = entries_of(N, K, 0.1, torch.float32)
    weight = tiles_of(N, K, 3, 16, 16, 3, torch.float32)
    values = pack_tiles.tile_weight(weight, K).double()
    for op, given, dense in (
        (sparse.sparse_gradient, (*entries, None, K), extra),
        (tiles.tiles_gradient, (*weight[:3], None, *weight[3:]), values),
    ):
        grad = torch.randn(2, 3, N, generator=torch.Generator().manual_seed(3)).requires_grad_()
        torch.library.opcheck(op.registered, (grad, (2, 3, K), *given))
        back = op(grad, (2, 3, K), *given)
        torch.testing.assert_close(back, (grad.double() @ dense).float(), rtol=1e-4, atol=1e-5)
        (twice,) = torch.autograd.grad(back, grad, torch.ones_like(back))
        torch.testing.assert_close(twice, dense.sum(1).float().expand_as(twice), rtol=1e-4, atol=1e-4)


@pytest.mark.first
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_into_one_graph(kind):
    op, given, _ = arguments(kind)

    def layer(x):
        return torch.nn.functional.silu(op(x * 2, *given[1:])).sum(-1)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for x in (given[0], torch.randn(7, 5, K)):
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_columns_are_refused(kind):
    op, given, _ = arguments(kind)
    with pytest.raises(InputError, match="x has 10 columns"):
        op(given[0][..., :10], *given[1:])


def test_the_reference_is_loops_over_entries():
    entries, _ = entries_of(7, 20, 0.3, torch.float64)
    g = torch.Generator().manual_seed(0)
    x, grad = torch.randn(3, 20, generator=g).double(), torch.randn(3, 7, generator=g).double()
    out, back = torch.zeros(3, 7).double(), torch.zeros(3, 20).double()
    for n in range(7):
        for e in range(entries.row_start[n], entries.row_start[n + 1]):
            out[:, n] += entries.value[e] * x[:, entries.column[e]]
            back[:, entries.column[e]] += entries.value[e] * grad[:, n]
    torch.testing.assert_close(reference.sparse_rows(x, *entries), out)
    torch.testing.assert_close(reference.sparse_gradient(grad, *entries, 20), back)


def test_reasons_name_what_was_given_and_what_is_allowed():
    x, weight = torch.zeros(17, K), tiles_of(N, K, 3, 24, 16, 3, torch.float32)
    reasons = tiles.why_not_tiles(x, weight)
    assert reasons[0] == "the device is cpu, not cuda"
    assert any("group size 24; allowed: multiples of 16" in reason for reason in reasons)
    assert any("float32; allowed: float16, bfloat16" in reason for reason in reasons)
    assert reasons[-1] == tiles.MANY
    assert any("entries are torch.float64" in reason for reason in sparse.why_not_sparse(x, x.double()))
    assert Entries.of(None, None, None) is None


@every("bits", range(2, 9))
def test_levels_come_back(bits):
    scale, zero = (torch.randint(0, 2**bits, (5, 7), dtype=torch.uint8) for _ in range(2))
    levels = pack_tiles.pack_levels(scale, zero, bits)
    assert len(levels) == (1 if bits <= 4 else 2)
    assert all(torch.equal(*pair) for pair in zip(pack_tiles.unpack_levels(levels), (scale, zero), strict=True))
