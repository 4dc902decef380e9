"""The texts that a model is measured on: read, tokenized and cut into windows before any weight is loaded."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compress.base.errors import InputError
from compress.checkpoint.files import checksum
from compress.checkpoint.portable_names import portable
from compress.data.bos import bos_of
from compress.data.documents import TOKEN_FORMATS, read_documents
from compress.data.text import check_context, check_windows, default_length, load_tokens, tokenize
from compress.data.tokens import check_ids
from compress.evaluation.document import Figure, Role, TextResult
from compress.evaluation.quality.predictor import Quality
from compress.evaluation.quality.windows import Windows, overlapping_windows, row_windows
from compress.model.vocabulary import check_common

COMPARED = ("perplexity", "log_perplexity_ratio", "kl_mean", "same_top")  # of two texts


@dataclass(frozen=True)
class Text:
    """A text, its role for the model, and its windows. notes: remarks for the user. shared: the number of tokens that
    both models have, where one is padded further. parts: the kind of each item, where windows hold items."""

    name: str
    role: Role
    windows: Windows
    notes: tuple[str, ...] = ()
    shared: int | None = None
    parts: tuple[str, ...] = ()

    def among(self, shared: int) -> "Text":
        """The text for two models of which one has more tokens. Raises InputError for tokens that only one has."""
        check_common(self.windows.ids_N, self.name, shared)
        return replace(self, shared=shared)

    def result(self, quality: Quality, noise: dict[str, Figure] | None) -> TextResult:
        """The figures on the text, with its description."""
        windows = self.windows
        return TextResult(
            name=portable(self.name),
            sha256=checksum(windows.ids_N),
            role=self.role,
            protocol=windows.protocol
            + ("" if self.shared is None else f"; over the {self.shared} tokens that both models have"),
            windows=len(windows.spans),
            length=windows.length,
            stride=windows.stride,
            tokens=windows.predicted,
            figures=quality.figures,
            noise=noise,
            by_confidence=quality.by_confidence,
            kl_histogram=quality.kl_histogram,
            by_position=quality.by_position,
            by_part=quality.by_part,
            agreement=quality.agreement if self.role == "answers" else [],
        )


def load_text(
    source: str | Tensor,
    role: Role,
    tokenizer: Any,
    config: Any,
    *,
    length: int | None,
    samples: int | None,
    stride: int | None,
    bos: str | None = None,
) -> Text:
    """A text as `evaluate` takes it. tokenizer: a function that loads one, called for text only. Raises InputError."""
    if stride is None:
        tokens = load_tokens(source, tokenizer, config, what=role, length=length, samples=samples, bos=bos)
        begun = tokens.bos is not None and bool(tokens.bos.before_windows)
        return Text(tokens.source, role, row_windows(tokens.ids, begun, tokens.before_rows), tokens.notes)
    check_windows(length, samples)
    if isinstance(source, Tensor) or Path(source).suffix in TOKEN_FORMATS:
        name = "a token tensor" if isinstance(source, Tensor) else source
        raise InputError(f"{name} has its windows already, to which stride {stride} does not apply; give text")
    wanted = length or default_length(config)
    if not 1 <= stride <= wanted:
        raise InputError(f"stride {stride}; allowed: 1 to {wanted}, the length of a window")
    if bos == "window":
        raise InputError(
            f"bos 'window' and stride {stride}: overlapping windows are of one text; leave one of them out"
        )
    documents, found = read_documents(source, role), tokenizer()
    assert isinstance(found, PreTrainedTokenizerBase)
    before = bos_of(found, bos, source)
    ids_N = tokenize(documents, found, before)
    if len(ids_N) < 2:
        raise InputError(f"{source} has {len(ids_N)} token; at least 2 are needed: give more text")
    check_ids(ids_N.unsqueeze(0), source, getattr(config, "vocab_size", None))
    check_context(source, min(wanted, len(ids_N)), config)
    skipped = before.before_rows if len(documents.rows) > 1 else None
    notes = (*documents.said_of_fields(role), *documents.said_of_empty(role))
    return Text(source, role, overlapping_windows(ids_N, wanted, stride, samples, skipped), notes)


def gap(texts: list[TextResult]) -> dict[str, Figure]:
    """Figures of the first held-out text less those of the calibration text; empty where there are not both."""
    first: dict[str, TextResult] = {}
    for text in texts:
        first.setdefault(text.role, text)
    if not {"held-out", "calibration"} <= first.keys():
        return {}
    one, other = first["held-out"].figures, first["calibration"].figures
    found = {name: _difference(one[name], other[name]) for name in COMPARED if name in one and name in other}
    return {name: figure for name, figure in found.items() if math.isfinite(figure.value)}


def _difference(one: Figure, other: Figure) -> Figure:
    """The difference of two figures from independent samples, with its error."""
    error, token_error = (
        None if a is None or b is None else (a * a + b * b) ** 0.5
        for a, b in ((one.error, other.error), (one.token_error, other.token_error))
    )
    return Figure(one.value - other.value, error, token_error)
