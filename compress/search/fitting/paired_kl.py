"""The difference of two compressed models' KL to their original, paired by the windows of held-out text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from compress.engine.walk.held_out_kl import divergence_between
from compress.evaluation.document import Figure
from compress.evaluation.quality.kl_and_perplexity import mean_of_independent, of_few_windows
from compress.inference.load.loading import load
from compress.model.calls import evaluating


def kl_of_windows(original: nn.Module, found: nn.Module, rows: Tensor) -> list[float]:
    """KL(original || found) of every window, nats per token. rows: token ids [windows, length]."""
    with evaluating(original), evaluating(found):
        return [divergence_between(original, found, [{"input_ids": row}]) for row in rows.split(1)]


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Figure:
    """The mean of first - second over windows, its standard error, and Student's interval where windows are few."""
    figure = mean_of_independent(np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64))
    return of_few_windows(figure, len(first))


def compare(model: str | Path, one: Path, other: Path, rows: Tensor, trusted: bool = False) -> Figure:
    """`paired_difference` of the KLs of two checkpoints of a model: negative where the first is closer to it."""
    original = load(model, torch.float32, trust_remote_code=trusted)
    made = (load(each, torch.float32, dequantize=True, trust_remote_code=trusted) for each in (one, other))
    return paired_difference(*(kl_of_windows(original, each, rows) for each in made))


def with_interval(figure: Figure) -> str:
    """A figure and its 95 % interval."""
    low, high = interval(figure)
    return f"{figure.value:.4g}" if low == high else f"{figure.value:.4g} ({low:.4g} to {high:.4g})"


def interval(figure: Figure) -> tuple[float, float]:
    """95 %; of a figure without an error its value twice."""
    if figure.interval is not None:
        return figure.interval
    beside = 1.96 * (figure.error or 0.0)
    return figure.value - beside, figure.value + beside
