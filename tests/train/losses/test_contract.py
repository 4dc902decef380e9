"""What every loss keeps to: a sum and a count, of what is valid, in any cut, in any dtype."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from combinations import every
from torch import Tensor

from compress.train.losses.attention import attention_loss
from compress.train.losses.chunked_logits import Head, HiddenTeacher, chunked_logits_loss
from compress.train.losses.contrastive import Candidates, info_nce
from compress.train.losses.features import features_loss
from compress.train.losses.logits import LogitsLoss, logits_loss
from compress.train.losses.loss_sum import Summed
from compress.train.losses.relations import relations_loss
from compress.train.losses.top_k import top_k

B, T, D, V = 3, 4, 6, 7
MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]])  # the second sample is all padding


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HEAD, THEIRS = Head(drawn(V, D, seed=1), drawn(V, seed=2)), HiddenTeacher(drawn(B, T, D, seed=3), Head(drawn(V, D)))
LABELS = torch.arange(B * T).view(B, T) % V
MIXED = LogitsLoss(alpha=0.5, temperature=2.0)
FIXED = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
Loss = Callable[[Tensor, Tensor | None, slice], Summed]


def on_logits(x: Tensor, mask: Tensor | None, part: slice, kind: str, k: int | None = None) -> Summed:
    """Labels are ignored where the mask is zero: two ways to say one thing."""
    teacher = drawn(B, T, V, seed=3)[part].to(x.dtype)
    how = LogitsLoss(kind=kind, alpha=0.5, temperature=2.0)
    labels = LABELS[part] if mask is None else LABELS[part].where(mask != 0, -100)
    return logits_loss(x, teacher if k is None else top_k(teacher, k, 2.0), labels_T=labels, how=how)


def on_hidden(x: Tensor, mask: Tensor | None, part: slice) -> Summed:
    head, theirs = (Head(*(each if each is None else each.to(x.dtype) for each in h[:2])) for h in (HEAD, THEIRS.head))
    teacher = HiddenTeacher(THEIRS.hidden_TE[part].to(x.dtype), theirs)
    return chunked_logits_loss(x, head, teacher, labels_T=LABELS[part], mask_T=mask, how=MIXED, chunk_values=2 * V)


def on_maps(x: Tensor, mask: Tensor | None, part: slice, measure: str) -> Summed:
    """Maps of two heads against four; padding excluded by zeros, as a model's softmax has it."""
    teacher = drawn(B, 4, T, T, seed=3)[part].softmax(-1).to(x.dtype)
    if mask is not None:
        padded = (mask == 0)[:, None, None, :]
        x, teacher = x.masked_fill(padded, 0), teacher.masked_fill(padded, 0)
    return attention_loss(x, teacher, mask_BK=mask, measure=measure, heads="group")


def on_relations(x: Tensor, mask: Tensor | None, part: slice, causal: bool) -> Summed:
    return relations_loss(x, drawn(B, T, 8, seed=3)[part].to(x.dtype), 2, mask_BT=mask, causal=causal)


def on_samples(x: Tensor, mask: Tensor | None, part: slice) -> Summed:
    teacher = drawn(B, T, D, seed=4).flatten(0, 1).to(x.dtype)
    own = torch.arange(len(x) * T) + part.start * T
    return info_nce(x.flatten(0, 1), Candidates(teacher, own), mask_N=None if mask is None else mask.flatten())


LOSSES: dict[str, tuple[tuple[int, ...], Loss]] = {
    **{kind: ((T, V), partial(on_logits, kind=kind)) for kind in ("forward", "reverse", "jensen-shannon")},
    "top k": ((T, V), partial(on_logits, kind="forward", k=3)),
    "chunked": ((T, D), on_hidden),
    **{
        distance: (
            (T, D),
            lambda x, mask, part, distance=distance: features_loss(
                x, drawn(B, T, D, seed=3)[part].to(x.dtype), mask_T=mask, distance=distance
            ),
        )
        for distance in ("mse", "unit", "relative", "cosine")
    },
    **{measure + " of maps": ((2, T, T), partial(on_maps, measure=measure)) for measure in ("kl", "mse")},
    **{f"relations, causal {causal}": ((T, D), partial(on_relations, causal=causal)) for causal in (True, False)},
    "contrastive": ((T, D), on_samples),
}
EVERY = every(("shape", "loss"), LOSSES.values())


def begun(shape: tuple[int, ...]) -> Tensor:
    """What a loss is given: numbers, or probabilities where it takes maps."""
    return drawn(B, *shape) if len(shape) == 2 else drawn(B, *shape).softmax(-1)


def damaged(x: Tensor, mask: Tensor) -> Tensor:
    """NaN in what belongs to padding: rows of tokens, or queries of maps."""
    padded = (mask == 0)[:, :, None] if x.dim() == 3 else (mask == 0)[:, None, :, None]
    return x.masked_fill(padded, math.nan)


@EVERY
def test_parts_add_up_to_the_whole(shape: tuple[int, ...], loss: Loss) -> None:
    x = begun(shape)
    whole = loss(x, MASK, slice(0, B))
    parts = [loss(x[part], MASK[part], part) for part in (slice(0, 1), slice(1, B))]
    torch.testing.assert_close(whole.total, parts[0].total + parts[1].total)
    assert int(whole.count) == int(parts[0].count + parts[1].count) == int(MASK.sum()) == 5
    assert int(loss(x, None, slice(0, B)).count) == B * T
    assert whole.mean() == whole.total / 5


@EVERY
def test_gradients_are_those_of_the_values(shape: tuple[int, ...], loss: Loss) -> None:
    x = begun(shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, MASK, slice(0, B)).total, x)


@EVERY
def test_padding_reaches_neither_values_nor_gradients(shape: tuple[int, ...], loss: Loss) -> None:
    x, found = begun(shape), []
    for given in (x, damaged(x, MASK)):
        leaf = given.clone().requires_grad_()
        total = loss(leaf, MASK, slice(0, B)).total
        found.append((total, *torch.autograd.grad(total, leaf)))
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)
    rows = MASK == 0 if len(shape) == 2 else (MASK == 0)[:, None, :].expand(B, shape[0], T)
    assert found[1][1][rows].eq(0).all()


@EVERY
def test_nothing_valid_is_a_zero_that_still_goes_backward(shape: tuple[int, ...], loss: Loss) -> None:
    leaf = begun(shape).fill_(math.nan).requires_grad_()
    found = loss(leaf, torch.zeros(B, T), slice(0, B))
    assert (found.total.item(), found.count.item(), found.mean().item()) == (0, 0, 0)
    (grad,) = torch.autograd.grad(found.total, leaf)
    assert grad.eq(0).all()


@EVERY
def test_sums_are_float32_and_those_of_float64_stay(shape: tuple[int, ...], loss: Loss) -> None:
    for dtype, sums in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        leaf = begun(shape).to(dtype).requires_grad_()
        found = loss(leaf, MASK, slice(0, B))
        assert (found.total.dtype, found.count.dtype) == (sums, torch.int64)
        (grad,) = torch.autograd.grad(found.total, leaf)
        assert grad.dtype == dtype
        exact = loss(begun(shape), MASK, slice(0, B)).total
        torch.testing.assert_close(
            found.total.double(), exact, rtol=0.1 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )


def test_no_gradient_goes_to_a_teacher() -> None:
    x = drawn(B, T, D)
    for loss in (
        lambda t: features_loss(x, t),
        lambda t: info_nce(x.flatten(0, 1), t.flatten(0, 1)),
        lambda t: relations_loss(x, t, 2),
        lambda t: attention_loss(x.unsqueeze(1), t.unsqueeze(1).softmax(-1)),
        lambda t: logits_loss(x, t),
        lambda t: logits_loss(x, top_k(t, 2)),
        lambda t: chunked_logits_loss(x, HEAD, HiddenTeacher(t, HEAD)),
    ):
        assert not loss(drawn(B, T, D, seed=1).requires_grad_()).total.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(loss(x).total, x)
