"""Layers whose codes lie in strips: the same layer to everything but the kernel."""

import copy
import pickle

import pytest
import torch
from models import build
from torch import nn

import compress
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.embedding import TiedLinear
from compress.inference.layers.fused import FusedLinear
from compress.inference.layers.linear import PackedLinear, QuantLinear
from compress.kernels import reference
from compress.kernels.cpu import build as cpu
from compress.solvers.trellis.solve import nearest_states
from compress.weights.formats.trellis import TrellisCodes

K = 96


@pytest.fixture(autouse=True)
def kernels():
    if cpu.why_not():
        pytest.skip("; ".join(cpu.why_not()))


def layer_of(seed=0, rows=48, scheme="w4a16"):
    """With inputs rounded to int8."""
    torch.manual_seed(seed)
    layer = QuantLinear.from_linear(nn.Linear(K, rows).requires_grad_(False), scheme, 32)
    assert isinstance(layer, PackedLinear)
    layer.input_group = -1
    return layer


def held(layer):
    return sum(buffer.nbytes for buffer in layer.buffers())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("scheme", ["w4a16", "w3a16"])
def test_a_layer_in_strips_is_the_same_layer(scheme):
    layer, x = layer_of(scheme=scheme), torch.randn(5, K)
    out, stored, values, size = layer(x), layer.state_dict(), layer.dequantize(), held(layer)
    layer.lay_in_strips()
    assert layer.in_strips
    assert held(layer) <= size  # in the place of planar words, and no wider
    codes, scale, _ = reference.quantize_tokens(x)
    given = codes.double() * scale.double().unsqueeze(-1)
    truth = given @ values.double().t() + layer.bias
    allowed = reference.tolerance(given, values.double(), truth, x.dtype)
    assert ((layer(x) - truth).abs() <= allowed).all()
    assert ((out - truth).abs() <= allowed).all()
    assert same(layer.state_dict(), stored)
    assert torch.equal(layer.dequantize(), values)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.in_strips
        assert torch.equal(other(x), layer(x))
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def trellis_layer(seed=0, columns=K):
    torch.manual_seed(seed)
    format_ = TrellisCodes(bits=3, run=64, inputs=columns if columns % 32 else 0)
    weight = nearest_states(torch.randn(70, columns), format_, torch.float32)
    return QuantLinear.from_quantized(weight, nn.Parameter(torch.randn(70), requires_grad=False)), weight.dequantize()


@pytest.mark.parametrize("columns", [K, 40])
def test_trellis_codes_in_strips_are_the_same_layer(columns):
    (layer, values), (other, _), x = trellis_layer(0, columns), trellis_layer(1, columns), torch.randn(5, columns)
    stored, shapes = layer.state_dict(), [buffer.shape for buffer in layer.buffers()]
    layer.lay_in_strips()
    assert layer.in_strips
    assert same(layer.state_dict(), stored)
    assert torch.equal(layer.dequantize(), values)
    torch.testing.assert_close(layer(x), x @ values.t() + layer.bias, rtol=1e-4, atol=1e-4)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.in_strips
        assert torch.equal(copied(x), layer(x))
    layer.load_state_dict(other.state_dict())
    assert layer.in_strips
    assert same(layer.state_dict(), other.state_dict())
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    layer.to("meta")
    assert not layer.in_strips
    assert [buffer.shape for buffer in layer.buffers()] == shapes


def test_new_codes_are_laid_in_strips_again():
    layer, other = layer_of(0), layer_of(1)
    layer.lay_in_strips()
    layer.load_state_dict(other.state_dict())
    assert layer.in_strips
    assert same(layer.state_dict(), other.state_dict())


def test_another_device_gets_planar_words():
    layer = layer_of()
    shapes = [buffer.shape for buffer in layer.buffers()]
    layer.lay_in_strips()
    layer.to("meta")
    assert not layer.in_strips
    assert [buffer.shape for buffer in layer.buffers()] == shapes


def test_what_stays_in_planar_words():
    odd, wide = layer_of(rows=40), layer_of(scheme="w8a16")
    for layer in (odd, wide):
        layer.lay_in_strips()
        assert not layer.in_strips


def test_stacked_layers_lie_in_strips_and_say_their_own_rows():
    layers, x = [layer_of(0), layer_of(1, 64)], torch.randn(3, K)
    stored = [layer.state_dict() for layer in layers]
    layers[1].lay_in_strips()
    fused = FusedLinear.fuse(layers)
    expected = [part(x) for part in fused]
    fused[0].whole.lay_in_strips()
    assert fused[0].whole.in_strips
    for part, before, out in zip(fused, stored, expected, strict=True):
        torch.testing.assert_close(part(x), out)
        assert same({k: v for k, v in part.state_dict().items() if "stacked" not in k}, before)


def test_a_gradient_of_the_input():
    layer = layer_of()
    x = torch.randn(2, K, requires_grad=True)
    layer.lay_in_strips()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize().sum(0).expand(2, K))


def test_codes_of_8_bits_go_back_to_planar_words_for_int8_inputs():
    layer, x = layer_of(scheme="w8a16"), torch.randn(3, K)
    layer.input_group = None
    layer.lay_in_strips()
    assert layer.in_strips
    exact = layer(x)
    layer.input_group = -1
    layer.lay_in_strips()
    assert not layer.in_strips
    off = layer(x) - exact
    assert 0 < off.norm() < 0.02 * exact.norm()


def test_load_lays_out_what_is_faster_so_and_leaves_tables(tmp_path):
    passes = [compress.Embeddings(scheme="w4a16", group_size=32), compress.RTN(scheme="w4a16", group_size=32)]
    compress.quantize(build("gemma"), passes, output=tmp_path / "out", verify=False)
    model = compress.load(tmp_path / "out", torch.float32, int8_activations=True)
    layers = [layer for _, layer in compressed_layers(model) if isinstance(layer, PackedLinear)]
    tied = [layer for layer in layers if isinstance(layer, TiedLinear)]
    assert all(layer.in_strips != (layer in tied) for layer in layers)
    tokens = torch.arange(12).view(1, -1)
    exact = compress.load(tmp_path / "out", torch.float32, dequantize=True)(tokens).logits
    off = model(tokens).logits - exact
    assert off.norm() < 0.05 * exact.norm()
    assert model.get_input_embeddings()(tokens).isfinite().all()
