"""The operator of C++: the same products as Python's way to the same loops, and what layers ask of it."""

import pytest
import torch
from combinations import every
from planar import inputs, planar_of
from torch import nn
from torch.autograd import forward_ad

from compress.errors import InputError
from compress.kernels import reference
from compress.kernels.cpu import direct
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.layouts.strips import pack_strips
from compress.runtime.layers.linear import QuantLinear

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAME = ("compress.cpu_linear.default", "compress.cpu_w8a8.default")


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


@every("dtype", DTYPES)
@every("fixed", [True, False])
@every("symmetric", [True, False])
def test_rows_of_int8_the_same_as_by_python_bit_for_bit(looped, fixed, symmetric, dtype):
    for M, K in ((1, 50), (4, 640), (5, 96), (17, 200)):
        g = torch.Generator().manual_seed(K)
        weight, scale = torch.randint(-128, 128, (48, K), generator=g, dtype=torch.int8), torch.rand(48, generator=g)
        x, bias = inputs(M, K, 48, dtype)
        zero = torch.tensor([5], dtype=torch.int32) if fixed and not symmetric else None
        ranges = (torch.tensor([0.03]) if fixed else None, zero, symmetric)
        given = (weight, scale, None if symmetric else reference.row_sums(weight), bias if M % 2 else None, *ranges)
        found = direct.w8a8(x.view(M, 1, K), *given)
        assert found.dtype == dtype
        assert torch.equal(found.view(M, 48), cpu_gemm.w8a8(x, *given))
        assert torch.equal(direct.w8a8(x.t().contiguous().t(), *given), found.view(M, 48))


def test_contract_of_rows():
    weight = torch.randint(-128, 128, (48, 96), dtype=torch.int8)
    x, bias = inputs(6, 96, 48, torch.float32)
    given = [x.view(2, 3, 96), weight, torch.rand(48), reference.row_sums(weight), bias, None, None, False]
    asked = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.compress.cpu_w8a8.default, tuple(given), test_utils=asked)
    assert direct.w8a8(x[:0], *given[1:]).shape == (0, 48)
    for place, wrong, words in (
        (0, torch.zeros(1, 512), "as many columns"),
        (1, weight.view(torch.uint8), "not int8"),
        (2, torch.rand(48).half(), "for every row"),
        (2, torch.rand(47), "for every row"),
        (3, torch.zeros(48), "in int32"),
        (3, None, "need the sums of rows"),
        (5, torch.ones(2), "input scale"),
        (6, torch.ones(1), "input zero point"),
    ):
        with pytest.raises(RuntimeError, match=words):
            direct.w8a8(*given[:place], wrong, *given[place + 1 :])


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


LAYOUTS = ("planar", "strips", "rows")


def layer_of(layout):
    torch.manual_seed(0)
    linear = nn.Linear(96, 48).requires_grad_(False)
    if layout == "rows":
        return QuantLinear.from_linear(linear, "w8a8")
    layer = QuantLinear.from_linear(linear, "w4a16", 32)
    if layout == "strips":
        layer.input_group = -1
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_calls_it_where_no_gradient_is_asked_for(layout, monkeypatch):
    called = []
    name = "w8a8" if layout == "rows" else "linear"
    through = getattr(direct, name)
    monkeypatch.setattr(direct, name, lambda *a: called.append(1) or through(*a))
    layer, x = layer_of(layout), torch.randn(5, 96)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_holds_it_as_one_node(layout):
    layer, x = layer_of(layout), torch.randn(5, 96)
    expected = layer(x)
    with torch.no_grad():
        found, seen = nodes(layer, x)
    assert torch.equal(found, expected)
    name = NAME[layout == "rows"]
    assert seen == [name]
    _, seen = nodes(layer, x.requires_grad_())
    assert name not in seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_compiler_layers_take_the_other_way(layout, monkeypatch):
    layer, x = layer_of(layout), torch.randn(5, 96)
    expected = layer(x)
    monkeypatch.setattr(direct, "why_not", lambda: ("no compiler",))
    direct._takes.cache_clear()
    monkeypatch.setattr(direct, "linear", None)
    monkeypatch.setattr(direct, "w8a8", None)
    assert torch.equal(layer(x), expected)
    direct._takes.cache_clear()
