"""The operator of C++: the same products as Python's way to the same loops, and what layers ask of it."""

from itertools import pairwise

import pytest
import torch
from combinations import every
from experts import experts_of, routings
from planar import inputs, planar_of
from torch import nn
from torch.autograd import forward_ad

from compress.base.errors import InputError
from compress.inference.layers.linear import QuantLinear
from compress.kernels import reference
from compress.kernels.cpu import direct
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.layouts.strips import pack_strips
from compress.kernels.layouts.words import CodeWords
from compress.kernels.operators import grouped

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
            expected = cpu_gemm.words(x, weight, added)
        else:
            expected = cpu_gemm.words(x, weight, added, input_group)
        assert torch.equal(direct.operators.cpu_linear(x, *weight[:3], *sizes), expected)
        if bits == 4:
            laid = pack_strips(weight, K)
            found = direct.operators.cpu_linear(x.view(M, 1, K), *laid[:3], *sizes)
            assert found.shape == (M, 1, 48)
            assert torch.equal(found.view(M, 48), cpu_gemm.words(x, laid, added, input_group))
            turned = x.t().contiguous().t()
            assert torch.equal(direct.operators.cpu_linear(turned, *laid[:3], *sizes), found.view(M, 48))


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
        found = direct.operators.cpu_w8a8(x.view(M, 1, K), *given)
        assert found.dtype == dtype
        assert torch.equal(found.view(M, 48), cpu_gemm.w8a8(x, *given))
        assert torch.equal(direct.operators.cpu_w8a8(x.t().contiguous().t(), *given), found.view(M, 48))


def test_contract_of_rows():
    weight = torch.randint(-128, 128, (48, 96), dtype=torch.int8)
    x, bias = inputs(6, 96, 48, torch.float32)
    given = [x.view(2, 3, 96), weight, torch.rand(48), reference.row_sums(weight), bias, None, None, False]
    asked = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.compress.cpu_w8a8.default, tuple(given), test_utils=asked)
    assert direct.operators.cpu_w8a8(x[:0], *given[1:]).shape == (0, 48)
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
            direct.operators.cpu_w8a8(*given[:place], wrong, *given[place + 1 :])


def test_contract():
    weight, _ = planar_of(48, 256, 4, 64, False, torch.float32)
    x, bias = inputs(6, 256, 48, torch.float32)
    for words in (weight[:3], pack_strips(weight, 256)[:3]):
        given = (x.view(2, 3, 256), *words, bias, 4, 64, None)
        # No gradient is registered: layers do not ask for one here.
        asked = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.compress.cpu_linear.default, given, test_utils=asked)
    assert direct.operators.cpu_linear(x[:0], *weight[:3], None, 4, 64, None).shape == (0, 48)
    with pytest.raises(RuntimeError, match="does not hold as many columns"):
        direct.operators.cpu_linear(torch.zeros(1, 512), *weight[:3], None, 4, 64, None)


def by_expert(routing, rows, product, *of_each, how):
    """[P, N] of each expert's rows by its own product, zeros for no expert. of_each: lists of arguments."""
    parts = zip(pairwise(routing.start.tolist()), *of_each, strict=True)
    out = [product(rows[first:last], *own, *how) for (first, last), *own in parts]
    return torch.cat([*out, out[0].new_zeros(len(rows) - routing.start[-1], out[0].shape[1])])


@every("dtype", DTYPES)
@every("name", list(routings()))
def test_experts_are_their_own_products_bit_for_bit(name, dtype):
    expert, experts = routings()[name]
    routing = grouped.sort_by_expert(expert, experts)
    for bits, zero, input_group, strips in (
        (4, True, None, False),
        (4, False, -1, True),
        (4, True, 128, False),
        (8, True, None, True),
    ):
        x, weight, _, bias = experts_of(experts, len(expert), 48, 160, 32, bits, zero, dtype)
        parts = [CodeWords(w, s, None if z is None else z, 32, bits) for w, s, z in each_of(weight)]
        if strips:
            parts = [pack_strips(part, 160) for part in parts]
        words, scales, zeros = ([part[i] for part in parts] for i in range(3))
        stacked = (torch.stack(words), torch.stack(scales), torch.stack(zeros) if zero else None)
        sizes, rows = (bits, 32, input_group), x[routing.token.long()]
        expected = by_expert(routing, rows, direct.operators.cpu_linear, words, scales, zeros, bias, how=sizes)
        assert torch.equal(direct.operators.cpu_experts(x, *stacked, bias, *routing[:2], *sizes), expected)
        assert torch.equal(direct.operators.cpu_experts(rows, *stacked, bias, None, routing.start, *sizes), expected)
    weight = torch.randint(-128, 128, (experts, 48, 160), dtype=torch.int8)
    scale, total = torch.rand(experts, 48), weight.sum(-1, dtype=torch.int32)
    expected = by_expert(routing, rows, direct.operators.cpu_w8a8, weight, scale, total, bias, how=(None, None, False))
    eight = (weight, scale, total, bias, None, None)
    assert torch.equal(direct.operators.cpu_experts_w8a8(x, *eight, *routing[:2], False), expected)


def each_of(weight):
    """(Words, scale, zero points or None) of every expert."""
    zeros = [None] * len(weight.words) if weight.zero is None else weight.zero
    return zip(weight.words, weight.scale, zeros, strict=True)


def test_contract_of_experts():
    expert, experts = routings()["uneven"]
    routing = grouped.sort_by_expert(expert, experts)
    x, weight, _, bias = experts_of(experts, len(expert), 48, 128, 32, 4, True, torch.float32)
    given = [x, *weight[:3], bias, *routing[:2], 4, 32, None]
    asked = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.compress.cpu_experts.default, tuple(given), test_utils=asked)
    codes = torch.randint(-128, 128, (experts, 48, 128), dtype=torch.int8)
    rows = (x, codes, torch.rand(experts, 48), None, bias, None, None, *routing[:2], True)
    torch.library.opcheck(torch.ops.compress.cpu_experts_w8a8.default, rows, test_utils=asked)
    assert direct.operators.cpu_experts(
        x, *weight[:3], bias, routing.token[:0], 0 * routing.start, 4, 32, None
    ).shape == (0, 48)
    start, token = routing.start, routing.token
    for place, wrong, words in (
        (0, torch.zeros(2, 512), "does not hold as many columns"),
        (0, torch.zeros(40), "not of rows with columns"),
        (5, token.long(), "not int32"),
        (5, token + 1, "no such token"),
        (6, start[1:], "a start in int32 for every expert"),
        (6, start.long(), "a start in int32 for every expert"),
        (6, start.flip(0), "not those of the pairs"),
        (6, start + 1, "not those of the pairs"),
        (6, torch.tensor([0, 9, 3, 9, 9], dtype=torch.int32), "not sorted"),
    ):
        with pytest.raises(RuntimeError, match=words):
            direct.operators.cpu_experts(*given[:place], wrong, *given[place + 1 :])


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
    through = direct._calls[name]
    monkeypatch.setitem(direct._calls, name, lambda *a: called.append(1) or through(*a))
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
    monkeypatch.setattr(direct, "_calls", {})
    direct.takes_sizes.cache_clear()
    assert torch.equal(layer(x), expected)
    direct.takes_sizes.cache_clear()
