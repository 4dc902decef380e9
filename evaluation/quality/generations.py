"""Greedy continuations of the same prompts by a model and its reference, and the place where they diverge."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.data.rows import Row
from compress.evaluation.document import Generation
from compress.evaluation.quality.prompts import prompt_tokens, prompt_words

TOKENS = 48
PROMPTS, BEGINNING = 3, 24  # number of default prompts, and the tokens of each


def beginnings(tokenizer: Any, ids_BT: Tensor) -> list[str]:
    """Prompts from the first tokens of some windows of a text, spread over it."""
    count = min(PROMPTS, len(ids_BT))
    rows = [i * len(ids_BT) // count for i in range(count)]
    found = [tokenizer.decode(ids_BT[row, :BEGINNING], skip_special_tokens=True).strip() for row in rows]
    return [each for each in found if each]


def generate(
    model: Any, reference: Any, tokenizer: Any, prompts: Sequence[Row], tokens: int = TOKENS
) -> list[Generation]:
    """Greedy continuations of at most so many tokens. reference may be None.

    Raises InputError for models that generate nothing, and for prompts that leave no room in the context.
    """
    generations = []
    for prompt in prompts:
        texts = [
            None if each is None else continue_prompt(each, tokenizer, prompt, tokens) for each in (model, reference)
        ]
        assert texts[0] is not None
        generations.append(
            Generation(
                prompt_words(prompt), texts[0], texts[1], None if texts[1] is None else parting(texts[0], texts[1])
            )
        )
    return generations


def parting(first: str, second: str) -> int | None:
    """The first character in which two texts differ; None where they are the same."""
    if first == second:
        return None
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)


@torch.no_grad()
def continue_prompt(model: Any, tokenizer: Any, prompt: Row, tokens: int) -> str:
    if not getattr(model, "can_generate", lambda: False)():
        raise InputError(f"{type(model).__name__} does not generate text; continuations are of decoders")
    (ids,) = prompt_tokens(tokenizer, [prompt])
    count = len(ids)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = tokens if context is None else min(tokens, context - count)
    if count == 0 or room < 1:
        raise InputError(
            f"the prompt {prompt_words(prompt)[:40]!r} has {count} tokens; allowed: 1 to {(context or 2) - 1}"
        )
    ids_1L = torch.tensor([ids], device=next(model.parameters()).device)
    output = model.generate(ids_1L, max_new_tokens=room, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    # Decoded with the prompt and cut: some tokenizers leave out the blank before a first word.
    whole: str = tokenizer.decode(output[0], skip_special_tokens=True)
    before: str = tokenizer.decode(output[0, :count], skip_special_tokens=True)
    return whole[len(before) :] if whole.startswith(before) else whole
