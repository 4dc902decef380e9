"""Two programs that run one model: the distance of their log-probabilities and of their greedy continuations.

R rows of T tokens, V tokens of the vocabulary, k of them reported by the other program.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

SMALLEST = 1e-6  # a smaller share of probability is lost in float32 log-probabilities


def divergence(ours_TV: Tensor, best_Tk: Tensor, names_Tk: Tensor) -> Tensor:
    """KL of another model's distributions from ours in nats [T], limited to its k likeliest tokens: all others count as
    one event. A lower bound of KL, and equal to it for k = V."""
    ours_Tk, best_Tk = ours_TV.double().gather(1, names_Tk), best_Tk.double()
    seen = (ours_Tk.exp() * (ours_Tk - best_Tk)).sum(1)
    rest, other = ((1 - part.exp().sum(1)).clamp(min=SMALLEST) for part in (ours_Tk, best_Tk))
    return (seen + rest * (rest.log() - other.log())).clamp(min=0)


def compared(ours: Sequence[Tensor], rows: Tensor, found: Mapping[str, Tensor]) -> dict[str, float]:
    """Our log-probabilities, [T-1, V] of every row, against another program's.

    rows: token ids [R, T]. found: `own`, of the next tokens [R, T-1]; `best`, of the likeliest, and `names`, their ids
    [R, T-1, k]. Returns our perplexity; nats, how much more the other loses per token, with the standard error of that
    mean; kl, the mean of `divergence`; same_top, the share of places where both hold the same token for likeliest.
    """
    own = torch.stack([row.gather(1, ids[1:, None])[:, 0] for row, ids in zip(ours, rows, strict=True)]).double()
    kl = torch.stack([divergence(row, *pair) for row, *pair in zip(ours, found["best"], found["names"], strict=True)])
    top = torch.stack([row.argmax(1) for row in ours])
    more = own - found["own"].double()
    return {
        "perplexity": float(own.mean().neg().exp()),
        "nats": float(more.mean()),
        "nats_error": float(more.std() / more.numel() ** 0.5),
        "kl": float(kl.mean()),
        "same_top": float((top == found["names"][..., 0]).double().mean()),
    }


def same_start(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The number of tokens that two continuations share before they diverge."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
