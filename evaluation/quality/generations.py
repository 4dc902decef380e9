"""Answers of a model beside those of its reference, as text, and the place where they diverge."""

from collections.abc import Sequence
from typing import Any

from compress.evaluation.document import Generation
from compress.inference.continued import continue_rows

SHOWN, TOKENS = 3, 48  # answers in a report, and the most tokens of each


def beside(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Generation]:
    """The first answers of the reference, and the model's own to the same prompts: its likeliest tokens. prompts,
    answers: token ids. Raises InputError for models that generate nothing."""
    tokens = min(TOKENS, max(map(len, answers)))
    own = continue_rows(model, prompts[:SHOWN], tokens)
    found = []
    for prompt, *both in zip(prompts[:SHOWN], own, answers[:SHOWN], strict=True):
        ours, theirs = (_text(tokenizer, prompt, answer[:tokens]) for answer in both)
        found.append(Generation(_decoded(tokenizer, prompt), ours, theirs, parting(ours, theirs)))
    return found


def parting(first: str, second: str) -> int | None:
    """The first character in which two texts differ; None where they are the same."""
    if first == second:
        return None
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)


def _text(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """An answer as text, decoded with its prompt: some tokenizers leave out the blank before a first word."""
    before, whole = _decoded(tokenizer, prompt), _decoded(tokenizer, [*prompt, *answer])
    return whole[len(before) :] if whole.startswith(before) else whole


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode([*ids], skip_special_tokens=True))
