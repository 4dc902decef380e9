"""Losses that draw attention maps to the teacher's.

With A [Q, K] the probabilities that a head gives to keys, a mean over heads, and a sum over valid queries q:

    kl    KL(A^T_q || A^S_q)               MiniLM, Wang et al. 2020 (arXiv 2002.10957), L_AT
    mse   sum_k (A^S_qk - A^T_qk)^2        TinyBERT, Jiao et al. 2020 (arXiv 1909.10351), L_attn

Departs from TinyBERT: it compares scores before their softmax, which models do not give out, and takes a mean over
keys, which makes long rows, whose probabilities are small, count for nothing.

Models with different numbers of heads have no pairs of heads. "mean" compares the mean map of all heads; "group", where
one number divides the other, the mean maps of neighbouring heads of the model that has more: with grouped queries
these share a key.

Shapes: B samples, H heads of the student, G of the teacher, Q queries, K keys.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from compress.base.errors import InputError, one_of
from compress.train.losses.divergence import kl
from compress.train.losses.loss_sum import Summed, wide

Measure = Literal["kl", "mse"]
Heads = Literal["each", "mean", "group"]


def attention_loss(
    student_BHQK: Tensor,
    teacher_BGQK: Tensor,
    *,
    mask_BK: Tensor | None = None,
    measure: Measure = "kl",
    heads: Heads = "each",
) -> Summed:
    """Distance of attention probabilities, as `output_attentions` gives them; the count is of valid queries, over all
    samples.

    mask_BK: 0 for padding, which is left out of queries and keys; queries are the last Q of the keys, as with a cache.
    """
    one_of("measure", measure, get_args(Measure))
    one_of("heads", heads, get_args(Heads))
    if student_BHQK.shape[0] != teacher_BGQK.shape[0] or student_BHQK.shape[2:] != teacher_BGQK.shape[2:]:
        shapes = [*student_BHQK.shape], [*teacher_BGQK.shape]
        raise InputError(f"attention maps: {shapes[0]} of the student, {shapes[1]} of the teacher differ beyond heads")
    student, teacher = (_without_padding(each, mask_BK) for each in (student_BHQK, teacher_BGQK.detach()))
    student, teacher = _matched(student, teacher, heads)
    if measure == "kl":
        return over_queries(_kl(teacher, student), mask_BK)
    return over_queries((student - teacher).square().sum(-1), mask_BK)


def _kl(teacher_BHQK: Tensor, student_BHQK: Tensor) -> Tensor:
    """KL of probabilities. Keys of subnormal probability count as excluded (the gradient of log at 0 is infinite)."""
    tiny = torch.finfo(torch.float32).tiny
    log_p, log_q = (each.masked_fill(each < tiny, tiny).log() for each in (teacher_BHQK, student_BHQK))
    return kl(log_p, log_q)


def over_queries(values_BHQ: Tensor, mask_BK: Tensor | None) -> Summed:
    """Mean over heads, sum over the queries that are no padding."""
    values_BQ = values_BHQ.mean(1)
    valid_BQ = values_BQ.new_ones(values_BQ.shape, dtype=torch.bool)
    if mask_BK is not None:
        valid_BQ = mask_BK[:, -values_BQ.shape[1] :] != 0
    return Summed(values_BQ.masked_fill(~valid_BQ, 0).sum(), valid_BQ.sum())


def _without_padding(maps_BHQK: Tensor, mask_BK: Tensor | None) -> Tensor:
    """Set rows and columns of padding to zero, whatever a model left there: NaN in maps whose keys are all excluded."""
    maps_BHQK = wide(maps_BHQK)
    if mask_BK is None:
        return maps_BHQK
    if mask_BK.shape != (len(maps_BHQK), maps_BHQK.shape[-1]):
        shapes = [*mask_BK.shape], [len(maps_BHQK), maps_BHQK.shape[-1]]
        raise InputError(f"mask of shape {shapes[0]}; of samples and keys it has to be {shapes[1]}")
    padding_BK = mask_BK == 0
    padding_BQ = padding_BK[:, -maps_BHQK.shape[2] :]
    return maps_BHQK.masked_fill(padding_BK[:, None, None, :] | padding_BQ[:, None, :, None], 0)


def _matched(student: Tensor, teacher: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """The maps of both models, with the same number of heads."""
    own, theirs = student.shape[1], teacher.shape[1]
    if heads == "mean":
        return student.mean(1, keepdim=True), teacher.mean(1, keepdim=True)
    if own == theirs:
        return student, teacher
    if heads == "each":
        raise InputError(f"{own} heads of the student, {theirs} of the teacher have no pairs; heads='group' or 'mean'")
    fewer = min(own, theirs)
    if max(own, theirs) % fewer:
        raise InputError(f"heads='group' of {own} and {theirs} heads, of which neither divides the other; heads='mean'")
    return student.unflatten(1, (fewer, -1)).mean(2), teacher.unflatten(1, (fewer, -1)).mean(2)
