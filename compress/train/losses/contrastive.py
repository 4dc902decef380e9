"""The loss by which embeddings of the student are told apart as the teacher's are.

With s_i, t_j the embeddings of samples divided by their lengths, T a temperature:

    InfoNCE   -log( exp(s_i t_i / T) / sum_j exp(s_i t_j / T) )         van den Oord et al. 2018 (arXiv 1807.03748)

Negatives are the teacher's other embeddings of the step (`objective.sample_embeddings`).

Shapes: N samples, D width (a projector takes one width to another), C candidates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.train.losses.features import unit
from compress.train.losses.loss_sum import Summed, same_width, sum_of, wide

TEMPERATURE = 0.07  # Wu et al. 2018 (arXiv 1805.01978)


class Candidates(NamedTuple):
    """rows_CD: the teacher's embeddings; own_N: int64, which of them is a student's sample's own."""

    rows_CD: Tensor
    own_N: Tensor


def info_nce(
    student_ND: Tensor, teacher: Tensor | Candidates, *, mask_N: Tensor | None = None, temperature: float = TEMPERATURE
) -> Summed:
    """Sum over samples whose mask is not 0; masked samples are still negatives for others.

    teacher: [N, D], of the same samples; or candidates of which these are some.
    """
    if not 0 < temperature < float("inf"):
        raise InputError(f"temperature {temperature}; allowed: above 0")
    if isinstance(teacher, Tensor):
        teacher = Candidates(teacher, torch.arange(len(teacher), device=teacher.device))
    same_width("widths", student_ND, teacher.rows_CD, "a projector of the student's takes one to the other")
    if len(student_ND) != len(teacher.own_N):
        raise InputError(
            f"{len(student_ND)} samples of the student, {len(teacher.own_N)} of the teacher; give the same"
        )
    if mask_N is not None and mask_N.shape != student_ND.shape[:1]:
        raise InputError(f"mask of shape {[*mask_N.shape]} for {len(student_ND)} samples")
    kept = torch.arange(len(student_ND), device=student_ND.device) if mask_N is None else mask_N.nonzero().squeeze(-1)
    candidates_CD = unit(wide(teacher.rows_CD.detach()))
    scores_NC = unit(wide(student_ND[kept])) @ candidates_CD.T / temperature
    return sum_of(-scores_NC.log_softmax(-1).gather(-1, teacher.own_N[kept].unsqueeze(-1)).squeeze(-1))
