"""Encoders: the change of their embeddings, and the agreement of these with people's scores of two sentences (STS).

    cosine_mean, cosine_p01, cosine_min ...   of a sentence's embedding to the one that the reference gives it, -1 to 1
    spearman, reference_spearman              rank correlation of cos(embedding 1, embedding 2) with the scores of pairs
    spearman_difference                       the first less the second

A file of pairs is JSONL of {"sentence1", "sentence2", "score"}, as of the STS benchmark (Cer et al. 2017, SemEval).
An embedding is the mean of the last hidden states over a sentence's tokens, or the first of them ("cls"). Errors of the
cosine are those of a mean over sentences; those of Spearman's are of a bootstrap over pairs, the same pairs for both
models, so that the difference is paired.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from compress.base.device import find_device
from compress.base.errors import CheckpointError, InputError, one_of
from compress.base.progress import Reporter, Silent
from compress.base.regular_files import json_line, regular
from compress.base.schema import fits
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.source import path_of
from compress.checkpoint.read.tokenizer_check import tokenizing
from compress.evaluation.document import EmbeddingResult, Evaluation, Figure
from compress.evaluation.provenance import MeasuredModel, evaluation_of
from compress.evaluation.quality.kl_and_perplexity import Values, spread
from compress.evaluation.quality.language import Model, first_tokenizer, load_dense, open_model
from compress.model.calls import evaluating

Pooling = Literal["mean", "cls"]
BATCH = 32
RESAMPLES = 1000
NAMES = (
    *(f"cosine_{what}" for what in ("mean", "median", "p10", "p05", "p01", "min")),
    *("spearman", "reference_spearman", "spearman_difference"),
)


class SentencePair(TypedDict):
    """The fields read from a line of a file of pairs. score: the more alike, the larger; any scale."""

    sentence1: str
    sentence2: str
    score: float


@dataclass(frozen=True)
class Encoder:
    """A network, its tokenizer, and the pooling that makes an embedding of its hidden states."""

    network: Any
    tokenizer: Any
    pooling: str

    @torch.no_grad()
    def embeddings(self, sentences: Sequence[str]) -> Tensor:
        """[S, D] float32 on the CPU, in the order of the sentences. Raises InputError for a model without hidden
        states."""
        if self.tokenizer.pad_token is None:
            raise InputError("the tokenizer has no padding token, which sentences of several lengths need; set one")
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        device = next(self.network.parameters()).device
        parts: list[Tensor] = []
        with evaluating(self.network), tokenizing(self.tokenizer, "the sentences", sentences):
            for first in range(0, len(order), BATCH):
                part = [sentences[i] for i in order[first : first + BATCH]]
                batch = self.tokenizer(part, padding=True, truncation=True, return_tensors="pt").to(device)
                hidden = getattr(self.network(**batch), "last_hidden_state", None)
                if hidden is None:
                    raise InputError(f"{type(self.network).__name__} returns no last hidden states; give an encoder")
                parts.append(self._pooled(hidden, batch["attention_mask"]).float().cpu())
        return torch.cat(parts)[torch.tensor(order).argsort()]

    def _pooled(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        if self.pooling == "cls":
            return hidden_BTD[:, 0]
        mask = mask_BT.unsqueeze(-1).to(hidden_BTD.dtype)
        return (hidden_BTD * mask).sum(1) / mask.sum(1)


def read_pairs(source: str | Path) -> list[SentencePair]:
    """The lines of a file of pairs. Raises InputError, naming the line, for one that is not a pair."""
    path = regular(path_of(str(source), "pairs"), "pairs")
    if not path.is_file():
        raise InputError(f"file of pairs {str(source)!r} does not exist; give JSONL of sentence1, sentence2, score")
    pairs: list[SentencePair] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            value = json_line(line, f"{path} line {number}")
            try:
                fits(value, SentencePair, f"{path} line {number}")
            except CheckpointError as error:
                raise InputError(str(error)) from None
            pairs.append(value)
    return pairs


def evaluate_encoder(
    model: nn.Module | str | Path,
    pairs: str | Path | Sequence[SentencePair],
    *,
    reference: nn.Module | str | Path | None = None,
    tokenizer: Any = None,
    pooling: Pooling = "mean",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Evaluation:
    """Measure an encoder, compressed or not, on pairs of sentences: two or more whose scores differ.

    model, reference: directories, hub ids or models in memory (those need a tokenizer). pairs: a JSONL file, or its
    lines. pooling: mean, cls. dtype: of the arithmetic, as in `evaluate`. Sentences are cut to the tokenizer's maximum
    length. Raises InputError for unusable models and pairs.
    """
    one_of("pooling", pooling, get_args(Pooling))
    rows = read_pairs(pairs) if isinstance(pairs, str | Path) else list(pairs)
    scores_P = np.array([row["score"] for row in rows], np.float64)
    if len(rows) < 2 or not np.ptp(scores_P) > 0:
        raise InputError(f"{len(rows)} pairs of sentences; at least two are needed, with scores that differ")
    target = find_device(device)
    work = torch.float32 if dtype is None and target.type == "cpu" else dtype
    reporter = reporter or Silent()
    ours = open_model(model, trust_remote_code)
    theirs = None if reference is None else open_model(reference, trust_remote_code)
    words = tokenizer if tokenizer is not None else first_tokenizer(ours, theirs)
    sentences = list(dict.fromkeys(row[key] for row in rows for key in ("sentence1", "sentence2")))
    places = {sentence: i for i, sentence in enumerate(sentences)}
    at_P2 = np.array([[places[row["sentence1"]], places[row["sentence2"]]] for row in rows])

    def asked(who: Model) -> tuple[MeasuredModel, Tensor]:
        network = load_dense(who, work, target)
        return MeasuredModel(who, network), Encoder(network, words, pooling).embeddings(sentences)

    model_measured, found_SD = asked(ours)
    original, expected_SD = (None, None) if theirs is None else asked(theirs)
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    name = portable(str(pairs)) if isinstance(pairs, str | Path) else "pairs in memory"
    figures = _figures(found_SD, expected_SD, at_P2, scores_P)
    result = EmbeddingResult(name, digest, pooling, len(rows), len(sentences), figures)
    return replace(evaluation_of(model_measured, original, target), embeddings=[result])


def _figures(
    found_SD: Tensor, expected_SD: Tensor | None, at_P2: np.ndarray[Any, Any], scores_P: Values
) -> dict[str, Figure]:
    """All figures by name."""
    random = np.random.default_rng(0)
    picked_RP = random.integers(0, len(scores_P), (RESAMPLES, len(scores_P)))
    ours = _spearman(_alike(found_SD, at_P2), scores_P, picked_RP)
    figures = {"spearman": _with_error(*ours)}
    if expected_SD is None:
        return figures
    if expected_SD.shape != found_SD.shape:
        raise InputError(f"embeddings have {found_SD.shape[1]} values, the reference's {expected_SD.shape[1]}")
    theirs = _spearman(_alike(expected_SD, at_P2), scores_P, picked_RP)
    figures["reference_spearman"] = _with_error(*theirs)
    figures["spearman_difference"] = _with_error(ours[0] - theirs[0], ours[1] - theirs[1])
    cosines_S = cosine_similarity(found_SD.double(), expected_SD.double()).numpy()
    spreading = spread("cosine", cosines_S, np.arange(len(cosines_S)))
    return {**{name: figure for name, figure in spreading.items() if name in NAMES}, **figures}


def _alike(embeddings_SD: Tensor, at_P2: np.ndarray[Any, Any]) -> Values:
    one, other = (embeddings_SD[torch.from_numpy(at_P2[:, i])].double() for i in (0, 1))
    return np.asarray(cosine_similarity(one, other).numpy(), np.float64)


def _spearman(x_P: Values, y_P: Values, picked_RP: np.ndarray[Any, Any]) -> tuple[float, Values]:
    """The rank correlation, and that of every resample."""
    again_R = np.array([_of_ranks(x_P[row], y_P[row]) for row in picked_RP])
    return _of_ranks(x_P, y_P), again_R


def _of_ranks(x_P: Values, y_P: Values) -> float:
    x, y = rankdata(x_P), rankdata(y_P)
    x, y = x - x.mean(), y - y.mean()
    scale = float(x @ x) * float(y @ y)
    return float(x @ y) / scale**0.5 if scale else float("nan")


def _with_error(value: float, again_R: Values) -> Figure:
    return Figure(value, float(np.nanstd(again_R, ddof=1)))
