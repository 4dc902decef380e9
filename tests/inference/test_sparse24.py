"""Layers of 2:4 weights: what they compute, hold, store and say about themselves."""

from dataclasses import replace

import pytest
import torch
from combinations import every
from halved import largest_two
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import holds
from torch import nn

from compress.inference.check.dense_twin import error, plain
from compress.inference.layers.fused import FusedLinear
from compress.inference.layers.linear import PackedSparse24Linear, QuantLinear, Sparse24Linear, SumLinear, run_of
from compress.kernels.cpu import build as cpu
from compress.kernels.operators import blocks
from compress.weights.formats.dense import dense
from compress.weights.formats.sparse24 import sparse24
from compress.weights.grid import Grid, quantize
from compress.weights.matrix import Term
from compress.weights.scheme import parts_of, scheme_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = {"granularity": "group", "group_size": 32}
# What is stored -> the grid of its codes; None of numbers.
KINDS = {
    "numbers": None,
    "4 bits": Grid(bits=4, **GROUPS),
    "3 bits, asymmetric": Grid(bits=3, symmetric=False, **GROUPS),
    "2 bits, per channel": Grid(bits=2),
    "8 bits": Grid(bits=8),
    "6 bits, asymmetric": Grid(bits=6, symmetric=False, **GROUPS),
}


def term_of(name: str, N: int = 40, K: int = 192, dtype: torch.dtype = torch.float32, seed: int = 0) -> Term:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
    weight = weight * largest_two(weight) * (weight.abs() > 0.5)
    grid = KINDS[name]
    return sparse24(dense(weight.to(dtype)) if grid is None else quantize(weight, grid, dtype))


def layer_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> QuantLinear:
    term = term_of(name, dtype=dtype, seed=seed)
    return QuantLinear.from_quantized(term, torch.randn(40, generator=torch.Generator().manual_seed(1)).to(dtype))


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
@every("dtype", DTYPES)
@every("M", [1, 17])
def test_right_is_allowed_and_slightly_wrong_is_not(name, dtype, M, monkeypatch):
    layer = layer_of(name, dtype)
    assert isinstance(layer, Sparse24Linear if KINDS[name] is None else PackedSparse24Linear)
    monkeypatch.setattr(blocks, "UNPACKED_BYTES", 7 * blocks.BYTES_PER_WEIGHT * 192)
    x = torch.randn(M, layer.in_features, generator=torch.Generator().manual_seed(M)).to(dtype)
    out = layer(x)
    assert out.dtype == dtype
    for right in (out, plain(layer, x)):
        assert error(layer, x, right) <= 1
    assert error(layer, x, out * 1.1) > 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(KINDS)),
    N=st.integers(1, 70) | st.sampled_from([16, 48]),
    groups=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
)
def test_any_size_is_stored_bit_for_bit(name, N, groups, dtype):
    term = term_of(name, N, 32 * groups, dtype, seed=N)
    parts, scheme = parts_of(term), scheme_of(term)
    layer = QuantLinear.from_parts(parts, scheme, term.shape)
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(N)).to(dtype)
    holds(layer, term.dequantize(), parts, x)
    layer.lay_in_strips()
    assert layer.in_strips == (not cpu.why_not() and N % 16 == 0)
    holds(layer, term.dequantize(), parts, x)
    layer.to("meta")
    assert not layer.in_strips


@pytest.mark.parametrize("name", KINDS)
def test_conversion_follows_the_model(name):
    layer = layer_of(name).to(torch.bfloat16)
    assert {b.dtype for b in layer.buffers() if b.is_floating_point()} == {layer.dtype} == {torch.bfloat16}
    x = torch.randn(3, layer.in_features).bfloat16()
    assert error(layer, x, layer(x)) <= 1


@pytest.mark.parametrize("name", KINDS)
def test_compiles_into_one_graph(name):
    torch._dynamo.reset()  # every layer is compiled by the same code, which has a limit
    model = nn.Sequential(layer_of(name), nn.SiLU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((1, 192), (2, 5, 192)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("name", KINDS)
def test_the_input_gets_a_gradient(name):
    layer = layer_of(name)
    x, grad = torch.randn(3, 192, requires_grad=True), torch.randn(3, 40)
    layer(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ layer.dequantize(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_several_layers_are_one_product(name):
    layers = [layer_of(name, seed=seed) for seed in range(3)]
    fused = FusedLinear.fuse(layers)
    x = torch.randn(3, 192)
    for one, whole in zip(layers, fused, strict=True):
        torch.testing.assert_close(whole(x), one(x))
        state = whole.state_dict()
        assert all(torch.equal(state[key], part) for key, part in one.state_dict().items())
    fused[1].load_state_dict(layers[2].state_dict())
    torch.testing.assert_close(fused[1](x.clone()), layers[2](x))


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name] is not None])
def test_a_rounded_input_is_rounded(name):
    term, tokens = term_of(name), Grid(bits=8, granularity="token")
    scheme = replace(scheme_of(term), inputs=tokens)
    layer = QuantLinear.from_parts(parts_of(term), scheme, term.shape)
    assert isinstance(layer, SumLinear)
    x = torch.randn(5, 192)
    expected = nn.functional.linear(quantize(x, tokens, torch.float32).dequantize(), term.dequantize())
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "bits", "strips"), [("numbers", 9, 9), ("4 bits", 4.5, 3.5), ("8 bits", 5.1, 5.1)])
def test_memory_is_that_of_the_layout(name, bits, strips):
    layer = QuantLinear.from_quantized(term_of(name, 256, 1024, torch.bfloat16))
    assert 8 * sum(buffer.nbytes for buffer in layer.buffers()) / (256 * 1024) <= bits
    layer.lay_in_strips()
    if layer.in_strips:
        assert 8 * sum(buffer.nbytes for buffer in layer.buffers()) / (256 * 1024) <= strips


def test_routes_name_the_kernel_and_what_speaks_against_a_faster_one(monkeypatch):
    def route(name, dtype=torch.bfloat16, device="cpu", M=8, rows=4096):
        scheme = scheme_of(term_of(name))
        return run_of(scheme).route(scheme, M, (rows, 4096), dtype, torch.device(device))

    if not cpu.why_not():
        for name in ("numbers", "8 bits", "4 bits"):
            assert route(name) == route(name, M=512) == ("cpu strips", ())
            loops = ("cpu rows", "cpu slabs") if name == "4 bits" else ("torch",)  # by planar words
            assert route(name, rows=40).kernel.startswith(loops)
            assert route(name, torch.float64)[0] == "torch"
    monkeypatch.setattr("compress.kernels.cpu.build._loaded", lambda name: (None, ("no compiler",)))
    assert route("numbers") == route("4 bits") == ("torch", ("no compiler",))
    pairs = ("torch", ("no GPU kernel reads pairs: torch makes a block of rows dense at a time",))
    assert route("numbers", device="meta") == route("8 bits", device="meta") == pairs
    monkeypatch.setattr("compress.kernels.operators.words.why_not_triton", lambda device: ())
    assert route("4 bits", device="meta") == route("3 bits, asymmetric", device="meta") == ("triton", ())
    assert "float32" in route("4 bits", torch.float32, "meta").why_not[0]
