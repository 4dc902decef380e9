"""Losses by which embeddings of the student are told apart as the teacher's are.

With s_i, t_j the embeddings of samples divided by their lengths, T a temperature:

    InfoNCE   -log( exp(s_i t_i / T) / sum_j exp(s_i t_j / T) )         van den Oord et al. 2018 (arXiv 1807.03748)
    CRD       -log h(s_i, t_i) - sum over N negatives of log(1 - h(s_i, t_j)),
              h(s, t) = exp(s t / T) / (exp(s t / T) + N / M)           Tian et al. 2020 (arXiv 1910.10699)

InfoNCE takes the teacher's other embeddings of the batch for negatives, on all ranks (`everywhere`): the teacher has no
gradient, so gathering its embeddings is exact, and two ranks have the loss of one process.

CRD takes them from a memory of the teacher's last embeddings, M samples being the whole set. A row of the memory that
is of the same sample as s_i is no negative of it, and N is one less.

Departs from CRD: negatives are the same for all of a batch; the student is contrasted with the teacher's memory, and
not the teacher with a memory of the student's, which ages as the student learns; the authors' code divides exp by a
constant of its first batch, the paper and this do not.

Shapes: N samples, D width (a projector takes one width to another), C candidates.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.train.losses.features import unit
from compress.train.losses.loss_sum import Summed, same_width, sum_of, wide

TEMPERATURE = 0.07  # Wu et al. 2018 (arXiv 1805.01978)
EMPTY = -1  # the id of a row that holds no sample
REMEDY = "a projector of the student's takes one to the other"


class Candidates(NamedTuple):
    """rows_CD: the teacher's embeddings; own_N: int64, which of them is a student's sample's own."""

    rows_CD: Tensor
    own_N: Tensor


def everywhere(comm: Comm, teacher_ND: Tensor) -> Candidates:
    """The teacher's embeddings of all ranks, which may have different numbers of samples."""
    lengths = comm.gather_objects(len(teacher_ND))
    first = sum(lengths[: comm.rank])
    own_N = torch.arange(first, first + len(teacher_ND), device=teacher_ND.device)
    return Candidates(comm.gather_rows(teacher_ND.detach(), lengths), own_N)


def info_nce(
    student_ND: Tensor, teacher: Tensor | Candidates, *, mask_N: Tensor | None = None, temperature: float = TEMPERATURE
) -> Summed:
    """Sum over samples whose mask is not 0; masked samples are still negatives for others.

    teacher: [N, D], of the same samples; or candidates of which these are some.
    """
    _check_temperature(temperature)
    if isinstance(teacher, Tensor):
        teacher = Candidates(teacher, torch.arange(len(teacher), device=teacher.device))
    same_width("widths", student_ND, teacher.rows_CD, REMEDY)
    if len(student_ND) != len(teacher.own_N):
        raise InputError(
            f"{len(student_ND)} samples of the student, {len(teacher.own_N)} of the teacher; give the same"
        )
    kept = _kept(student_ND, mask_N)
    candidates_CD = unit(wide(teacher.rows_CD.detach()))
    scores_NC = unit(wide(student_ND[kept])) @ candidates_CD.T / temperature
    return sum_of(-scores_NC.log_softmax(-1).gather(-1, teacher.own_N[kept].unsqueeze(-1)).squeeze(-1))


class Memory(NamedTuple):
    """The teacher's last embeddings [C, D], oldest first, and the samples they are of, int64 [C]: `EMPTY` for rows that
    hold none yet."""

    rows_CD: Tensor
    ids_C: Tensor


def empty_memory(size: int, width: int, like: Tensor) -> Memory:
    """A memory of `size` empty rows, of the dtype and on the device of `like`."""
    return Memory(like.new_zeros(size, width), torch.full((size,), EMPTY, device=like.device))


def remember(memory: Memory, teacher_ND: Tensor, ids_N: Tensor) -> Memory:
    """A memory with a batch added (on ranks: the batch of all, `Comm.gather_rows`), without as many of its oldest
    rows."""
    size = len(memory.ids_C)
    rows = torch.cat([memory.rows_CD, teacher_ND.detach().to(memory.rows_CD.dtype)])
    return Memory(rows[len(rows) - size :], torch.cat([memory.ids_C, ids_N])[len(rows) - size :])


def crd(
    student_ND: Tensor,
    teacher_ND: Tensor,
    ids_N: Tensor,
    negatives: Memory,
    samples: int,
    *,
    mask_N: Tensor | None = None,
    temperature: float = TEMPERATURE,
) -> Summed:
    """Sum over samples whose mask is not 0. ids_N: int64, which samples these are. samples: M, of the whole set."""
    _check_temperature(temperature)
    same_width("widths", student_ND, teacher_ND, REMEDY)
    if samples < 1:
        raise InputError(f"a set of {samples} samples; allowed: 1 or more")
    kept = _kept(student_ND, mask_N)
    student, teacher = unit(wide(student_ND[kept])), unit(wide(teacher_ND.detach()[kept]))
    others = unit(wide(negatives.rows_CD.detach()).to(student.dtype))
    real_NC = (ids_N[kept].unsqueeze(-1) != negatives.ids_C) & (negatives.ids_C != EMPTY)
    # log(N / M); without negatives h is 1, whatever the student says, and nothing is to be learnt.
    prior_N = real_NC.sum(-1).to(student.dtype).clamp(min=torch.finfo(torch.float32).tiny).log() - math.log(samples)
    positive_N = logsigmoid((student * teacher).sum(-1) / temperature - prior_N)
    negative_NC = logsigmoid(prior_N.unsqueeze(-1) - student @ others.T / temperature)
    return sum_of(-positive_N - negative_NC.masked_fill(~real_NC, 0).sum(-1))


def _kept(student_ND: Tensor, mask_N: Tensor | None) -> Tensor:
    if mask_N is not None and mask_N.shape != student_ND.shape[:1]:
        raise InputError(f"mask of shape {[*mask_N.shape]} for {len(student_ND)} samples")
    valid = torch.ones(len(student_ND), dtype=torch.bool, device=student_ND.device) if mask_N is None else mask_N != 0
    return valid.nonzero().squeeze(-1)


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise InputError(f"temperature {temperature}; allowed: above 0")
