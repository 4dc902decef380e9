"""Every figure and its standard error against plain computations on stored logits, and against a bootstrap."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.checkpoint.read.source import DEMO
from compress.evaluation.quality import predictor
from compress.evaluation.quality.breakdowns import BANDS
from compress.evaluation.quality.kl_and_perplexity import NAMES, figures_of
from compress.evaluation.quality.windows import Batch, row_windows

WINDOWS, LENGTH, VOCABULARY = 12, 31, 40


class Stored:
    """Says what is stored: logits [W, L, V] by the place of a token."""

    def __init__(self, logits_WLV: torch.Tensor) -> None:
        self.rows_PV = logits_WLV[:, :-1].reshape(-1, logits_WLV.shape[-1])

    def states(self, batch: Batch) -> torch.Tensor:
        return self.rows_PV[batch.first : batch.first + int(batch.scored_BL.sum())]

    def logits(self, states_CD: torch.Tensor) -> torch.Tensor:
        return states_CD


@pytest.fixture(scope="module")
def stored() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [W, L], logits of a model and of its reference [W, L, V] float64; some windows are harder than others."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (WINDOWS, LENGTH), generator=random)
    hard = 1 + 3 * torch.rand(WINDOWS, 1, 1, generator=random, dtype=torch.float64)
    expected = hard * torch.randn(WINDOWS, LENGTH, VOCABULARY, generator=random, dtype=torch.float64)
    noise = torch.randn(expected.shape, generator=random, dtype=torch.float64)
    return ids, expected + 0.3 * hard * noise, expected


def transcribed(ids: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> tuple[dict[str, float], dict[str, float]]:
    """What llama-perplexity computes of two sets of logits, token by token: (values, standard errors by tokens)."""
    nll, nll_base, kl, delta, same = [], [], [], [], []
    for row, z_row, b_row in zip(ids, ours, theirs, strict=True):
        for t in range(len(row) - 1):
            log_q = z_row[t] - z_row[t].max() - np.log(np.exp(z_row[t] - z_row[t].max()).sum())
            log_p = b_row[t] - b_row[t].max() - np.log(np.exp(b_row[t] - b_row[t].max()).sum())
            target = row[t + 1]
            nll.append(-log_q[target])
            nll_base.append(-log_p[target])
            kl.append(float(np.sum(np.exp(log_p) * (log_p - log_q))))
            delta.append(np.exp(log_q[target]) - np.exp(log_p[target]))
            same.append(float(z_row[t].argmax() == b_row[t].argmax()))
    x, y, kl, delta, same = map(np.array, (nll, nll_base, kl, delta, same))
    n = len(x)
    covariance = np.cov(x, y, ddof=1) / n  # of the two means
    ppl, base = np.exp(x.mean()), np.exp(y.mean())
    ratio_error = math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    difference_error = ppl**2 * covariance[0, 0] + base**2 * covariance[1, 1] - 2 * ppl * base * covariance[0, 1]
    rms = math.sqrt((delta**2).mean())
    shares = {"p999": 99.9, "p99": 99, "p95": 95, "p90": 90, "median": 50, "p10": 10, "p05": 5, "p01": 1}
    values = {
        "perplexity": ppl,
        "reference_perplexity": base,
        "log_perplexity_ratio": math.log(ppl / base),
        "perplexity_ratio": ppl / base,
        "perplexity_difference": ppl - base,
        "correlation": covariance[0, 1] / math.sqrt(covariance[0, 0] * covariance[1, 1]),
        "kl_mean": kl.mean(),
        "kl_max": kl.max(),
        "kl_min": kl.min(),
        "delta_p_mean": delta.mean(),
        "delta_p_max": delta.max(),
        "delta_p_min": delta.min(),
        "delta_p_rms": rms,
        "same_top": same.mean(),
        **{f"kl_{word}": np.percentile(kl, share) for word, share in shares.items()},
        **{f"delta_p_{word}": np.percentile(delta, share) for word, share in shares.items()},
    }
    errors = {
        "perplexity": ppl * math.sqrt(covariance[0, 0]),
        "reference_perplexity": base * math.sqrt(covariance[1, 1]),
        "log_perplexity_ratio": ratio_error,
        "perplexity_ratio": ppl / base * ratio_error,
        "perplexity_difference": math.sqrt(difference_error),
        "kl_mean": kl.std(ddof=1) / math.sqrt(n),
        "delta_p_mean": delta.std(ddof=1) / math.sqrt(n),
        "delta_p_rms": (delta**2).std(ddof=1) / math.sqrt(n) / (2 * rms),
        "same_top": math.sqrt(same.mean() * (1 - same.mean()) / (n - 1)),
    }
    return values, errors


def test_figures_are_those_of_a_plain_transcription(stored: tuple[torch.Tensor, ...]) -> None:
    ids, ours, theirs = stored
    found = predictor.measure(Stored(ours), row_windows(ids), VOCABULARY, Stored(theirs))
    values, errors = transcribed(ids.numpy(), ours.numpy(), theirs.numpy())
    assert set(found.figures) == set(values) == set(NAMES)
    for name, value in values.items():
        assert found.figures[name].value == pytest.approx(value, rel=1e-9, abs=1e-12), name
    for name, error in errors.items():
        assert found.figures[name].token_error == pytest.approx(error, rel=1e-9), name
    assert 0.05 < values["kl_mean"] < 1 < values["perplexity_ratio"]  # as of models that people compare


def test_tokens_are_sorted_by_confidence_and_by_their_kl(stored: tuple[torch.Tensor, ...]) -> None:
    ids, ours, theirs = stored
    found = predictor.measure(Stored(ours), row_windows(ids), VOCABULARY, Stored(theirs))
    p, q = (torch.softmax(z[:, :-1], -1).flatten(0, 1).numpy() for z in (theirs, ours))
    kl, top = (p * np.log(p / q)).sum(-1), p.max(-1)
    for band in found.by_confidence:
        inside = (top >= band.low) & ((top < band.high) | (band.high == 1))
        assert band.tokens == inside.sum()
        assert (band.kl_mean is None) == (band.tokens == 0)
        if band.kl_mean is not None:
            assert band.kl_mean.value == pytest.approx(kl[inside].mean(), rel=1e-9)
    assert [band.low for band in found.by_confidence] + [1.0] == list(BANDS)
    assert sum(band.tokens > 0 for band in found.by_confidence) >= 4
    counts, _ = np.histogram(np.log10(kl), bins=found.kl_histogram.edges)
    assert found.kl_histogram.counts == counts.tolist()
    assert sum(counts) == len(kl)


def test_standard_errors_are_those_of_a_bootstrap_over_windows() -> None:
    """Of windows of unequal sizes whose tokens resemble each other."""
    random = np.random.default_rng(0)
    windows = 80
    sizes = random.integers(10, 40, windows)
    stretch = np.repeat(np.arange(windows), sizes)
    hard = np.repeat(random.gamma(4, 0.5, windows), sizes)
    y = hard * random.exponential(1, len(stretch)) + 0.05
    x = np.abs(y + 0.3 * hard * random.normal(0.2, 1, len(y)))
    kl = 0.1 * hard * random.exponential(1, len(y))
    tokens = {
        "surprisal": x,
        "reference_surprisal": y,
        "kl": kl,
        "same_top": (random.random(len(y)) > 0.1 * hard) + 0.0,
    }
    found = figures_of(tokens, stretch)
    members = [np.flatnonzero(stretch == w) for w in range(windows)]
    drawn: dict[str, list[float]] = {}
    for _ in range(300):
        picked = random.integers(0, windows, windows)
        rows = np.concatenate([members[w] for w in picked])
        again = np.repeat(np.arange(windows), sizes[picked])
        for name, figure in figures_of({key: value[rows] for key, value in tokens.items()}, again).items():
            drawn.setdefault(name, []).append(figure.value)
    without = {name for name, figure in found.items() if figure.error is None}
    # What lies beyond the sample has no error: extremes, and where a window or two hold the thousandth part.
    assert without <= {f"{of}_{what}" for of in ("kl", "delta_p") for what in ("max", "min", "p999")}
    for name in found.keys() - without:
        far = 0.6 if name.endswith(("p999", "p99", "p01")) else 0.3 if "_p" in name or name.endswith("median") else 0.2
        assert found[name].error == pytest.approx(float(np.std(drawn[name], ddof=1)), rel=far), name
    paired = found["log_perplexity_ratio"].error
    assert paired < 0.5 * found["perplexity"].error / found["perplexity"].value
    assert found["kl_mean"].token_error < 0.8 * found["kl_mean"].error  # tokens of a window are not independent


def test_what_cannot_be_told_has_no_error_and_what_is_equal_an_error_of_zero() -> None:
    x, one_window = np.array([1.0, 2.0, 4.0]), np.zeros(3, np.int64)
    same = {"surprisal": x, "reference_surprisal": x, "kl": 0 * x, "same_top": 0 * x + 1}
    found = figures_of(same, one_window)
    assert all(figure.error is None for figure in found.values())
    found = figures_of(same, np.arange(3))
    assert (found["kl_mean"].value, found["kl_mean"].error) == (found["delta_p_rms"].value, found["delta_p_rms"].error)
    assert found["kl_mean"].error == 0.0
    constant = figures_of({**same, "surprisal": 0 * x + 1}, np.arange(3))
    assert "correlation" not in constant
    endless = figures_of({"surprisal": x * 1e3}, np.arange(3))["perplexity"]
    assert (endless.value, endless.error) == (math.inf, None)


def test_a_token_that_nobody_can_say_costs_nothing() -> None:
    """Logits of -inf, as of a padded vocabulary, on both sides: p ln(p / q) is 0 there."""
    logits = torch.zeros(1, 3, 4)
    logits[..., 2:] = -torch.inf
    ids = torch.tensor([[0, 1, 0]])
    found = predictor.measure(Stored(logits), row_windows(ids), 4, Stored(logits))
    assert found.figures["kl_mean"].value == 0.0


def test_logits_are_compared_a_chunk_at_a_time(
    monkeypatch: pytest.MonkeyPatch, stored: tuple[torch.Tensor, ...]
) -> None:
    ids, ours, theirs = stored
    at_once = predictor.measure(Stored(ours), row_windows(ids), VOCABULARY, Stored(theirs))
    monkeypatch.setattr(predictor, "CHUNK_VALUES", 7 * VOCABULARY)
    seen: list[int] = []

    class Noted(Stored):
        def logits(self, states_CD: torch.Tensor) -> torch.Tensor:
            seen.append(len(states_CD))
            return states_CD

    in_chunks = predictor.measure(Noted(ours), row_windows(ids), VOCABULARY, Stored(theirs))
    assert max(seen) == 7
    assert in_chunks == at_once


@pytest.mark.slow
@pytest.mark.parametrize("name", ["babyllama-105", "ts-llama-3.7m", "demo"])
def test_perplexity_of_a_trained_model_is_that_of_fifteen_lines(real_data: Path, name: str) -> None:
    path = DEMO if name == "demo" else real_data / "models" / name
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if name == "demo":
        text = (DEMO / "heldout.txt").read_text()
        ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")["input_ids"][0][: 12 * 256].view(12, 256)
    else:
        ids = torch.load(real_data / "tokens" / f"{name}.eval.pt", weights_only=True)[:40]
    total = 0.0
    for row in ids:
        with torch.no_grad():
            logits = model(row[None]).logits[0].double()
        for t in range(len(row) - 1):
            total += float(torch.logsumexp(logits[t], 0) - logits[t, row[t + 1]])
    expected = math.exp(total / (ids.shape[0] * (ids.shape[1] - 1)))
    assert compress.evaluate(path, text=ids).perplexity == pytest.approx(expected, rel=1e-6)
