"""The operators on the CPU: contract with PyTorch, gradient, compilation, and the reasons behind the dispatch."""

import pytest
import torch
from combinations import every

from compress.base.errors import InputError
from compress.kernels import reference, workspace
from compress.kernels.layouts import words as pack
from compress.kernels.operators import words as ops
from compress.kernels.operators.devices import path_of
from compress.kernels.operators.int8_rows import w8a8_linear, why_not_w8a8
from compress.kernels.operators.rounding import round_output
from compress.weights.grid import Grid, quantize


def planar_of(bits=4, N=48, K=256, group=64, symmetric=False, dtype=torch.bfloat16):
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K))
    grid = Grid(bits=bits, symmetric=symmetric, granularity="group", group_size=group)
    quantized = quantize(weight, grid, dtype)
    return pack.to_planar(quantized.codes, quantized.scale, quantized.zero_point, bits, dtype), quantized


def weight_only_arguments(dtype=torch.bfloat16, bits=4, bias=True, gradient=False):
    planar, _ = planar_of(bits=bits, dtype=dtype)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 256, generator=g).to(dtype).requires_grad_(gradient)
    added = torch.randn(48, generator=g).to(dtype) if bias else None
    return x, planar.words, planar.scale, planar.zero, added, bits, planar.group_size


def w8a8_arguments(symmetric=False, static=False, gradient=False, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 96, generator=g).to(dtype).requires_grad_(gradient)
    weight = torch.randint(-128, 128, (40, 96), generator=g, dtype=torch.int8)
    scale, bias = torch.rand(40, generator=g) * 0.01, torch.randn(40, generator=g)
    fixed = (torch.tensor([0.03]), None if symmetric else torch.tensor([5], dtype=torch.int32))
    return x, weight, scale, reference.row_sums(weight), bias, *(fixed if static else (None, None)), symmetric


@every("bits", [4, 8])
@every("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weight_only_is_the_reference(dtype, bits):
    planar, quantized = planar_of(bits=bits, dtype=dtype)
    x, *_, bias, _, _ = weight_only_arguments(dtype, bits)
    out = ops.words_linear(x, planar.words, planar.scale, planar.zero, bias, bits, planar.group_size)
    weight = quantized.dequantize().double()
    truth = x.double().view(6, 256) @ weight.t() + bias.double()
    allowed = reference.tolerance(x.double().view(6, 256), weight, truth, dtype)
    assert out.dtype == dtype
    assert out.shape == (2, 3, 48)
    assert ((out.double().view(6, 48) - truth).abs() <= allowed).all()


@every("symmetric", [True, False])
@every("static", [True, False])
def test_w8a8_is_the_reference(symmetric, static):
    arguments = w8a8_arguments(symmetric, static, dtype=torch.float32)
    x, weight, scale, _, bias, x_scale, x_zero, _ = arguments
    x_MK = x.view(6, 96)
    if static:
        codes = reference.quantize_static(x_MK, x_scale, x_zero)
    else:
        codes, x_scale, x_zero = reference.quantize_tokens(x_MK, symmetric)
    expected = reference.w8a8(codes, x_scale, x_zero, weight, scale, bias)
    assert torch.equal(w8a8_linear(*arguments), expected.view(2, 3, 40))


def test_static_quantization_is_the_grids():
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)) * 3
    grid = Grid(bits=8, symmetric=False, granularity="tensor")
    scale, zero = torch.tensor([[0.02]]), torch.tensor([[7.0]])
    expected = quantize(x, grid, scale=scale, zero_point=zero)
    assert torch.equal(reference.quantize_static(x, scale[0], zero[0].int()), expected.codes)


def rounding_arguments(kind="int", symmetric=False, gradient=False, dtype=torch.bfloat16):
    y = (torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(4)) * 3).to(dtype).requires_grad_(gradient)
    scale = torch.tensor([0.02]).repeat(40)
    return y, scale, None if symmetric else torch.tensor([7], dtype=torch.int32).repeat(40), kind == "float"


@every("dtype", [torch.float16, torch.bfloat16, torch.float32])
@every(("kind", "symmetric"), [("int", True), ("int", False), ("float", True)])
def test_rounded_outputs_are_the_grids(kind, symmetric, dtype):
    y, scale, zero, floating = rounding_arguments(kind, symmetric, dtype=dtype)
    y[0, 0, 0], y[0, 0, 1] = 50, -50  # beyond what int8 codes reach
    grid = Grid(bits=8, symmetric=symmetric, granularity="tensor", type=kind)
    given = None if zero is None else zero[:1, None]
    expected = quantize(y.flatten(0, 1), grid, torch.float32, scale[:1, None], given).dequantize(dtype)
    assert torch.equal(round_output(y, scale, zero, floating), expected.view_as(y))
    assert not torch.equal(expected.view_as(y), y)


@pytest.mark.parametrize(
    ("kind", "symmetric", "gradient"), [("int", True, True), ("int", False, False), ("float", True, True)]
)
def test_contract_of_rounding(kind, symmetric, gradient):
    torch.library.opcheck(round_output.registered, rounding_arguments(kind, symmetric, gradient))
    y, *fixed = rounding_arguments(kind, symmetric, gradient=True)
    grad = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    round_output(y, *fixed).backward(grad)
    assert torch.equal(y.grad, grad)
    with pytest.raises(InputError, match="y has 39 columns, there are 40 scales"):
        round_output(y[..., :39], *fixed)


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("arguments", [weight_only_arguments, w8a8_arguments])
def test_contract(arguments, gradient):
    op = ops.words_linear if arguments is weight_only_arguments else w8a8_linear
    torch.library.opcheck(op.registered, arguments(gradient=gradient))


def test_weight_only_gradient():
    x, words, scale, zero, bias, bits, group = weight_only_arguments(torch.float32, gradient=True)
    grad = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(3))
    ops.words_linear(x, words, scale, zero, bias, bits, group).backward(grad)
    dense = pack.planar_weight(pack.CodeWords(words, scale, zero, group, bits), 256)
    torch.testing.assert_close(x.grad, grad @ dense)


def test_gradient_operator_contract_and_its_own_gradient():
    _, words, scale, zero, _, bits, group = weight_only_arguments(torch.float32, gradient=True)
    grad = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(3)).requires_grad_()
    arguments = (grad, (2, 3, 256), words, scale, zero, None, bits, group)
    torch.library.opcheck(ops.words_gradient.registered, arguments)
    dense = pack.planar_weight(pack.CodeWords(words, scale, zero, group, bits), 256)
    back = ops.words_gradient(*arguments)
    torch.testing.assert_close(back, grad @ dense)
    (twice,) = torch.autograd.grad(back, grad, torch.ones_like(back))
    torch.testing.assert_close(twice, torch.ones_like(back) @ dense.t())


def test_what_the_fused_kernel_refuses_can_be_dequantized():
    """But for the device, which is a CPU here."""
    planar, _ = planar_of(dtype=torch.float32)
    x = torch.zeros(1, 256)
    assert len(ops.why_not_weight_only(x, planar._replace(group_size=96))) == 3
    assert ops.why_not_dequantize(x, planar._replace(group_size=96)) == ["the device is cpu, not cuda"]
    assert any("float64" in reason for reason in ops.why_not_dequantize(x.double(), planar))
    assert ops.weight_only_path(x, planar) == ("cpu", None)


def test_w8a8_gradient_is_straight_through():
    arguments = w8a8_arguments(gradient=True, dtype=torch.float32)
    grad = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(3))
    w8a8_linear(*arguments).backward(grad)
    x, weight, scale, *_ = arguments
    torch.testing.assert_close(x.grad, grad @ (weight * scale[:, None]))


def test_compiles_into_one_graph():
    def layer(x, words, scale, zero, bias, bits, group):
        return torch.nn.functional.silu(ops.words_linear(x * 2, words, scale, zero, bias, bits, group)).sum(-1)

    arguments = weight_only_arguments(torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*arguments), layer(*arguments))
    longer = (torch.randn(7, 5, 256, generator=torch.Generator().manual_seed(4)), *arguments[1:])
    torch.testing.assert_close(compiled(*longer), layer(*longer))
    eight = w8a8_arguments(dtype=torch.float32)
    compiled = torch.compile(lambda *a: w8a8_linear(*a).relu(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*eight), w8a8_linear(*eight).relu())


def test_reasons_name_what_was_given_and_what_is_allowed():
    planar, _ = planar_of()
    x = torch.zeros(1, 256)
    reasons = ops.why_not_weight_only(x, planar._replace(group_size=96))
    assert any("cpu" in reason for reason in reasons)
    assert any("float32" in reason and "bfloat16" in reason for reason in reasons)
    assert any("96" in reason and "128" in reason for reason in reasons)
    assert path_of(x.device, reasons) == "cpu"
    assert path_of(torch.device("cuda"), reasons) == "reference"
    assert path_of(torch.device("cuda"), []) == "triton"
    assert any("65536" in reason for reason in why_not_w8a8(x, torch.zeros(1, 2**16, dtype=torch.int8)))


@every("group", [32, 64, 128, 256, -1])
def test_groups_that_the_kernel_takes(group):
    planar, _ = planar_of()
    reasons = ops.why_not_weight_only(torch.zeros(1, 256, dtype=torch.bfloat16), planar._replace(group_size=group))
    assert not any("group" in reason for reason in reasons)


def test_wrong_columns_are_refused():
    arguments = weight_only_arguments()
    with pytest.raises(InputError, match="x has 100 columns"):
        ops.words_linear(arguments[0][..., :100], *arguments[1:])
    eight = w8a8_arguments()
    with pytest.raises(InputError, match="x has 50 columns, the weight 96"):
        w8a8_linear(eight[0][..., :50], *eight[1:])


def test_asymmetric_activations_need_row_sums():
    arguments = list(w8a8_arguments())
    arguments[3] = None
    with pytest.raises(InputError, match="row sums"):
        w8a8_linear(*arguments)


@pytest.fixture
def owner(monkeypatch):
    """Whose turn it is to launch: a list of (capture, stream), of which the last counts; an arena of four slices."""
    for name in ("_arenas", "_free", "_taken"):
        monkeypatch.setattr(workspace, name, {})
    monkeypatch.setattr(workspace, "SLICES", 4)
    turns = [(0, 1)]
    monkeypatch.setattr(workspace, "owner_of", lambda device: workspace.Owner(device, *turns[-1]))
    return turns


def counters_of(owner, *turns):
    found = []
    for turn in turns:
        owner.append(turn)
        found.append(workspace.counters(torch.device("cpu")))
    return found


def test_counters_are_shared_by_what_runs_in_order(owner):
    """A stream has its slice, a graph one for each of its streams, however many of its calls are captured."""
    turns = [(0, 1), (0, 2), (7, 1), (8, 1)]
    first = counters_of(owner, *turns)
    assert len({t.data_ptr() for t in first}) == 4
    assert [t.data_ptr() for t in counters_of(owner, *turns)] == [t.data_ptr() for t in first]


def test_beyond_the_arena_counters_are_fresh_zeros(owner):
    turns = [(0, 1), (7, 1), (7, 2), (8, 1), (9, 1), (9, 1)]
    found = counters_of(owner, *turns)
    assert len({t.data_ptr() for t in found}) == len(turns)
    assert all(t.shape == (workspace.SLICE,) and t.count_nonzero() == 0 for t in found)


def test_what_a_benchmark_captures_does_not_use_the_arena_up(owner):
    """286 of the 435 graphs of a tuning run got a memset of their own that no model has."""
    counters_of(owner, (0, 1), (1, 1))
    inside = workspace._arenas[torch.device("cpu")].untyped_storage().data_ptr()
    for capture in range(2, 400):
        with workspace.borrowed():
            (found,) = counters_of(owner, (capture, 1))
        assert found.untyped_storage().data_ptr() == inside
    assert set(workspace._taken) == {workspace.Owner(torch.device("cpu"), capture, 1) for capture in (0, 1)}


def test_a_capture_without_preparation_gets_zeros(owner):
    (found,) = counters_of(owner, (7, 1))
    assert found.count_nonzero() == 0
    assert workspace._arenas == {}


def test_captures_that_cannot_be_told_apart_share_nothing(monkeypatch):
    monkeypatch.setattr(workspace, "_driver", lambda: None)
    numbers = [workspace._capture_of(5) for _ in range(3)]
    assert len(set(numbers)) == 3
    assert all(number < 0 for number in numbers)
