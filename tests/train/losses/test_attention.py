"""Attention maps and relations like the teacher's, against the equations in loops."""

import math

import pytest
import torch
from combinations import every, pairs
from torch import Tensor

from compress.train.losses.attention import attention_loss
from compress.train.losses.relations import relations_loss

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def maps(heads: int, queries: int, seed: int) -> Tensor:
    """Causal, and of the keys that are no padding; a padded query looks at itself."""
    scores = drawn(2, heads, queries, 4, seed=seed).masked_fill((MASK == 0)[:, None, None, :], -math.inf)
    scores = scores.masked_fill(torch.ones(queries, 4, dtype=torch.bool).triu(1 + 4 - queries), -math.inf)
    return scores.softmax(-1)


def compared(a: list[float], b: list[float], measure: str) -> float:
    if measure == "mse":
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
    return sum(y * math.log(y / x) for x, y in zip(a, b, strict=True) if y > 0)


def mean(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


@every(
    ("measure", "heads", "numbers", "queries"),
    pairs(("kl", "mse"), ("mean", "group", "each"), ((2, 4), (4, 2), (2, 2)), (4, 2)),
)
def test_maps_are_compared_as_the_equations_say(measure, heads, numbers, queries) -> None:
    if heads == "each" and numbers[0] != numbers[1]:
        return
    student, teacher = (maps(number, queries, seed) for seed, number in enumerate(numbers))
    total = 0.0
    for b in range(2):
        for q in range(queries):
            if not MASK[b, q + 4 - queries]:
                continue
            rows = [each[b, :, q].tolist() for each in (student, teacher)]
            if heads == "mean":
                rows = [[mean(each)] for each in rows]
            fewer = min(map(len, rows))
            size = [len(each) // fewer for each in rows]
            grouped = [[mean(r[i * n : i * n + n]) for i in range(fewer)] for r, n in zip(rows, size, strict=True)]
            total += sum(compared(s, t, measure) for s, t in zip(*grouped, strict=True)) / fewer
    found = attention_loss(student, teacher, mask_BK=MASK, measure=measure, heads=heads)
    assert found.total.item() == pytest.approx(total)
    assert found.count == MASK[:, 4 - queries :].sum()


def test_keys_that_only_the_student_excludes_cost_a_finite_amount() -> None:
    student = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2).requires_grad_()
    total = attention_loss(student, torch.full((1, 1, 1, 2), 0.5)).total
    assert total.isfinite()
    assert total > 1
    assert torch.autograd.grad(total, student)[0].isfinite().all()


def relation(x: list[list[float]], token: int, keys: list[int]) -> list[float]:
    scale = math.sqrt(len(x[0]))
    scores = [math.exp(sum(a * b for a, b in zip(x[token], x[key], strict=True)) / scale) for key in keys]
    return [each / sum(scores) for each in scores]


@every(("causal", "relation_heads"), pairs((False, True), (1, 2)))
def test_relations_are_compared_as_the_equations_say(causal, relation_heads) -> None:
    student, teacher, total = drawn(2, 4, 6), drawn(2, 4, 10, seed=1), 0.0
    for b in range(2):
        valid = MASK[b].nonzero().squeeze(-1).tolist()
        for token in valid:
            keys = [key for key in valid if key <= token or not causal]
            for r in range(relation_heads):
                parts = [x[b].unflatten(-1, (relation_heads, -1))[:, r].tolist() for x in (student, teacher)]
                q, p = (relation(part, token, keys) for part in parts)
                total += sum(a * math.log(a / c) for a, c in zip(p, q, strict=True)) / relation_heads
    found = relations_loss(student, teacher, relation_heads, mask_BT=MASK, causal=causal)
    assert (found.total.item(), found.count) == (pytest.approx(total), 6)


def test_heads_of_an_attention_are_its_relation_heads_side_by_side() -> None:
    """MiniLM's value relations, a head of the attention each, by the dot products of torch."""
    values = drawn(2, 3, 4, 5).requires_grad_(), drawn(2, 3, 4, 5, seed=1)  # [B, T, H, d]
    log_q, log_p = ((torch.einsum("bthd,bshd->bhts", v, v) / 5**0.5).log_softmax(-1) for v in values)
    expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean(1).sum()
    found = relations_loss(*(v.flatten(2) for v in values), 4)
    torch.testing.assert_close(found.total, expected)
