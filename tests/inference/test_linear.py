"""Layers that compute on codes: the numbers they compute with, and what they say to the rest of PyTorch."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.base.errors import InputError
from compress.inference.layers.fused import FusedLinear, why_not_fuse
from compress.inference.layers.linear import Int8Linear, PackedLinear, QuantLinear
from compress.kernels import reference
from compress.weights.formats.codes import Packed
from compress.weights.grid import Grid, fake_quantize, quantize
from compress.weights.rounding import ActivationCodes
from compress.weights.scheme import parts_of, scheme_named, scheme_on

TOKENS = Grid(bits=8, granularity="token")
W8A8 = scheme_on(Grid(bits=8), TOKENS)


def linear(N=24, K=64, bias=True, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(K, N, bias).to(dtype).requires_grad_(False)


def packed(bits=4, group=32, symmetric=True, signed_scale=False):
    where = {} if group == -1 else {"granularity": "group", "group_size": group}
    return scheme_on(Grid(bits=bits, symmetric=symmetric, signed_scale=signed_scale, **where))


def check(layer, x):
    """A weight-only layer's output against the exact product of its values, within the kernels' tolerance."""
    weight = layer.dequantize().double()
    bias = 0 if layer.bias is None else layer.bias.double()
    truth = x.double() @ weight.t() + bias
    out = layer(x)
    assert out.dtype == x.dtype
    given = x.double().flatten(0, -2)
    allowed = reference.tolerance(given, weight, truth.flatten(0, -2), x.dtype)
    # Kernels may multiply by unrounded values where these were rounded: half a unit in the last place of each.
    allowed += torch.finfo(layer.dtype).eps * (given.abs() @ weight.abs().t())
    assert ((out.double() - truth).flatten(0, -2).abs() <= allowed).all()


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    group=st.sampled_from([16, 32, 64, 128, -1]),
    symmetric=st.booleans(),
    groups=st.integers(1, 3),
    rows=st.integers(1, 40),
    tokens=st.sampled_from([1, 2, 17]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_fake_quantized_stored_and_executed_weights_are_the_same_numbers(
    bits, group, symmetric, groups, rows, tokens, dtype
):
    columns = 40 * groups if group == -1 else group * groups
    generator = torch.Generator().manual_seed(bits * rows + columns)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    scheme = packed(bits, group, symmetric, signed_scale=symmetric)
    layer = QuantLinear.from_quantized(quantize(weight, scheme.weights))
    assert torch.equal(layer.dequantize(), fake_quantize(weight, scheme.weights))
    assert torch.equal(layer.weight, layer.dequantize())
    again = QuantLinear.from_parts(layer.parts(layer.whole()), scheme, weight.shape)
    assert torch.equal(again.words, layer.words)
    assert torch.equal(again.dequantize(), layer.dequantize())
    check(layer, torch.randn(tokens, columns, generator=generator).to(dtype))


@pytest.mark.parametrize("name", ["w2a16", "w3a16", "w4a16", "w5a16", "w8a16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_linear_by_name(name, dtype):
    dense = linear(K=128, dtype=dtype)
    layer = QuantLinear.from_linear(dense, name, 64)
    assert isinstance(layer, PackedLinear)
    assert (layer.in_features, layer.out_features, layer.dtype) == (128, 24, dtype)
    assert torch.equal(layer.dequantize(), fake_quantize(dense.weight, layer.scheme.weights))
    check(layer, torch.randn(2, 3, 128).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w8a8_quantizes_its_input_per_token(dtype):
    dense = linear(dtype=dtype)
    layer = QuantLinear.from_linear(dense, "w8a8")
    assert isinstance(layer, Int8Linear)
    x = torch.randn(5, 64).to(dtype)
    codes, scale, _ = reference.quantize_tokens(x)
    weight = quantize(dense.weight, Grid(bits=8))
    expected = reference.w8a8(codes, scale, None, weight.codes, weight.scale[:, 0].float(), dense.bias, dtype)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_w8a8_static_uses_the_stored_scale(symmetric):
    weight = quantize(linear().weight, Grid(bits=8))
    parts = {"weight": weight.codes, "weight_scale": weight.scale, "input_scale": torch.tensor([0.03])}
    if not symmetric:
        parts["input_zero_point"] = torch.tensor([-7], dtype=torch.int8)
    inputs = Grid(bits=8, symmetric=symmetric, granularity="tensor")
    scheme = scheme_on(Grid(bits=8), inputs, dynamic=False)
    layer = QuantLinear.from_parts(parts, scheme, (24, 64))
    x = torch.randn(5, 64)
    zero = None if symmetric else torch.tensor([-7], dtype=torch.int32)
    codes = reference.quantize_static(x, parts["input_scale"], zero)
    expected = reference.w8a8(codes, parts["input_scale"], zero, weight.codes, weight.scale[:, 0])
    assert torch.equal(layer(x), expected)
    assert {k: v.tolist() for k, v in layer.state_dict().items()} == {k: v.tolist() for k, v in parts.items()}


def returning(kind="int", symmetric=True, seed=0, N=24, bias=True, dtype=torch.float32):
    """(a layer that rounds its output, the same layer without)"""
    dense = linear(N, bias=bias, seed=seed, dtype=dtype)
    grid = Grid(bits=8, type=kind)
    weight = quantize(dense.weight, grid)
    parts = {"weight": weight.codes, "weight_scale": weight.scale}
    tokens = Grid(bits=8, granularity="token", type=kind)
    plain = scheme_on(grid, tokens)
    scheme = replace(plain, outputs=Grid(bits=8, symmetric=symmetric, granularity="tensor", type=kind))
    more = {"output_scale": torch.tensor([0.0101 + 0.003 * seed]).to(dtype)}
    if not symmetric:
        more["output_zero_point"] = torch.tensor([seed - 5], dtype=torch.int8)
    made = [QuantLinear.from_parts(p, s, (N, 64), dense.bias) for p, s in (({**parts, **more}, scheme), (parts, plain))]
    return made[0], made[1], more


RETURNING = [("int", True), ("int", False), ("float", True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "symmetric"), RETURNING)
def test_the_output_is_rounded_by_the_stored_scale(kind, symmetric, dtype):
    layer, plain, more = returning(kind, symmetric, dtype=dtype)
    x = torch.randn(2, 5, 64).to(dtype).requires_grad_()
    codes = ActivationCodes(layer.scheme.outputs, *(t[:, None] for t in more.values()))
    expected = codes.fake_quantize(plain(x))
    assert not torch.equal(expected, plain(x))
    assert torch.equal(layer(x), expected)
    assert layer(x).dtype == dtype
    grads = [torch.autograd.grad(m(x).sum(), x)[0] for m in (layer, plain)]
    assert torch.equal(*grads)
    state = layer.state_dict()
    assert {k: (v.dtype, v.tolist()) for k, v in more.items()} == {k: (state[k].dtype, state[k].tolist()) for k in more}
    assert set(state) == {*plain.state_dict(), *more}
    other = returning(kind, symmetric, seed=1, dtype=dtype)[0]
    other.load_state_dict(state)
    assert torch.equal(other(x), expected)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x), expected)
    converted = copy.deepcopy(layer).to(torch.bfloat16)
    assert converted.output_scale.dtype == torch.float32


@pytest.mark.parametrize(("kind", "symmetric"), RETURNING)
def test_fused_layers_round_their_outputs_by_their_own_scales(kind, symmetric):
    singles = [returning(kind, symmetric, seed, rows)[0] for seed, rows in enumerate((32, 16, 8))]
    fused = FusedLinear.fuse(singles)
    x = torch.randn(3, 64)
    for one, part in zip(singles, fused, strict=True):
        assert torch.equal(part(x), one(x))
        state = part.state_dict()
        assert all(torch.equal(state[name], value) for name, value in one.state_dict().items())
    plain = returning(kind, symmetric)[1]
    assert any("schemes differ" in reason for reason in why_not_fuse([singles[0], plain]))
    assert fused[1].scheme == singles[1].scheme
    with_zero = returning("int", True)[0]
    with_zero.output_zero = torch.zeros(24, dtype=torch.int32)
    assert "only some have a zero point of the output" in why_not_fuse([returning("int", True)[0], with_zero])


@pytest.mark.parametrize("scheme", [packed(), packed(3, 16, False), packed(8, -1), W8A8], ids=str)
def test_the_state_dict_is_the_checkpoints(scheme):
    dense = linear(dtype=torch.bfloat16)
    layer = QuantLinear.from_linear(dense, scheme)
    state = layer.state_dict()
    codes = quantize(dense.weight, scheme.weights)
    if isinstance(scheme.codes, Packed):
        stored = parts_of(codes)
    else:
        stored = {"weight": codes.codes, "weight_scale": codes.scale}
    assert set(state) == {*stored, "bias"}
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    other = QuantLinear.from_linear(linear(seed=1, dtype=torch.bfloat16), scheme)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), layer(x))


def test_a_state_dict_that_does_not_fit_is_refused_by_name():
    layer = nn.ModuleDict({"proj": QuantLinear.from_linear(linear(), packed())})
    before = layer.proj.words.clone()
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"proj\.weight_scale"'):
        layer.load_state_dict({k: v for k, v in state.items() if k != "proj.weight_scale"})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"proj\.weight_g_idx"'):
        layer.load_state_dict({**state, "proj.weight_g_idx": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"proj\.weight_packed has shape \(24, 7\)"):
        layer.load_state_dict({**state, "proj.weight_packed": state["proj.weight_packed"][:, 1:]})
    with pytest.raises(RuntimeError, match=r"proj\.weight_scale is int64"):
        layer.load_state_dict({**state, "proj.weight_scale": state["proj.weight_scale"].long()})
    assert torch.equal(layer.proj.words, before)


def test_an_input_of_another_dtype_is_refused():
    layer = QuantLinear.from_linear(linear(), packed())
    with pytest.raises(InputError, match=r"x is torch\.bfloat16, the layer computes in torch\.float32"):
        layer(torch.zeros(1, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("scheme", [packed(), W8A8], ids=str)
def test_autocast_does_not_change_what_a_layer_computes_in(scheme):
    layer = QuantLinear.from_linear(linear(), scheme)
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x.bfloat16())
    assert torch.equal(found, layer(x.bfloat16().float()))


def test_conversion_follows_the_model():
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for scheme in (packed(), W8A8):
        model = nn.Sequential(QuantLinear.from_linear(linear(), scheme)).to(torch.bfloat16)
        assert model[0].dtype == torch.bfloat16
        assert model(x).dtype == torch.bfloat16
    assert model[0].weight_scale.dtype == torch.float32  # the epilogue's scales are not rounded


@pytest.mark.parametrize("scheme", [packed(), packed(8, 64, False), W8A8], ids=str)
def test_the_input_gets_a_gradient(scheme):
    layer = QuantLinear.from_linear(linear(), scheme)
    x = torch.randn(3, 64, requires_grad=True)
    grad = torch.randn(3, 24)
    layer(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ layer.dequantize())


@pytest.mark.parametrize("scheme", [packed(), W8A8], ids=str)
def test_compiles_into_one_graph(scheme):
    model = nn.Sequential(QuantLinear.from_linear(linear(), scheme), nn.SiLU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((1, 64), (2, 5, 64)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x))


# --- fused ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """q, k and v of one tensor, as transformers calls them."""

    def __init__(self, scheme, bias=True):
        super().__init__()
        for i, (name, rows) in enumerate((("q", 32), ("k", 16), ("v", 8))):
            setattr(self, name, QuantLinear.from_linear(linear(rows, bias=bias, seed=i), scheme))

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


def fused_twin(model):
    twin = copy.deepcopy(model)
    twin.q, twin.k, twin.v = FusedLinear.fuse([twin.q, twin.k, twin.v])
    return twin


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", [packed(), packed(4, 64, False), W8A8], ids=str)
def test_fused_layers_compute_and_store_what_the_single_ones_do(scheme, bias):
    model = Attention(scheme, bias)
    twin = fused_twin(model)
    for shape in ((1, 64), (2, 5, 64)):
        x = torch.randn(shape)
        for found, expected in zip(twin(x), model(x), strict=True):
            torch.testing.assert_close(found, expected)
    assert twin.q.pending is None  # nothing is kept alive
    before, after = model.state_dict(), twin.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(twin.v.weight, model.v.weight)
    assert len([m for m in twin.modules() if isinstance(m, QuantLinear)]) == 1


def test_fused_layers_multiply_once(monkeypatch):
    twin = fused_twin(Attention(packed()))
    calls = []
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: calls.append(self) or forward(self, x))
    twin(torch.randn(2, 64))
    assert len(calls) == 1
    x, y = torch.randn(2, 1, 64)
    torch.testing.assert_close((twin.q(x), twin.k(y)), (twin(x)[0], twin(y)[1]))  # another tensor is multiplied anew


def test_fused_layers_forget_what_no_longer_holds():
    model = Attention(packed())
    twin = fused_twin(model)
    x = torch.randn(2, 64)
    twin.q(x)
    x.copy_(torch.randn(2, 64))
    torch.testing.assert_close(twin.k(x), model.k(x))
    torch.testing.assert_close(twin.q(x), model.q(x))
    x = x.requires_grad_()
    with torch.no_grad():
        twin.q(x)
    assert twin.k(x).requires_grad
    copy.deepcopy(twin)  # a product that waits, and has a gradient, is not copied
    assert pickle.loads(pickle.dumps(twin)).q.pending is None
    with torch.no_grad():
        twin.q(x)
        state = {name: part * 2 if name.endswith("scale") else part for name, part in model.state_dict().items()}
        twin.load_state_dict(state)
        torch.testing.assert_close(twin.k(x) - model.k.bias, 2 * (model.k(x) - model.k.bias))


def test_what_cannot_be_a_layer_is_refused():
    with pytest.raises(InputError, match=r"a Conv1D is no torch\.nn\.Linear"):
        QuantLinear.from_linear(Conv1D(16, 64), "w4a16", 16)
    static = scheme_on(Grid(bits=8), Grid(bits=8, granularity="tensor"), dynamic=False)
    with pytest.raises(InputError, match="a static input has a scale of its own"):
        QuantLinear.from_linear(linear(), static)
    with pytest.raises(InputError, match="an output has a scale of its own"):
        QuantLinear.from_linear(linear(), replace(W8A8, outputs=Grid(bits=8, granularity="tensor")))


def test_fused_layers_load_copy_and_compile():
    model, other = Attention(packed()), Attention(packed())
    with torch.no_grad():
        for name in ("q", "k", "v"):
            setattr(other, name, QuantLinear.from_linear(linear(getattr(model, name).out_features, seed=9), packed()))
    twin = fused_twin(model)
    twin.load_state_dict(other.state_dict())
    x = torch.randn(3, 64)
    torch.testing.assert_close(twin(x), other(x))
    torch.testing.assert_close(copy.deepcopy(twin)(x), other(x))
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), other(x))
    state = other.state_dict()
    del state["k.weight_scale"]
    with pytest.raises(RuntimeError, match=r'"k\.weight_scale"'):
        twin.load_state_dict(state)


def test_what_does_not_fit_together_is_not_fused():
    first = QuantLinear.from_linear(linear(), packed())
    assert why_not_fuse([first, first]) == []
    for other, reason in (
        (QuantLinear.from_linear(linear(), packed(8)), "schemes differ"),
        (QuantLinear.from_linear(linear(K=32), packed()), "inputs differ: 64, 32"),
        (QuantLinear.from_linear(linear(bias=False), packed()), "only some have a bias"),
        (QuantLinear.from_linear(linear(dtype=torch.bfloat16), packed()), "dtypes differ"),
        (QuantLinear.from_linear(linear(), W8A8), "schemes differ"),
    ):
        assert any(reason in found for found in why_not_fuse([first, other]))
        with pytest.raises(InputError, match=reason):
            FusedLinear.fuse([first, other])


@pytest.mark.parametrize("name", ["w9a16", "w1a16", "a16", "4bit", "w3a4", "w3a8", "w4", ""])
def test_unknown_schemes_are_refused(name):
    with pytest.raises(InputError, match="w8a8"):
        scheme_named(name)


def test_a_group_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="does not divide 64"):
        QuantLinear.from_linear(linear(), "w4a16", 48)
    with pytest.raises(InputError, match="leave group_size out"):
        scheme_named("w8a8", 32)
