"""Measures a model's predictions of a text, beside its original's on the same windows.

`windows` has the protocol, `statistics` the figures and their errors, `predictor` the computation and comparison of
logits: in float32, so that the KL of a token has an error of about 1e-7 nats.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from compress.base.errors import CompressError
from compress.evaluation.document import Band, Figure, Histogram
from compress.evaluation.quality.predictor import FORWARD_TOKENS, Says, chunked
from compress.evaluation.quality.statistics import by_confidence, figures_of, kl_histogram
from compress.evaluation.quality.windows import Windows


@dataclass(frozen=True)
class Quality:
    """Figures of one model on some windows, by name (`statistics`); those against a reference are absent where none was
    given."""

    figures: dict[str, Figure]
    by_confidence: list[Band] = field(default_factory=list)
    kl_histogram: Histogram | None = None


def measure(
    model: Says,
    windows: Windows,
    vocabulary: int,
    reference: Says | None = None,
    step: Callable[[int], None] = lambda windows: None,
    narrow: bool = False,
) -> Quality:
    """Evaluate a model on the windows of a text. step(n) is called after every batch of n windows. narrow: computed in
    float16, whose range may be too small.

    A few numbers are stored per token, never its distribution. Raises CompressError for logits that are not numbers.
    """
    kept: dict[str, list[torch.Tensor]] = {}
    stretches = []
    for batch in windows.batches(max(1, FORWARD_TOKENS // windows.length)):
        for found in chunked(model, reference, batch, vocabulary):
            for name, values_C in found.items():
                kept.setdefault(name, []).append(values_C)
        stretches.append(batch.stretch_P)
        step(len(batch.ids_BL))
    tokens = {name: torch.cat(parts).numpy() for name, parts in kept.items()}
    for name, whose in (("surprisal", "the model"), ("reference_surprisal", "the reference")):
        if name in tokens and not np.isfinite(tokens[name]).all():
            why = "in float16, whose range ends at 65504; measure it in a wider --dtype" if narrow else "it is damaged"
            raise CompressError(f"{whose} gives logits that are not finite numbers on this text: {why}")
    stretch_N = torch.cat(stretches).numpy()
    figures = figures_of(tokens, stretch_N)
    if reference is None:
        return Quality(figures)
    bands = by_confidence(tokens["reference_top"], tokens["kl"], stretch_N)
    return Quality(figures, bands, kl_histogram(tokens["kl"]))
