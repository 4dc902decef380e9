"""Figures of two models on the same tokens, each with its standard error.

Of predicted token t the reference says p_t(.) and the model q_t(.); x_t = -ln q_t(token), y_t = -ln p_t(token), and
KL_t = sum_v p_t(v) ln(p_t(v) / q_t(v)) >= 0 over the whole vocabulary, in nats.

    perplexity, reference_perplexity    exp of the mean of x, of y
    log_perplexity_ratio                mean of x - y;  perplexity_ratio: its exponential
    perplexity_difference               perplexity less the reference's
    correlation                         of x and y (Pearson)
    kl_mean, kl_median, kl_max ...      of KL_t; p999 is the 99.9th percentile, p01 the first
    delta_p_mean, delta_p_rms ...       of q_t(token) - p_t(token), -1 to 1, of the text's own token
    same_top                            share of tokens for which both rank the same token first

These are the figures of llama.cpp's `llama-perplexity --kl-divergence`. Percentiles interpolate between the two nearest
tokens.

Standard errors. A figure f of N tokens moves by (1/N) sum_t u_t where u_t is its influence (sum_t u_t = 0): x_t - mean
for a mean m, exp(m) (x_t - m) for a perplexity, P (x_t - m_x) - R (y_t - m_y) for a difference of perplexities P and R:
the covariance of the two is in it, so what compares two models is paired, and its error far smaller than those of the
two perplexities let expect. Then, with s_w the sum of u over the tokens of window w, of W windows,

    error         sqrt(W / (W - 1) sum_w s_w^2) / N        none for one window
    token_error   sqrt(sum_t u_t^2 / (N - 1) / N)          as llama.cpp states it

Tokens of one window are not independent: a hard passage is hard for many of them, a topic that quantization has hurt
hurts throughout. By tokens is too small then; by windows allows for whatever correlation there is inside a window (a
sample of clusters, of any sizes) and is the one that is shown. Both take the windows for independent draws of text.
Where windows overlap, w runs over stretches of the text of a window's length. Percentiles: the error of the share of
tokens below the value, from the same sums, turned into one of the value by the neighbouring percentiles (Woodruff
1952, J. Am. Stat. Assoc. 47); none where those lie beyond the sample. A largest or smallest value has none.

The error of few windows is itself uncertain: of fewer than `FEW_WINDOWS` a figure has an interval of Student's t with
W - 1 degrees of freedom (of two windows 12.7 errors to either side), where others have 1.96 errors.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from compress.evaluation.document import Figure

Values = NDArray[np.float64]
PERCENTILES = {"p999": 0.999, "p99": 0.99, "p95": 0.95, "p90": 0.9, "median": 0.5, "p10": 0.1, "p05": 0.05, "p01": 0.01}
FEW_WINDOWS = 30  # from which on 95 % of Student's t are within 2.05 standard errors
TAIL = 0.025
MOST = 1e20  # of an exponential; perplexities of models that say nothing are above it
SPREAD = tuple(f"{of}_{what}" for of in ("kl", "delta_p") for what in ("mean", "max", *PERCENTILES, "min"))
NAMES = (
    *("perplexity", "reference_perplexity", "log_perplexity_ratio", "perplexity_ratio", "perplexity_difference"),
    *("correlation", *SPREAD, "delta_p_rms", "same_top"),
)


def standard_errors(influence_N: Values, stretch_N: NDArray[np.int64]) -> tuple[float | None, float | None]:
    """(By windows, by tokens) of the mean of influences; None where there is one window, one token."""
    count = len(influence_N)
    centred = influence_N - influence_N.mean()
    if not np.isfinite(centred).all():
        return None, None
    _, window_N = np.unique(stretch_N, return_inverse=True)
    sums_W = np.bincount(window_N, weights=centred)
    windows = len(sums_W)
    by_windows = math.sqrt(windows / (windows - 1) * float(sums_W @ sums_W)) / count if windows > 1 else None
    by_tokens = math.sqrt(float(centred @ centred) / (count - 1) / count) if count > 1 else None
    return by_windows, by_tokens


def mean_of(values_N: Values, stretch_N: NDArray[np.int64]) -> Figure:
    """The mean."""
    return Figure(float(values_N.mean()), *standard_errors(values_N, stretch_N))


def mean_of_independent(values_N: Values) -> Figure:
    """The mean of values that are one draw each; without an error of a single one, or of values that are all the same,
    which say nothing about how far others may lie."""
    varied = len(values_N) > 1 and bool((values_N != values_N[0]).any())
    error = float(values_N.std(ddof=1) / math.sqrt(len(values_N))) if varied else None
    return Figure(float(values_N.mean()), error)


def of_few_windows(figure: Figure, windows: int) -> Figure:
    """A figure with the interval of Student's t; as it is without an error, or of many windows."""
    if figure.error is None or not 1 < windows < FEW_WINDOWS:
        return figure
    beside = float(stdtrit(windows - 1, 1 - TAIL)) * figure.error
    return replace(figure, interval=(figure.value - beside, figure.value + beside))


def exponential(mean: Figure) -> Figure:
    """exp of a mean, by the delta method; infinite above `MOST`."""
    if mean.value > math.log(MOST):
        return Figure(math.inf)
    value = math.exp(mean.value)
    error, token_error = (None if error is None else error * value for error in (mean.error, mean.token_error))
    return Figure(value, error, token_error)


def spread(name: str, values_N: Values, stretch_N: NDArray[np.int64]) -> dict[str, Figure]:
    """Mean, extremes and percentiles of a value per token."""
    ordered = np.sort(values_N)
    figures = {f"{name}_mean": mean_of(values_N, stretch_N), f"{name}_max": Figure(float(ordered[-1]))}
    for word, share in PERCENTILES.items():
        value = float(np.quantile(ordered, share))
        below = (values_N <= value).astype(np.float64)
        error, token_error = (_of_value(ordered, share, error) for error in standard_errors(below, stretch_N))
        figures[f"{name}_{word}"] = Figure(value, error, token_error)
    return {**figures, f"{name}_min": Figure(float(ordered[0]))}


def _of_value(ordered: Values, share: float, error: float | None) -> float | None:
    """The error of a percentile from that of the share of values below it."""
    if error is None or share - error < 0 or share + error > 1:
        return None
    low, high = np.quantile(ordered, [share - error, share + error])
    return float(high - low) / 2


def correlation(x_N: Values, y_N: Values, stretch_N: NDArray[np.int64]) -> Figure | None:
    """Pearson's; None where one of the two does not vary."""
    x, y = (v - v.mean() for v in (x_N, y_N))
    scales = math.sqrt(float(x @ x) / len(x)), math.sqrt(float(y @ y) / len(y))
    if not all(scale > 0 and math.isfinite(scale) for scale in scales):
        return None
    x, y = x / scales[0], y / scales[1]
    value = float(x @ y) / len(x)
    return Figure(value, *standard_errors(x * y - value * (x * x + y * y) / 2, stretch_N))


def figures_of(tokens: Mapping[str, Values], stretch_N: NDArray[np.int64]) -> dict[str, Figure]:
    """All figures, by name, from the values stored per token: `surprisal` and, where there is a reference,
    `reference_surprisal`, `kl` and `same_top`."""
    windows = len(np.unique(stretch_N))
    return {name: of_few_windows(figure, windows) for name, figure in _figures_of(tokens, stretch_N).items()}


def _figures_of(tokens: Mapping[str, Values], stretch_N: NDArray[np.int64]) -> dict[str, Figure]:
    """The figures of `figures_of`, without Student's intervals."""
    x_N = tokens["surprisal"]
    figures = {"perplexity": exponential(mean_of(x_N, stretch_N))}
    if "reference_surprisal" not in tokens:
        return figures
    y_N = tokens["reference_surprisal"]
    figures["reference_perplexity"] = exponential(mean_of(y_N, stretch_N))
    figures["log_perplexity_ratio"] = mean_of(x_N - y_N, stretch_N)
    figures["perplexity_ratio"] = exponential(figures["log_perplexity_ratio"])
    one, other = figures["perplexity"].value, figures["reference_perplexity"].value
    if math.isfinite(one) and math.isfinite(other):
        errors = standard_errors(one * x_N - other * y_N, stretch_N)
        figures["perplexity_difference"] = Figure(one - other, *errors)
    together = correlation(x_N, y_N, stretch_N)
    figures |= {} if together is None else {"correlation": together}
    figures |= spread("kl", tokens["kl"], stretch_N)
    delta_N = np.exp(-x_N) - np.exp(-y_N)
    figures |= spread("delta_p", delta_N, stretch_N)
    square = mean_of(delta_N * delta_N, stretch_N)
    rms = math.sqrt(square.value)
    of_root = [None if e is None else e / (2 * rms) if rms else 0.0 for e in (square.error, square.token_error)]
    figures["delta_p_rms"] = Figure(rms, of_root[0], of_root[1])
    figures["same_top"] = mean_of(tokens["same_top"], stretch_N)
    return figures
