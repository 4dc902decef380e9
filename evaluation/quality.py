"""Perplexity, and divergence from the original model, on the same windows.

Protocol: non-overlapping windows of stated length; in each, every token after the first is predicted from those
before it. Perplexity is exp of the mean negative log-likelihood over all predicted tokens. KL is
KL(original || compressed) in nats over the full vocabulary, per predicted token; `same_top` is the share of tokens for
which both models rank the same token first. Logits are compared in float32. Median and 99th percentile interpolate
between the two nearest tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.errors import CompressError

LOGIT_VALUES = 2**26  # logits per batch of windows, at least one window: 256 MiB of float32 a copy


@dataclass(frozen=True)
class Quality:
    """Figures of one model on some windows; those against a reference are None where none was given."""

    perplexity: float
    tokens: int
    windows: int
    length: int
    reference_perplexity: float | None = None
    kl_mean: float | None = None
    kl_median: float | None = None
    kl_p99: float | None = None
    same_top: float | None = None


def logits_of(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """Next-token logits [B, T-1, V] in float32."""
    device = next(model.parameters()).device
    return model(input_ids=ids_BT.to(device)).logits[:, :-1].float()


def _log_likelihood(log_probs_BTV: Tensor, ids_BT: Tensor) -> float:
    targets = ids_BT[:, 1:].to(log_probs_BTV.device).unsqueeze(-1)
    return float(log_probs_BTV.gather(-1, targets).double().sum())


def _perplexity(log_likelihood: float, tokens: int) -> float:
    try:
        return math.exp(-log_likelihood / tokens)
    except OverflowError:
        return math.inf


@torch.no_grad()
def measure(
    model: nn.Module,
    ids: Tensor,
    vocabulary: int,
    reference: nn.Module | None = None,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Evaluate token windows [samples, length]. step(done, total) is called after every batch of windows."""
    samples, length = ids.shape
    rows = max(1, LOGIT_VALUES // (length * vocabulary))
    likelihood = reference_likelihood = 0.0
    divergences: list[Tensor] = []
    same = 0
    for first in range(0, samples, rows):
        batch = ids[first : first + rows]
        log_probs = functional.log_softmax(logits_of(model, batch), -1)
        likelihood += _log_likelihood(log_probs, batch)
        if reference is not None:
            expected = functional.log_softmax(logits_of(reference, batch), -1).to(log_probs.device)
            reference_likelihood += _log_likelihood(expected, batch)
            divergences.append((expected.exp() * (expected - log_probs)).sum(-1).flatten().cpu())
            same += int((expected.argmax(-1) == log_probs.argmax(-1)).sum())
        step(min(first + rows, samples), samples)
    tokens = samples * (length - 1)
    for name, total in (("the model", likelihood), ("the reference", reference_likelihood)):
        if not math.isfinite(total):
            raise CompressError(f"{name} gives logits that are not finite numbers on this text; it is damaged")
    perplexity = _perplexity(likelihood, tokens)
    if reference is None:
        return Quality(perplexity, tokens, samples, length)
    kl = torch.cat(divergences).double().clamp(min=0).numpy()
    return Quality(
        perplexity,
        tokens,
        samples,
        length,
        reference_perplexity=_perplexity(reference_likelihood, tokens),
        kl_mean=float(kl.mean()),
        kl_median=float(np.median(kl)),
        kl_p99=float(np.quantile(kl, 0.99)),
        same_top=same / tokens,
    )
