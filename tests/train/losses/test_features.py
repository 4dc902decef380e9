"""Hidden states like the teacher's: the equations in loops; which layer learns from which."""

import math

import pytest
import torch
from combinations import every
from torch import Tensor

from compress.train.losses.features import features_loss, layer_pairs


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_loops(s: list[float], t: list[float], distance: str) -> float:
    squares = sum((a - b) ** 2 for a, b in zip(s, t, strict=True))
    own, theirs = (math.sqrt(sum(a * a for a in each)) for each in (s, t))
    cosine = sum(a * b for a, b in zip(s, t, strict=True)) / (own * theirs)
    return {
        "mse": squares / len(s),
        "relative": squares / theirs**2,
        "cosine": 1 - cosine,
        "unit": sum((a / own - b / theirs) ** 2 for a, b in zip(s, t, strict=True)),
    }[distance]


@every("distance", ("mse", "unit", "relative", "cosine"))
def test_it_is_the_equation_in_loops(distance) -> None:
    student, teacher, mask = drawn(2, 3, 5), drawn(2, 3, 5, seed=1), torch.tensor([[1, 0, 1], [1, 1, 0]])
    rows = [(s, t) for s, t, m in zip(student.view(-1, 5), teacher.view(-1, 5), mask.flatten(), strict=True) if m]
    expected = sum(by_loops(s.tolist(), t.tolist(), distance) for s, t in rows)
    found = features_loss(student, teacher, mask_T=mask, distance=distance)
    assert (found.total.item(), found.count) == (pytest.approx(expected), 4)


@every("distance", ("unit", "relative", "cosine"))
def test_a_hidden_state_of_zeros_has_a_finite_loss_and_gradient(distance) -> None:
    for student, teacher in ((torch.zeros(1, 4), torch.ones(1, 4)), (torch.ones(1, 4), torch.zeros(1, 4))):
        leaf = student.requires_grad_()
        found = features_loss(leaf, teacher, distance=distance)
        assert found.total.isfinite()
        assert torch.autograd.grad(found.total, leaf)[0].isfinite().all()


def test_layers_are_paired_as_the_papers_say() -> None:
    assert layer_pairs(4, 12) == [(0, 2), (1, 5), (2, 8), (3, 11)]  # TinyBERT: g(m) = 3 m
    assert layer_pairs(6, 12, "last") == [(s, 6 + s) for s in range(6)]
    assert layer_pairs(6, 12, "final") == [(5, 11)]
    assert layer_pairs(12, 6, "final") == [(11, 5)]
    assert layer_pairs(3, 2, [(2, 1), (0, 0)]) == [(0, 0), (2, 1)]


def test_uniform_pairs_are_in_order_and_end_at_the_last() -> None:
    for teacher in range(1, 20):
        for student in range(1, teacher + 1):
            layers = [t for _, t in layer_pairs(student, teacher)]
            assert layers == sorted({*layers})
            assert (len(layers), layers[0] >= 0, layers[-1]) == (student, True, teacher - 1)
