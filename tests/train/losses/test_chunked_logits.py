"""The loss on logits that are never whole: the plain one's values and gradients, in a part of its memory."""

import math

import pytest
import torch
from combinations import every, pairs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compress.train.losses.chunked_logits import Head, HiddenTeacher, chunked_logits_loss
from compress.train.losses.logits import LogitsLoss, logits_loss
from compress.train.losses.top_k import top_k

T, D, E, V = 10, 4, 6, 13
LABELS = torch.tensor([3, -100, 0, 10, -100, 5, 12, 1, 1, 2])


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def heads(dtype: torch.dtype = torch.float64, **options: float) -> tuple[Head, Head]:
    """Of the student, with gradients and a bias; of the teacher."""
    weight, bias = drawn(V, D, seed=1, dtype=dtype).requires_grad_(), drawn(V, seed=2, dtype=dtype).requires_grad_()
    return Head(weight, bias, **options), Head(drawn(V, E, seed=3, dtype=dtype), **options)


def teachers(head: Head, dtype: torch.dtype = torch.float64) -> dict[str, object]:
    hidden = drawn(T, E, seed=4, dtype=dtype)
    logits = head.finish(head.product(hidden))
    return {"hidden": HiddenTeacher(hidden, head), "logits": logits, "top k": top_k(logits, 5, 2.0), "none": None}


def of(total: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return total.detach(), *torch.autograd.grad(total, leaves)


@every(
    ("teacher", "tokens", "kind", "options"),
    pairs(
        ("hidden", "logits", "top k", "none"),
        (1, 3, 8, 99),
        ("forward", "reverse", "jensen-shannon"),
        ({}, {"scale": 0.25}, {"scale": 2.0, "softcap": 3.0}),
    ),
)
def test_values_and_gradients_are_those_of_whole_logits(teacher, tokens, kind, options) -> None:
    head, theirs = heads(**options)
    hidden, given = drawn(T, D).requires_grad_(), teachers(theirs)
    how = LogitsLoss(kind=kind, temperature=2.0, alpha=0.0 if teacher == "none" else 0.6)
    leaves = hidden, head.weight_VD, head.bias_V
    whole = given["logits"] if teacher == "hidden" else given[teacher]
    plain = logits_loss(head.finish(head.product(hidden)), whole, labels_T=LABELS, how=how)
    ours = chunked_logits_loss(hidden, head, given[teacher], labels_T=LABELS, how=how, chunk_values=tokens * V)
    assert plain.count == ours.count == 8
    torch.testing.assert_close(of(ours.total, *leaves), of(plain.total, *leaves))


def test_a_head_scales_then_caps() -> None:
    hidden, weight, bias = drawn(3, D), drawn(V, D, seed=1), drawn(V, seed=2)
    for scale, cap in ((1.0, None), (0.25, None), (2.0, 3.0)):
        head = Head(weight, bias, scale=scale, softcap=cap)
        for row, found in zip(hidden.tolist(), head.finish(head.product(hidden)).tolist(), strict=True):
            for w, b, logit in zip(weight.tolist(), bias.tolist(), found, strict=True):
                expected = scale * (sum(x * y for x, y in zip(row, w, strict=True)) + b)
                assert logit == pytest.approx(expected if cap is None else cap * math.tanh(expected / cap))


def test_gradients_are_those_of_the_values() -> None:
    head, theirs = heads(softcap=5.0)
    given = teachers(theirs)["hidden"]

    def total(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = Head(weight, bias, softcap=5.0)
        return 3 * chunked_logits_loss(hidden, own, given, labels_T=LABELS, chunk_values=4 * V).total

    assert torch.autograd.gradcheck(total, (drawn(T, D).requires_grad_(), head.weight_VD, head.bias_V))


def test_only_what_is_asked_for_has_a_gradient() -> None:
    head, theirs = heads()
    given, hidden = teachers(theirs)["hidden"], drawn(T, D).requires_grad_()
    expected = of(chunked_logits_loss(hidden, head, given).total, hidden)
    frozen = Head(head.weight_VD.detach(), None if head.bias_V is None else head.bias_V.detach())
    torch.testing.assert_close(of(chunked_logits_loss(hidden, frozen, given).total, hidden), expected)
    total = chunked_logits_loss(hidden.detach(), head, given).total
    assert torch.autograd.grad(total, head.weight_VD, retain_graph=True)[0].shape == (V, D)
    again = torch.autograd.grad(2 * total, head.weight_VD)[0]  # nothing was changed in place by the first
    torch.testing.assert_close(again, 2 * of(chunked_logits_loss(hidden, head, given).total, head.weight_VD)[1])
    with torch.no_grad():
        silent = chunked_logits_loss(hidden, head, given).total
    assert not silent.requires_grad
    torch.testing.assert_close(silent, expected[0])


@every("dtype", (torch.bfloat16, torch.float16))
def test_few_bits_lose_no_more_than_whole_logits_of_few_bits(dtype) -> None:
    """Both against float64; the chunked head's gradient is summed in float32, over many tokens."""
    tokens, found = 400, {}
    for name, wanted in (("exact", torch.float64), ("plain", dtype), ("chunked", dtype)):
        hidden = drawn(tokens, D, dtype=dtype).to(wanted).requires_grad_()
        weight = drawn(V, D, seed=1, dtype=dtype).to(wanted).requires_grad_()
        teacher = drawn(tokens, V, seed=4)
        if name == "chunked":
            total = chunked_logits_loss(hidden, Head(weight), teacher, chunk_values=16 * V).total
        else:
            total = logits_loss(hidden @ weight.T, teacher).total
        # As a step does, by the mean: the sum's gradient would overflow float16.
        found[name] = [each.double() for each in of(total / tokens, hidden, weight)]
    for exact, plain, ours in zip(*(found[name] for name in ("exact", "plain", "chunked")), strict=True):
        assert (ours - exact).norm() <= 1.5 * (plain - exact).norm() + 1e-6 * exact.norm()


def test_a_gradient_of_half_precision_is_rounded_when_it_is_a_mean() -> None:
    """The sum over these tokens is beyond float16, their mean is not."""
    tokens = 2000
    hidden = torch.full((tokens, 1), 60.0, dtype=torch.float16)
    weight = torch.zeros(2, 1, dtype=torch.float16, requires_grad=True)
    found = chunked_logits_loss(hidden, Head(weight), torch.tensor([[0.0, -30.0]]).expand(tokens, 2), chunk_values=64)
    (grad,) = torch.autograd.grad(found.mean(), weight)
    torch.testing.assert_close(grad, torch.tensor([[-30.0], [30.0]], dtype=torch.float16))


def test_under_autocast_it_is_the_plain_loss_under_autocast() -> None:
    found = []
    for chunked in (False, True):
        hidden, weight = (drawn(n, D, dtype=torch.float32).requires_grad_() for n in (T, V))
        teacher = drawn(T, V, seed=4)
        with torch.autocast("cpu", torch.bfloat16):
            if chunked:
                total = chunked_logits_loss(hidden, Head(weight), teacher, chunk_values=3 * V).total
            else:
                total = logits_loss(torch.nn.functional.linear(hidden, weight), teacher).total
        found.append(of(total, hidden, weight))
    assert found[1][2].dtype == torch.float32
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)


class Largest(TorchDispatchMode):
    """The number of values of the largest tensor that any operation makes."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.device.type != "meta":
                self.values = max(self.values, each.untyped_storage().nbytes() // each.element_size())
        return made


@every(("teacher", "dtype"), pairs(("hidden", "top k"), (torch.float32, torch.bfloat16)))
def test_no_tensor_is_larger_than_a_chunk_or_the_head(teacher, dtype) -> None:
    tokens, width, vocabulary, chunk = 512, 8, 1024, 16 * 1024
    hidden = drawn(tokens, width, dtype=dtype).requires_grad_()
    head = Head(drawn(vocabulary, width, seed=1, dtype=dtype).requires_grad_())
    given = {
        "hidden": HiddenTeacher(drawn(tokens, 6, dtype=dtype), Head(drawn(vocabulary, 6, dtype=dtype))),
        "top k": top_k(drawn(tokens, vocabulary), 8),
    }[teacher]
    labels, how = torch.zeros(tokens, dtype=torch.int64), LogitsLoss(alpha=0.5)
    with Largest() as largest:
        chunked_logits_loss(hidden, head, given, labels_T=labels, how=how, chunk_values=chunk).total.backward()
    assert largest.values <= chunk
    with Largest() as largest:
        logits = head.finish(head.product(hidden))
        logits_loss(logits, top_k(drawn(tokens, vocabulary), 8), labels_T=labels, how=how).total.backward()
    assert largest.values >= tokens * vocabulary
