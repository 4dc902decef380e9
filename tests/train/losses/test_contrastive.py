"""Contrastive losses, against the equations in loops; on ranks; with a memory."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from thread_ranks import TwoRanks
from torch import Tensor

from compress.base.collectives import Comm
from compress.train.losses.contrastive import Memory, crd, empty_memory, everywhere, info_nce, remember


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def test_info_nce_is_the_equation_in_loops() -> None:
    student, teacher, mask = drawn(5, 3).requires_grad_(), drawn(5, 3, seed=1), torch.tensor([1, 0, 1, 1, 1])
    total = 0.0
    for i, s in enumerate(student.tolist()):
        scores = [math.exp(cosine(s, t) / 0.2) for t in teacher.tolist()]
        total -= mask[i].item() * math.log(scores[i] / sum(scores))
    found = info_nce(student, teacher, mask_N=mask, temperature=0.2)
    assert (found.total.item(), found.count) == (pytest.approx(total), 4)
    assert torch.autograd.gradcheck(lambda s: info_nce(s, teacher, mask_N=mask, temperature=0.2).total, student)
    nothing = info_nce(student * math.nan, teacher, mask_N=torch.zeros(5))
    assert (nothing.total.item(), nothing.count) == (0, 0)
    assert info_nce(student.bfloat16(), teacher.bfloat16()).total.dtype == torch.float32


def test_ranks_of_different_batches_add_up_to_one_process() -> None:
    student, teacher = drawn(7, 3).requires_grad_(), drawn(7, 3, seed=1)
    whole = info_nce(student, everywhere(Comm(), teacher))
    torch.testing.assert_close(whole, info_nce(student, teacher))
    parts, desk, barrier = (slice(0, 3), slice(3, 7)), [None, None], threading.Barrier(2)

    class Rank(TwoRanks):
        def gather_objects(self, value):
            return [int(each) for each in self.exchange(torch.tensor(value))]

        def gather_rows(self, part, lengths):
            assert len(part) == lengths[self.rank]
            return torch.cat(self.exchange(part))

    def of(rank: int):
        comm = Rank(rank, desk, barrier)
        return info_nce(student[parts[rank]], everywhere(comm, teacher[parts[rank]]))

    with ThreadPoolExecutor(2) as threads:
        found = [each.result(60) for each in [threads.submit(of, rank) for rank in range(2)]]
    torch.testing.assert_close(found[0].total + found[1].total, whole.total)
    assert [int(each.count) for each in found] == [3, 4]
    grads = [torch.autograd.grad(total, student)[0] for total in (whole.total, found[0].total + found[1].total)]
    torch.testing.assert_close(*grads)


def test_crd_is_the_equation_in_loops() -> None:
    """A row of the memory that is of the same sample is no negative."""
    student, teacher, rows = drawn(3, 4).requires_grad_(), drawn(3, 4, seed=1), drawn(5, 4, seed=2)
    ids, held, temperature, samples = [10, 11, 12], [1, 11, 3, 11, 10], 0.3, 40
    total = 0.0
    for i, s in enumerate(student.tolist()):
        negatives = [row for row, each in zip(rows.tolist(), held, strict=True) if each != ids[i]]
        prior = len(negatives) / samples
        h = [(e := math.exp(cosine(s, t) / temperature)) / (e + prior) for t in [teacher[i].tolist(), *negatives]]
        total -= math.log(h[0]) + sum(math.log(1 - each) for each in h[1:])
    unused = drawn(2, 4, seed=3)  # rows that hold no sample
    given = torch.tensor(ids), Memory(torch.cat([unused, rows]), torch.tensor([-1, -1, *held])), samples
    found = crd(student, teacher, *given, temperature=temperature)
    assert (found.total.item(), found.count) == (pytest.approx(total), 3)
    assert torch.autograd.gradcheck(lambda s: crd(s, teacher, *given, temperature=temperature).total, student)


def test_without_negatives_there_is_nothing_to_learn() -> None:
    student = drawn(3, 4).requires_grad_()
    found = crd(student, drawn(3, 4, seed=1), torch.arange(3), empty_memory(2, 4, student.detach()), 40)
    (grad,) = torch.autograd.grad(found.total, student)
    assert found.total.item() == pytest.approx(0, abs=1e-30)
    assert grad.abs().max() < 1e-30


def test_a_memory_holds_the_last_samples() -> None:
    memory = empty_memory(3, 2, torch.zeros(1))
    assert memory.ids_C.tolist() == [-1, -1, -1]
    for step in range(3):
        memory = remember(memory, torch.full((2, 2), float(step)).requires_grad_(), torch.tensor([step, 10 + step]))
    assert memory.ids_C.tolist() == [11, 2, 12]
    assert memory.rows_CD[:, 0].tolist() == [1, 2, 2]
    assert not memory.rows_CD.requires_grad
