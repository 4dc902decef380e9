"""What a token gets does not depend on how many tokens are multiplied with it, where that is asked for: on a CPU, and
which configuration a GPU gets (`interpreter_invariance` runs the kernels)."""

import pytest
import torch
from combinations import each
from planar import inputs, planar_of

from compress.base.errors import InputError
from compress.kernels import workspace
from compress.kernels.cpu import build as cpu
from compress.kernels.layouts.strips import pack_strips
from compress.kernels.operators import devices
from compress.kernels.operators import words as ops
from compress.kernels.operators.int8_rows import w8a8_linear
from compress.kernels.operators.words import words_linear
from compress.kernels.routes import planar_route, why_not_batch_invariant
from compress.kernels.triton.split_k import pieces
from compress.kernels.tuning.choose import Device, invariant, kind_of

CPU, N, K = torch.device("cpu"), 48, 320
TOKENS = (1, 5, 70)


@pytest.fixture
def compiled():
    if cpu.why_not():
        pytest.skip("; ".join(cpu.why_not()))


def alone_and_together(product, x):
    """Whether the first tokens get the same, bit for bit, alone, with few others and with many."""
    whole = product(x)
    return [torch.equal(product(x[:M]), whole[:M]) for M in TOKENS]


@pytest.mark.parametrize(
    ("in_strips", "bits", "group", "symmetric", "dtype", "input_group"),
    each([False, True], [4, 8], [32, -1], [True, False], [torch.float32, torch.bfloat16], [None, -1, 128]),
)
def test_on_a_cpu(compiled, in_strips, bits, group, symmetric, dtype, input_group):
    weight, _ = planar_of(N, K, bits, group, symmetric, dtype)
    x, bias = inputs(max(TOKENS) + 3, K, N, dtype)
    if in_strips:
        laid = pack_strips(weight, K)
        product = lambda x: ops.words_linear(x, *laid[:3], bias, bits, group, input_group, True)  # noqa: E731
    else:
        product = lambda x: words_linear(x, *weight[:3], bias, weight.bits, group, input_group, True)  # noqa: E731
    assert all(alone_and_together(product, x))


def test_it_is_for_a_reason(compiled):
    """Left to itself, a CPU sums few tokens in another order."""
    weight, _ = planar_of(N, K, 4, 32, True, torch.float32)
    x, _ = inputs(max(TOKENS) + 3, K, N, torch.float32)
    assert not all(alone_and_together(lambda x: ops.words_linear(x, *weight[:3], None, 4, 32), x))


@pytest.mark.parametrize(("symmetric", "static"), each([True, False], [True, False]))
def test_int8_weights_are_so_anyway(symmetric, static):
    g = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (N, K), generator=g, dtype=torch.int8)
    fixed = (torch.tensor([0.03]), None if symmetric else torch.tensor([5])) if static else (None, None)
    given = (weight, torch.rand(N, generator=g), weight.sum(-1, dtype=torch.int32), torch.randn(N, generator=g))
    x, _ = inputs(max(TOKENS) + 3, K, N, torch.bfloat16)
    assert all(alone_and_together(lambda x: w8a8_linear(x, *given, *fixed, symmetric), x))


def test_gradients_go_through_it(compiled):
    weight, dense = planar_of(N, K, 4, 32, True, torch.float32)
    x = inputs(3, K, N, torch.float32)[0].requires_grad_()
    for input_group in (None, -1):
        out = words_linear(x, *weight[:3], None, 4, 32, input_group, True)
        (back,) = torch.autograd.grad(out, x, torch.ones_like(out))
        torch.testing.assert_close(back, dense.float().sum(0).expand_as(back), rtol=1e-4, atol=1e-4)
    torch.library.opcheck(ops.words_linear.registered, (x.detach(), *weight[:3], None, 4, 32, None, True))


def test_routes_of_int8_tokens_on_a_gpu(monkeypatch):
    for module in (ops, devices):
        monkeypatch.setattr(module, "why_not_triton", lambda device: ())
    meta = torch.device("meta")
    for M in (1, 4096):
        assert planar_route(M, N, K, 4, 32, torch.bfloat16, meta, int8_input=True, zero=True) == ("triton", ())
    kept = planar_route(1, N, K, 8, 64, torch.bfloat16, meta, int8_input=True, zero=True)
    assert kept == ("reference", ("codes of 8 bits less a zero point do not fit int8",))


def test_one_configuration_for_any_number_of_tokens():
    kind = kind_of("weight_only", 4, 128, True, torch.bfloat16)
    for capability in (80, 90, 100, 120):
        found = invariant(kind, 4096, 4096, Device(capability=capability))
        assert found.block_m == 64
        # One wave: 32 or 64 tiles of outputs on 132 processors.
        assert found.split_k * 4096 // found.block_n == 128
    assert invariant(kind, 57344, 8192, Device()).split_k == 1


@pytest.mark.parametrize(
    ("M", "N", "split_k", "expected"), [(3000, 4096, 4, [1024, 1024, 952]), (3000, 4096, 1, [3000])]
)
def test_there_are_counters_for_every_piece(M, N, split_k, expected):
    shape = invariant(kind_of("weight_only", 4, 128, True, torch.float16), N, 4096, Device())
    assert shape.split_k == 4
    found = pieces(M, N, type(shape)(64, 128, split_k))
    assert [len(range(M)[piece]) for piece in found] == expected
    assert -(-1024 // 64) * -(-N // 128) <= workspace.SLICE


def test_what_cannot_be_is_refused(monkeypatch):
    weight, _ = planar_of(N, 96, 4, 96, True, torch.float16)
    x, _ = inputs(2, 96, N, torch.float16)
    monkeypatch.setattr("compress.kernels.cpu.build.why_not", lambda name="gemm": ("no C++ compiler",))
    with pytest.raises(InputError, match=r"^batch_invariant: no C\+\+ compiler$"):
        ops.words_linear(x, *weight[:3], None, 4, -1, None, True)
    monkeypatch.setattr(ops, "why_not_triton", lambda device: ())
    assert why_not_batch_invariant(96, 4, 96, torch.float16, CPU)[0].startswith("group size 96")
    assert why_not_batch_invariant(96, 4, 32, torch.float32, CPU) == ["x is torch.float32; allowed: float16, bfloat16"]
    assert why_not_batch_invariant(96, 4, 32, torch.float16, CPU) == []
