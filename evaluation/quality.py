"""Perplexity, and divergence from the original model, on the same windows.

Protocol: non-overlapping windows of stated length; in each, every token after the first is predicted from those
before it. Perplexity is exp of the mean negative log-likelihood over all predicted tokens. KL is
KL(original || compressed) in nats over the full vocabulary, per predicted token; `same_top` is the share of tokens for
which both models rank the same token first. Logits are compared in float32. Median and 99th percentile interpolate
between the two nearest tokens.

Standard errors, of a mean over W windows of T predicted tokens, values x_wt and window means m_w:

    by windows    sd(m_w) / sqrt(W)      none for one window
    by tokens     sd(x_wt) / sqrt(W T)   as llama.cpp's llama-perplexity states them

Tokens of one window are not independent: a hard passage is hard for many of them, a topic that quantization has hurt
hurts throughout. By tokens is too small then; by windows allows for whatever correlation there is inside a window
(a sample of clusters of one size) and is the one that is shown. Both take the windows for independent draws of text.
Perplexity = exp(m) has the error exp(m) se(m) (delta method). KL, same top and the logarithm of the perplexities'
ratio, mean(nll - nll of the original), compare the two models token by token: their errors are paired, and far smaller
than those of the two perplexities let expect.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.errors import CompressError
from compress.evaluation.document import Figure

PROTOCOL = "non-overlapping windows; every token after a window's first is predicted from those before it in its window"
LOGIT_VALUES = 2**26  # logits per batch of windows, at least one window: 256 MiB of float32 a copy


@dataclass(frozen=True)
class Quality:
    """Figures of one model on some windows, by name; those against a reference are not there where none was given.

    Errors are by windows (None where there is one window) and by tokens.
    """

    figures: dict[str, Figure]
    tokens: int
    windows: int
    length: int


def logits_of(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """Next-token logits [B, T-1, V] in float32."""
    device = next(model.parameters()).device
    return model(input_ids=ids_BT.to(device)).logits[:, :-1].float()


def _surprisal(log_probs_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Negative log-likelihood of each predicted token, [B, T-1] float64 on the CPU."""
    targets = ids_BT[:, 1:].to(log_probs_BTV.device).unsqueeze(-1)
    return -log_probs_BTV.gather(-1, targets).squeeze(-1).double().cpu()


def _perplexity(surprisal: float) -> float:
    try:
        return math.exp(surprisal)
    except OverflowError:
        return math.inf


def standard_error(values_N: Tensor) -> float | None:
    """Of the mean of independent values; None of a single one."""
    return float(values_N.std() / math.sqrt(len(values_N))) if len(values_N) > 1 else None


def _figure(name: str, values_WT: Tensor) -> Figure:
    """The mean of values with its errors; of a perplexity, whose values are surprisals, the exponential of it."""
    mean = float(values_WT.mean())
    errors = standard_error(values_WT.mean(1)), standard_error(values_WT.flatten())
    if not name.endswith("perplexity"):
        return Figure(mean, *errors)
    value = _perplexity(mean)
    return Figure(value, *(None if error is None else error * value for error in errors))


@torch.no_grad()
def measure(
    model: nn.Module,
    ids: Tensor,
    vocabulary: int,
    reference: nn.Module | None = None,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Evaluate token windows [samples, length]. step(done, total) is called after every batch of windows.

    Of every token a few numbers are kept, never its distribution.
    """
    samples, length = ids.shape
    rows = max(1, LOGIT_VALUES // (length * vocabulary))
    kept: dict[str, list[Tensor]] = {}
    for first in range(0, samples, rows):
        batch = ids[first : first + rows]
        log_probs = functional.log_softmax(logits_of(model, batch), -1)
        found = {"perplexity": _surprisal(log_probs, batch)}
        if reference is not None:
            expected = functional.log_softmax(logits_of(reference, batch), -1).to(log_probs.device)
            found["reference_perplexity"] = _surprisal(expected, batch)
            found["kl_mean"] = (expected.exp() * (expected - log_probs)).sum(-1).double().clamp(min=0).cpu()
            found["same_top"] = (expected.argmax(-1) == log_probs.argmax(-1)).double().cpu()
        for name, values_BT in found.items():
            kept.setdefault(name, []).append(values_BT)
        step(min(first + rows, samples), samples)
    values = {name: torch.cat(parts) for name, parts in kept.items()}  # [W, T] each
    for name, whose in (("perplexity", "the model"), ("reference_perplexity", "the reference")):
        if name in values and not bool(torch.isfinite(values[name]).all()):
            raise CompressError(f"{whose} gives logits that are not finite numbers on this text; it is damaged")
    if reference is not None:
        values["log_perplexity_ratio"] = values["perplexity"] - values["reference_perplexity"]
    figures = {name: _figure(name, values_WT) for name, values_WT in values.items()}
    if reference is not None:
        kl = values["kl_mean"].flatten().numpy()
        figures["kl_median"] = Figure(float(np.median(kl)))
        figures["kl_p99"] = Figure(float(np.quantile(kl, 0.99)))
    return Quality(figures, samples * (length - 1), samples, length)
