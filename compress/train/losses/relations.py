"""Relations between the tokens of a sample, by their queries, keys or values.

MiniLM, Wang et al. 2020 (arXiv 2002.10957), L_VR, of values; MiniLMv2, Wang et al. 2021 (arXiv 2012.15828), of queries,
keys and values, in relation heads that need not be the attention's:

    A = all heads' vectors [T, D], side by side, cut into R relation heads of d = D / R
    P_r = softmax(A_r A_r^T / sqrt(d)),   loss = mean over r, sum over tokens of KL(P_r teacher || P_r student)

Relations are [T, T] in both models, so widths, and numbers of heads, may differ. MiniLM takes the last layer, MiniLMv2
a layer in the upper middle of large teachers; a sum of three calls (q, k and v) is MiniLMv2.

Shapes: B samples, T tokens, D width of the student's vectors, E of the teacher's, R relation heads.
"""

import math

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.train.losses.attention import over_queries
from compress.train.losses.divergence import kl, log_softmax
from compress.train.losses.loss_sum import Summed, wide


def relations_loss(
    student_BTD: Tensor,
    teacher_BTE: Tensor,
    relation_heads: int,
    *,
    mask_BT: Tensor | None = None,
    causal: bool = False,
) -> Summed:
    """KL of the relations of tokens, student against teacher. The count is of valid tokens, over all samples.

    relation_heads: 1 or more, divides both widths. mask_BT: 0 for padding, which relates to nothing. causal: relate a
    token only to itself and those before it, as a decoder's attention does.
    """
    for whose, each in (("student", student_BTD), ("teacher", teacher_BTE)):
        if relation_heads < 1 or each.shape[-1] % relation_heads:
            raise InputError(f"{relation_heads} relation heads do not divide the {whose}'s width of {each.shape[-1]}")
    if student_BTD.shape[:2] != teacher_BTE.shape[:2]:
        shapes = [*student_BTD.shape[:2]], [*teacher_BTE.shape[:2]]
        raise InputError(f"samples and tokens: {shapes[0]} of the student, {shapes[1]} of the teacher must be alike")
    if mask_BT is not None and mask_BT.shape != student_BTD.shape[:2]:
        raise InputError(f"mask of shape {[*mask_BT.shape]} for tokens of shape {[*student_BTD.shape[:2]]}")
    log_q, log_p = (_relations(x, relation_heads, mask_BT, causal) for x in (student_BTD, teacher_BTE.detach()))
    return over_queries(kl(log_p, log_q), mask_BT)


def _relations(x_BTD: Tensor, heads: int, mask_BT: Tensor | None, causal: bool) -> Tensor:
    """[B, R, T, T] log-probabilities."""
    x_BTD = wide(x_BTD)
    if mask_BT is not None:
        x_BTD = x_BTD.masked_fill((mask_BT == 0).unsqueeze(-1), 0)  # NaN of padding would reach its neighbours
    x_BRTd = x_BTD.unflatten(-1, (heads, -1)).transpose(1, 2)
    scores = x_BRTd @ x_BRTd.transpose(-1, -2) / math.sqrt(x_BRTd.shape[-1])
    if mask_BT is not None:
        scores = scores.masked_fill((mask_BT == 0)[:, None, None, :], -math.inf)
    if causal:
        later = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return log_softmax(scores)
