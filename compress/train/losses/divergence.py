"""Divergences between two distributions that are given by their log-probabilities.

With P the teacher, Q the student:

    forward          KL(P || Q) = sum P (log P - log Q)      Hinton, Vinyals, Dean 2015 (arXiv 1503.02531)
    reverse          KL(Q || P)                              MiniLLM (arXiv 2306.08543), GKD
    jensen-shannon   b KL(P || M) + (1-b) KL(Q || M), M = b P + (1-b) Q, 0 < b < 1
                     GKD, Agarwal et al. 2024 (arXiv 2306.13649); over b, it goes to KL(P || Q) as b -> 0

An outcome that a model excludes (log-probability -inf, as a padded vocabulary or a mask has it) counts as one of the
smallest normal probability of float32. An outcome that both exclude then adds nothing, and one that only one of them
excludes costs much, but a finite amount, with a finite gradient for the model that does not.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["forward", "reverse", "jensen-shannon"]

FLOOR = math.log(torch.finfo(torch.float32).tiny)  # -87.3


def floor_excluded(log_p: Tensor) -> Tensor:
    """log_p with FLOOR in place of -inf; finite numbers below FLOOR stay."""
    return log_p.masked_fill(log_p == -math.inf, FLOOR)


def log_softmax(scores: Tensor) -> Tensor:
    """Over the last dimension; uniform, with no gradient, where everything is excluded."""
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).log_softmax(-1)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[...] KL(P || Q) in nats over the last dimension."""
    log_p, log_q = floor_excluded(log_p), floor_excluded(log_q)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def divergence(log_p: Tensor, log_q: Tensor, kind: Kind, beta: float) -> Tensor:
    """[...] from the student's log_q to the teacher's log_p over the last dimension, in nats. beta: b above."""
    if kind == "forward":
        return kl(log_p, log_q)
    if kind == "reverse":
        return kl(log_q, log_p)
    log_p, log_q = floor_excluded(log_p), floor_excluded(log_q)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
