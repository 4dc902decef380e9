"""The loss on logits, against the equations in loops."""

import math

import pytest
import torch
from combinations import every, pairs
from torch import Tensor

from compress.train.losses.divergence import divergence
from compress.train.losses.logits import LogitsLoss, logits_loss
from compress.train.losses.top_k import top_k

KINDS = ("forward", "reverse", "jensen-shannon")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(z: list[float], t: float) -> list[float]:
    mass = [math.exp(each / t) for each in z]
    return [each / sum(mass) for each in mass]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def between(p: list[float], q: list[float], kind: str, beta: float) -> float:
    if kind == "jensen-shannon":
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        return beta * kl(p, m) + (1 - beta) * kl(q, m)
    return kl(p, q) if kind == "forward" else kl(q, p)


def by_loops(student: Tensor, teacher: Tensor, labels: Tensor, how: LogitsLoss, k: int | None) -> tuple[float, int]:
    total, count = 0.0, 0
    for z, v, label in zip(student.tolist(), teacher.tolist(), labels.tolist(), strict=True):
        if label == -100:
            continue
        p, q = softmax(v, how.temperature), softmax(z, how.temperature)
        if k is not None:
            most = sorted(range(len(v)), key=lambda i: -v[i])[:k]
            p, q = ([each[i] for i in most] for each in (p, q))
            rest = [[1 - sum(each)] if how.tail == "bucket" and k < len(v) else [] for each in (p, q)]
            p, q = ([a / (sum(each) + sum(tail)) for a in each + tail] for each, tail in zip((p, q), rest, strict=True))
        total += how.alpha * how.temperature**2 * between(p, q, how.kind, how.beta)
        total -= (1 - how.alpha) * math.log(softmax(z, 1.0)[label])
        count += 1
    return total, count


@every(
    ("kind", "temperature", "alpha", "beta", "tail", "k"),
    pairs(KINDS, (1.0, 2.5), (0.0, 0.3, 1.0), (0.5, 0.1), ("bucket", "conditional"), (None, 1, 4, 11)),
)
def test_it_is_the_equation_in_loops(kind, temperature, alpha, beta, tail, k) -> None:
    student, teacher = drawn(6, 11).requires_grad_(), drawn(6, 11, seed=1)
    labels = torch.tensor([3, -100, 0, 10, -100, 5])
    how = LogitsLoss(kind=kind, temperature=temperature, alpha=alpha, beta=beta, tail=tail)
    given = teacher if k is None else top_k(teacher, k, temperature)
    found = logits_loss(student, given, labels_T=labels, how=how)
    total, count = by_loops(student, teacher, labels, how, k)
    assert found.total.item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert int(found.count) == count == 4
    assert torch.autograd.gradcheck(lambda z: logits_loss(z, given, labels_T=labels, how=how).total, student)


def test_log_probabilities_and_logits_are_one_teacher_at_any_temperature() -> None:
    student, teacher, how = drawn(6, 11), drawn(6, 11, seed=1), LogitsLoss(temperature=3.0)
    torch.testing.assert_close(
        logits_loss(student, teacher, how=how), logits_loss(student, teacher.log_softmax(-1), how=how)
    )


def test_the_chain_rule_of_a_bucket() -> None:
    """All >= bucket = (tail or not) + the mass of the k times conditional; no more is lost than the tail's shape."""
    student, teacher = drawn(1, 11), drawn(1, 11, seed=1)
    kept = top_k(teacher, 4)
    whole, bucket = (float(logits_loss(student, given).total) for given in (teacher, kept))
    conditional = float(logits_loss(student, kept, how=LogitsLoss(tail="conditional")).total)
    p, q = (float(each.softmax(-1).gather(-1, kept.indices_Tk).sum()) for each in (teacher, student))
    assert bucket == pytest.approx(kl([p, 1 - p], [q, 1 - q]) + p * conditional)
    assert whole > bucket


def test_a_light_tail_is_no_rounding_error() -> None:
    """In float32 the mass of a tail of e-12 is not 1 minus that of the head, nor is its gradient lost."""
    student = torch.tensor([[0.0, -28.0, -28.0]], requires_grad=True)
    teacher = top_k(torch.tensor([[0.0, 0.0, 0.0]]), 1)
    total = logits_loss(student, teacher).total
    exact = logits_loss(student.double(), top_k(torch.zeros(1, 3, dtype=torch.float64), 1)).total
    assert total.item() == pytest.approx(exact.item(), rel=1e-6)
    (grad,) = torch.autograd.grad(total, student)
    torch.testing.assert_close(grad, torch.tensor([[2, -1, -1]]) / 3, atol=1e-6, rtol=0)


@every(("kind", "k"), pairs(KINDS, (None, 2, 4, 5)))
def test_what_both_exclude_changes_nothing(kind, k) -> None:
    """Tokens of a vocabulary that is padded with -inf."""
    student, teacher, labels = drawn(3, 4), drawn(3, 4, seed=1), torch.tensor([0, 1, 3])
    how, found = LogitsLoss(kind=kind, alpha=0.7), []
    for padding in (0, 2):
        z, v = (torch.nn.functional.pad(each, (0, padding), value=-math.inf) for each in (student, teacher))
        z.requires_grad_()
        kept = v if k is None else top_k(v, min(k, v.shape[1] if padding else 4))
        total = logits_loss(z, kept, labels_T=labels, how=how).total
        (grad,) = torch.autograd.grad(total, z)
        assert grad[:, 4:].eq(0).all()
        found.append((total, grad[:, :4]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


@every("kind", KINDS)
def test_what_one_excludes_costs_a_finite_amount_and_draws_the_other(kind) -> None:
    excluded = torch.tensor([[0.0, 0.5, -math.inf]])
    for z, v in ((torch.zeros(1, 3), excluded), (excluded.clone(), torch.zeros(1, 3))):
        z.requires_grad_()
        how = LogitsLoss(kind=kind, alpha=0.5)
        total = logits_loss(z, v, labels_T=torch.tensor([2]), how=how).total
        (grad,) = torch.autograd.grad(total, z)
        assert total.isfinite()
        assert total > 0
        assert grad.isfinite().all()
    total = logits_loss(z := torch.zeros(1, 3, requires_grad=True), excluded, how=LogitsLoss(kind=kind)).total
    assert float(torch.autograd.grad(total, z)[0][0, 2]) > 0  # downhill is less of what the teacher excludes


@every(("kind", "tail"), pairs(KINDS, ("bucket", "conditional")))
def test_a_student_that_excludes_all_of_the_top_k_has_a_finite_loss(kind, tail) -> None:
    z = torch.tensor([[0.0, 0.5, -math.inf, -math.inf]], requires_grad=True)
    teacher = top_k(torch.tensor([[0.0, 0.0, 4.0, 5.0]]), 2)
    total = logits_loss(z, teacher, how=LogitsLoss(kind=kind, tail=tail)).total
    assert total.isfinite()
    assert torch.autograd.grad(total, z)[0].isfinite().all()


@every("kind", KINDS)
def test_a_divergence_is_zero_of_equals_and_positive_of_others(kind) -> None:
    p, q = drawn(5, 7).log_softmax(-1), drawn(5, 7, seed=1).log_softmax(-1)
    torch.testing.assert_close(divergence(p, p, kind, 0.3), torch.zeros(5, dtype=torch.float64), atol=1e-15, rtol=0)
    assert divergence(p, q, kind, 0.3).gt(0).all()


def test_jensen_shannon_goes_to_either_side_at_its_ends() -> None:
    p, q, small = drawn(5, 7).log_softmax(-1), drawn(5, 7, seed=1).log_softmax(-1), 1e-7
    for kind, beta in (("forward", small), ("reverse", 1 - small)):
        ends = divergence(p, q, "jensen-shannon", beta) / small
        torch.testing.assert_close(ends, divergence(p, q, kind, 0.5), rtol=1e-4, atol=0)


def test_conditional_top_k_may_be_of_another_temperature() -> None:
    student, teacher = drawn(3, 9), drawn(3, 9, seed=1)
    how = LogitsLoss(temperature=2.0, tail="conditional")
    torch.testing.assert_close(
        logits_loss(student, top_k(teacher, 4, 1.0), how=how), logits_loss(student, top_k(teacher, 4, 2.0), how=how)
    )
