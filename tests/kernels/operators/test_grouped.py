"""Products of experts on the CPU: the routing, the operators' contract, and the layer that they make."""

import pytest
import torch
from combinations import each, every
from experts import combined_by_loop, experts_of, routings

from compress.base.errors import InputError
from compress.kernels import reference
from compress.kernels.operators import grouped


@every("name", list(routings()))
def test_pairs_are_sorted_by_expert(name):
    expert, experts = routings()[name]
    routing = grouped.sort_by_expert(expert, experts)
    assert (routing.token.dtype, routing.start.dtype) == (torch.int32, torch.int32)
    assert routing.place.sort().values.tolist() == list(range(expert.numel()))
    for p, (token, place) in enumerate(zip(routing.token.tolist(), routing.place.tolist(), strict=True)):
        assert token == place // expert.shape[1]
        assert expert.flatten()[place] == (routing.start <= p).sum() - 1


def arguments(name, dtype=torch.bfloat16, gradient=False):
    expert, experts = routings()[name]
    routing = grouped.sort_by_expert(expert, experts)
    x, weight, values, bias = experts_of(experts, len(expert), 48, 128, 32, 4, True, dtype)
    return (x.requires_grad_(gradient), *weight[:3], bias, *routing[:2], 4, 32), values, routing


@pytest.mark.parametrize(
    ("name", "dtype"), each(list(routings()), [torch.float32, torch.bfloat16, torch.float16, torch.float64])
)
def test_a_layer_of_experts_is_the_sum_over_its_tokens_experts(name, dtype):
    given, values, routing = arguments(name, dtype)
    expert, _ = routings()[name]
    out = grouped.grouped_words(*given)
    truth = grouped.reference(given[0].double(), values, *routing[:2], given[4].double())
    # The most that any weight lets through; `values` are exact, the loop's may be rounded to dtype.
    allowed = reference.tolerance(given[0].double(), values.abs().amax(0), truth[:1].abs().amax(), dtype).amax()
    rounded = torch.finfo(dtype).eps * given[0].double().abs().sum(-1).amax() * values.abs().amax()
    assert ((out.double() - truth).abs() <= allowed + rounded).all()
    share = torch.rand(expert.shape, generator=torch.Generator().manual_seed(0))
    expected = combined_by_loop(given[0].double(), values, given[4].double(), expert, share.double())
    close = {"rtol": 10 * torch.finfo(dtype).eps, "atol": float(10 * (allowed + rounded))}
    torch.testing.assert_close(grouped.combine(out, routing, share).double(), expected, **close)


@every(("symmetric", "static"), [(True, False), (False, False), (True, True)])
def test_int8_experts_are_the_reference(symmetric, static):
    expert, experts = routings()["uneven"]
    routing = grouped.sort_by_expert(expert, experts)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(len(expert), 96, generator=g)
    weight = torch.randint(-128, 128, (experts, 40, 96), generator=g, dtype=torch.int8)
    scale, bias = torch.rand(experts, 40, generator=g) * 0.01, torch.randn(experts, 40, generator=g)
    row_sum = weight.sum(-1, dtype=torch.int32)
    fixed = torch.tensor([0.03]) if static else None
    out = grouped.grouped_w8a8(x, weight, scale, row_sum, bias, fixed, None, *routing[:2], symmetric)
    codes, x_scale, x_zero = reference.quantize_tokens(x, symmetric)
    if static:
        codes, x_scale = reference.quantize_static(x, fixed), fixed.expand(len(x))
    for e, (first, last) in enumerate(zip(routing.start[:-1], routing.start[1:], strict=True)):
        mine = routing.token[first:last].long()
        zero = None if x_zero is None else x_zero[mine]
        part = reference.w8a8(codes[mine], x_scale[mine], zero, weight[e], scale[e], bias[e])
        assert torch.equal(out[first:last], part)
    assert routing.start[-1] < len(out)
    assert out[routing.start[-1] :].count_nonzero() == 0


@pytest.mark.parametrize("gradient", [True, False])
def test_contract(gradient):
    given, *_ = arguments("uneven", torch.float32, gradient)
    torch.library.opcheck(grouped.grouped_words.registered, given)
    x, _, _, _, _, token, start, *_ = given
    weight = torch.randint(-128, 128, (4, 40, 128), dtype=torch.int8)
    scale = torch.ones(4, 40)
    eight = (x, weight, scale, weight.sum(-1, dtype=torch.int32), None, None, None, token, start, False)
    torch.library.opcheck(grouped.grouped_w8a8.registered, eight)


def test_gradients_are_those_of_dense_experts():
    given, values, routing = arguments("uneven", torch.float32, gradient=True)
    dense = given[0].detach().clone().requires_grad_()
    grad = torch.randn(len(routing.token), 48, generator=torch.Generator().manual_seed(2))
    grouped.grouped_words(*given).backward(grad)
    grouped.reference(dense, values.float(), *routing[:2], None).backward(grad)
    torch.testing.assert_close(given[0].grad, dense.grad)
    weight = torch.randint(-128, 128, (4, 48, 128), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    scale = torch.rand(4, 48, generator=torch.Generator().manual_seed(4))
    given[0].grad = dense.grad = None
    grouped.grouped_w8a8(given[0], weight, scale, None, None, None, None, *routing[:2], True).backward(grad)
    grouped.reference(dense, weight * scale.unsqueeze(-1), *routing[:2], None).backward(grad)
    torch.testing.assert_close(given[0].grad, dense.grad, rtol=1e-4, atol=1e-3)


def test_what_does_not_fit_is_refused():
    (x, words, scale, zero, bias, token, start, *rest), *_ = arguments("uneven")
    with pytest.raises(InputError, match=r"x is \[40, 300\]; allowed: tokens by"):
        grouped.grouped_words(torch.zeros(40, 300), words, scale, zero, bias, token, start, *rest)
    with pytest.raises(InputError, match="4 starts for 4 experts"):
        grouped.grouped_words(x, words, scale, zero, bias, token, start[1:], *rest)
    codes = torch.zeros(4, 8, 128, dtype=torch.int8)
    with pytest.raises(InputError, match="row sums"):
        grouped.grouped_w8a8(x, codes, torch.ones(4, 8), None, None, None, None, token, start, False)
