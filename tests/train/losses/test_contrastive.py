"""The contrastive loss, against its equation in loops."""

import math

import pytest
import torch
from torch import Tensor

from compress.train.losses.contrastive import info_nce


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
