"""A teacher that is known by its k most probable tokens, and a student seen through the same k.

    bucket        k + 1 outcomes: the k tokens, and "another one" with the mass of all the rest
    conditional   k outcomes: both distributions over the k tokens alone, each made to sum to 1

By the chain rule, with P_k the teacher's mass of the k tokens and every divergence forward:

    KL(all) >= KL(bucket) = KL(tail or not) + P_k KL(conditional)

Neither knows the shape of the tail. The bucket is the default, since it knows the tail's mass: the student's tail is
drawn to the teacher's. "conditional" leaves that mass free. The third way, the teacher's k made to sum to 1
against the student's whole softmax, is not here: it asks for a tail of no mass, and makes students too sure of
themselves (Anshumann et al. 2025, arXiv 2503.16870).

Shapes: T tokens, V vocabulary, k kept tokens.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.train.losses.divergence import log_softmax
from compress.train.losses.loss_sum import wide

Tail = Literal["bucket", "conditional"]


class TopK(NamedTuple):
    """log_probs_Tk: of the softmax over the whole vocabulary at `temperature`; indices_Tk: int64, distinct in a row."""

    log_probs_Tk: Tensor
    indices_Tk: Tensor
    temperature: float = 1.0


def top_k(logits_TV: Tensor, k: int, temperature: float = 1.0) -> TopK:
    """The teacher's k most probable tokens and their log-probabilities. Raises InputError for k beyond the
    vocabulary."""
    if not 1 <= k <= logits_TV.shape[-1]:
        raise InputError(f"top {k} of a vocabulary of {logits_TV.shape[-1]}; allowed: 1 to {logits_TV.shape[-1]}")
    logits_TV = wide(logits_TV) / temperature
    values_Tk, indices_Tk = logits_TV.topk(k, dim=-1)
    return TopK(values_Tk - logits_TV.logsumexp(-1, keepdim=True), indices_Tk, temperature)


def coarse_teacher(teacher: TopK, vocabulary: int, temperature: float, tail: Tail) -> Tensor:
    """[T, k + 1] or [T, k] log-probabilities of the teacher's outcomes at a temperature, the rest last."""
    log_probs_Tk = wide(teacher.log_probs_Tk)
    if tail == "conditional":  # any temperature: a softmax over the k forgets what they were normalised by
        return log_softmax(log_probs_Tk * (teacher.temperature / temperature))
    if teacher.temperature != temperature:
        raise InputError(
            f"the teacher's top k are of temperature {teacher.temperature}, the loss asks for {temperature}, and what "
            f"the rest weighs there is not known; use one temperature, or tail='conditional'"
        )
    if log_probs_Tk.shape[-1] == vocabulary:
        return log_probs_Tk
    rest_T = (1 - log_probs_Tk.exp().sum(-1)).clamp(min=0)
    return torch.cat([log_probs_Tk, rest_T.log().unsqueeze(-1)], -1)


def coarse_student(logits_TV: Tensor, indices_Tk: Tensor, tail: Tail) -> Tensor:
    """[T, k + 1] or [T, k] log-probabilities of the same outcomes, of logits over temperature."""
    kept_Tk = logits_TV.gather(-1, indices_Tk)
    if tail == "conditional":
        return log_softmax(kept_Tk)
    whole_T1 = logits_TV.logsumexp(-1, keepdim=True)
    if kept_Tk.shape[-1] == logits_TV.shape[-1]:
        return kept_Tk - whole_T1
    # Not 1 - sum of the k: a light tail would be the rounding error of a number close to 1.
    rest_TV = logits_TV.scatter(-1, indices_Tk, -math.inf)
    return torch.cat([kept_Tk - whole_T1, _logsumexp(rest_TV) - whole_T1], -1)


def _logsumexp(x_TV: Tensor) -> Tensor:
    """[T, 1]; -inf with a gradient of zero, not NaN, where all are -inf."""
    most_T1 = x_TV.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(x_TV.dtype).min)
    total_T1 = (x_TV - most_T1).exp().sum(-1, keepdim=True)
    nothing = total_T1 == 0
    return (total_T1.masked_fill(nothing, 1).log() + most_T1).masked_fill(nothing, -math.inf)
