"""Figures of some tokens of a text: by the reference's confidence, by position, and by item.

The values of a token are those of `predictor.compare_tokens`. Errors are by windows, as those of a whole text
(`kl_and_perplexity`).

Position t of a window has t tokens before it. A flip is a token of which the model's first choice is another than the
reference's; its margin is ln(p(first choice of the reference) / p(first choice of the model)) by the reference: how
sure the reference was of what was lost.

An item is exact where each of its tokens is the model's first choice, given the item's tokens before it: greedy
decoding then writes that item, and where it does not, it leaves it at the first token that is another.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from compress.evaluation.document import Agreed, Band, Figure, Histogram, ItemFigures
from compress.evaluation.quality.exact_intervals import share_of
from compress.evaluation.quality.kl_and_perplexity import Values, mean_of, of_few_windows

BANDS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # of the probability of the reference's first choice
EDGES = tuple(-9 + i / 2 for i in range(23))  # of log10 of KL: 1e-9 to 100 nats
NEAR = 512  # tokens of the first band of positions; each further one ends at twice as many

Numbers = NDArray[np.int64]
Tokens = Mapping[str, Values]


def by_confidence(top_N: Values, kl_N: Values, stretch_N: Numbers) -> list[Band]:
    """Mean KL of tokens by top_N, the probability that the reference gave its first choice."""
    which_N = np.clip(np.searchsorted(BANDS, top_N, side="right") - 1, 0, len(BANDS) - 2)
    bands = []
    for i in range(len(BANDS) - 1):
        inside = which_N == i
        mean = mean_of(kl_N[inside], stretch_N[inside]) if inside.any() else None
        bands.append(Band(BANDS[i], BANDS[i + 1], int(inside.sum()), mean))
    return bands


def kl_histogram(kl_N: Values) -> Histogram:
    """Counts of log10 of the KL. Values below the first edge, zero included, are in the first bin; those above the last
    edge in the last."""
    tiny = np.finfo(np.float64).tiny
    logs = np.clip(np.log10(np.maximum(kl_N, tiny)), EDGES[0], EDGES[-1])
    counts, _ = np.histogram(logs, bins=np.array(EDGES))
    return Histogram(list(EDGES), [int(count) for count in counts])


def by_position(position_N: Numbers, tokens: Tokens, stretch_N: Numbers) -> list[Band]:
    """KL and flips of tokens by the number of tokens before them: fewer than 512, 1,024, 2,048 ...; empty where no
    window is longer than the first band."""
    bands, low, high = [], 0, NEAR
    most = int(position_N.max()) + 1
    while most > NEAR and low < most:
        inside = (position_N >= low) & (position_N < high)
        if inside.any():
            found = _compared(tokens, stretch_N, inside)
            ends = float(low), float(min(high, most))
            margin = found.get("flip_margin")
            bands.append(Band(*ends, int(inside.sum()), found.get("kl_mean"), found.get("flips"), margin))
        low, high = high, 2 * high
    return bands


def by_part(item_N: Numbers, parts: Sequence[str], tokens: Tokens, stretch_N: Numbers) -> list[ItemFigures]:
    """Figures by kind of item. item_N: the item of each token; parts: the kind of each item, whose numbers sort as
    numbers."""
    names = sorted(set(parts), key=lambda part: (part.partition(",")[0], len(part), part))
    kinds, described = np.array([names.index(part) for part in parts]), []
    for i, name in enumerate(names):
        inside = kinds[item_N] == i
        if inside.any():
            figures = _compared(tokens, stretch_N, inside) | dict(_exact(item_N, tokens, stretch_N, inside))
            described.append(ItemFigures(name, len(np.unique(item_N[inside])), int(inside.sum()), figures))
    return described


def agreement(item_N: Numbers, given_N: Values) -> list[Agreed]:
    """The shares of answers that the model begins in the same words. given_N: 1 where its first choice is the answer's
    token."""
    _, begins, lengths = np.unique(item_N, return_index=True, return_counts=True)
    same = np.array([_length_of_ones(given_N[b : b + n]) for b, n in zip(begins, lengths, strict=True)])
    shares, most = [], int(lengths.max())
    for tokens in (*(2**i for i in range(most.bit_length()) if 2**i < most), None):
        reached = same >= (lengths if tokens is None else np.minimum(lengths, tokens))
        shares.append(Agreed(tokens, share_of(reached.astype(np.float64))))
    return shares


def _length_of_ones(values_N: Values) -> int:
    """The number of ones before the first zero."""
    others = np.flatnonzero(values_N == 0)
    return int(others[0]) if len(others) else len(values_N)


def _compared(tokens: Tokens, stretch_N: Numbers, inside: NDArray[np.bool_]) -> dict[str, Figure]:
    """KL, flips, their margin and the ratio of perplexities of some tokens; empty without a reference."""
    if "kl" not in tokens:
        return {}
    flips_N, windows_N = 1 - tokens["same_top"], stretch_N[inside]
    figures = {
        "kl_mean": _of_windows(tokens["kl"][inside], windows_N),
        "flips": _of_windows(flips_N[inside], windows_N),
        "log_perplexity_ratio": _of_windows((tokens["surprisal"] - tokens["reference_surprisal"])[inside], windows_N),
    }
    flipped = inside & (flips_N > 0)
    if flipped.any():
        figures["flip_margin"] = _of_windows(tokens["flip_margin"][flipped], stretch_N[flipped])
    return figures


def _exact(
    item_N: Numbers, tokens: Tokens, stretch_N: Numbers, inside: NDArray[np.bool_]
) -> Iterator[tuple[str, Figure]]:
    """The shares of exact items, by the model and by its reference, and of items without a flip. Items that are windows
    of their own have exact intervals where those are needed."""
    _, first, which = np.unique(item_N[inside], return_index=True, return_inverse=True)
    windows_I = stretch_N[inside][first]
    for name, given in (("exact", "given"), ("reference_exact", "reference_given"), ("unflipped", "same_top")):
        if given in tokens:
            missed_I = np.bincount(which, weights=1 - tokens[given][inside])
            exact_I = (missed_I == 0).astype(np.float64)
            alone = len(np.unique(windows_I)) == len(windows_I)
            yield name, share_of(exact_I) if alone else _of_windows(exact_I, windows_I)


def _of_windows(values_N: Values, stretch_N: Numbers) -> Figure:
    return of_few_windows(mean_of(values_N, stretch_N), len(np.unique(stretch_N)))
