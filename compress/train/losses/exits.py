"""Self-distillation: exits of a model's earlier layers learn from its own last one.

    sum_l w_l loss(head(h_l), stop(head(h_L)))

Zhang et al. 2019 (arXiv 1905.08094, "Be Your Own Teacher": cross entropy, and a divergence to the deepest
classifier); on language models LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains exits that share one head.
Gradients of the exits' losses reach their layers and their head, and never the final states that they learn from.

Hidden states are those that go into the head, behind the last norm: an exit's, too. The teacher's logits are computed
again for every exit, which costs a product and saves the memory of all of them. The count is of tokens, once for all
exits, so that weights that sum to 1 give a mean of the exits.

Shapes: T tokens, D width, V vocabulary; [T, D] stands for [..., D].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.train.losses.chunked_logits import CHUNK_VALUES, Head, HiddenTeacher, chunked_logits_loss
from compress.train.losses.logits import LogitsLoss
from compress.train.losses.loss_sum import Summed


def exits_loss(
    exits_TD: Sequence[Tensor],
    final_TD: Tensor,
    head: Head,
    *,
    weights: Sequence[float] | None = None,
    exit_heads: Sequence[Head] | None = None,
    labels_T: Tensor | None = None,
    mask_T: Tensor | None = None,
    how: LogitsLoss | None = None,
    chunk_values: int = CHUNK_VALUES,
) -> Summed:
    """Sum of the exits' losses on logits against the final ones, each by `chunked_logits_loss` on hidden states.

    weights: of every exit; equal ones that sum to 1 when not given. exit_heads: of every exit; all share `head` when
    not given.
    """
    weights = [1 / len(exits_TD)] * len(exits_TD) if weights is None and exits_TD else weights or []
    heads = [head] * len(exits_TD) if exit_heads is None else exit_heads
    if not exits_TD or not len(exits_TD) == len(weights) == len(heads):
        raise InputError(
            f"{len(exits_TD)} exits with {len(weights)} weights and {len(heads)} heads; give at least one exit, and a "
            f"weight and a head for each"
        )
    teacher = HiddenTeacher(final_TD, head)  # chunks make a teacher's logits without a gradient
    found = [
        chunked_logits_loss(hidden, own, teacher, labels_T=labels_T, mask_T=mask_T, how=how, chunk_values=chunk_values)
        for hidden, own in zip(exits_TD, heads, strict=True)
    ]
    terms = [weight * each.total for weight, each in zip(weights, found, strict=True)]
    return Summed(torch.stack(terms).sum(), found[0].count)
