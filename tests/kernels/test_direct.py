"""The operator of C++: the same products as Python's way to the same loops, and what layers ask of it."""

import pytest
import torch
from combinations import every
from planar import inputs, planar_of
from torch import nn
from torch.autograd import forward_ad

from compress.errors import InputError
from compress.kernels.cpu import direct
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.pack_strips import pack_strips
from compress.runtime.linear import QuantLinear

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAME = "compress.cpu_linear.default"


@pytest.fixture(scope="module", autouse=True)
def operator():
    if direct.why_not():
        pytest.skip("; ".join(direct.why_not()))


@every("dtype", DTYPES)
@every(("K", "group"), [(96, 32), (200, -1), (640, 128)])
@every("symmetric", [True, False])
def test_the_same_as_by_python_bit_for_bit(looped, K, group, symmetric, dtype):
    for bits, input_group, M in ((4, None, 1), (4, -1, 7), (4, 128, 17), (8, None, 2), (8, -1, 63)):
        weight, _ = planar_of(48, K, bits, group, symmetric, dtype)
        x, bias = inputs(M, K, 48, dtype)
        added = bias if M % 2 else None
        sizes = (added, bits, group, input_group)
        if input_group is None:
            expected = cpu_gemm.weight_only(x, weight, added)
        else:
            expected = cpu_gemm.int8_activation(x, weight, added, input_group)
        assert torch.equal(direct.linear(x, *weight[:3], *sizes), expected)
        if bits == 4:
            laid = pack_strips(weight, K)
            found = direct.linear(x.view(M, 1, K), *laid[:3], *sizes)
            assert found.shape == (M, 1, 48)
            assert torch.equal(found.view(M, 48), cpu_gemm.strips(x, laid, added, input_group))
            turned = x.t().contiguous().t()
            assert torch.equal(direct.linear(turned, *laid[:3], *sizes), found.view(M, 48))


def test_contract():
    weight, _ = planar_of(48, 256, 4, 64, False, torch.float32)
    x, bias = inputs(6, 256, 48, torch.float32)
    for words in (weight[:3], pack_strips(weight, 256)[:3]):
        given = (x.view(2, 3, 256), *words, bias, 4, 64, None)
        # No gradient is registered: layers do not ask for one here.
        asked = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.compress.cpu_linear.default, given, test_utils=asked)
    assert direct.linear(x[:0], *weight[:3], None, 4, 64, None).shape == (0, 48)
    with pytest.raises(RuntimeError, match="does not hold as many columns"):
        direct.linear(torch.zeros(1, 512), *weight[:3], None, 4, 64, None)


def layer_of(strips):
    torch.manual_seed(0)
    layer = QuantLinear.from_linear(nn.Linear(96, 48).requires_grad_(False), "w4a16", 32)
    layer.input_group = -1 if strips else None
    if strips:
        layer.lay_in_strips()
        assert layer.in_strips
    return layer


def nodes(call, x):
    """What a call records in a graph, and what it returns there."""
    seen = []

    def look(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(call, backend=look, fullgraph=True)(x), seen


@pytest.mark.parametrize("strips", [True, False])
def test_a_layer_calls_it_where_no_gradient_is_asked_for(strips, monkeypatch):
    called = []
    through = direct.linear
    monkeypatch.setattr(direct, "linear", lambda *a: called.append(1) or through(*a))
    layer, x = layer_of(strips), torch.randn(5, 96)
    out = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x.requires_grad_()), out)
    assert len(called) == 2
    layer(x).sum().backward()
    with forward_ad.dual_level():
        layer(x.detach())
    with pytest.raises(InputError, match="x has 320 columns"):
        layer(torch.randn(5, 320))
    with pytest.raises(InputError, match="convert the model"):
        layer(torch.randn(5, 96).bfloat16())
    assert len(called) == 2
    assert x.grad is not None


@pytest.mark.parametrize("strips", [True, False])
def test_a_graph_holds_it_as_one_node(strips):
    layer, x = layer_of(strips), torch.randn(5, 96)
    expected = layer(x)
    with torch.no_grad():
        found, seen = nodes(layer, x)
    assert torch.equal(found, expected)
    assert seen == [NAME]
    _, seen = nodes(layer, x.requires_grad_())
    assert NAME not in seen


def test_without_a_compiler_layers_take_the_other_way(monkeypatch):
    layer, x = layer_of(True), torch.randn(5, 96)
    expected = layer(x)
    monkeypatch.setattr(direct, "why_not", lambda: ("no compiler",))
    direct._takes.cache_clear()
    monkeypatch.setattr(direct, "linear", None)
    assert torch.equal(layer(x), expected)
    direct._takes.cache_clear()
