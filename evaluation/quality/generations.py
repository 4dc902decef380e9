"""Greedy continuations of the same prompts by a model and its reference, and the place where they diverge."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.base.regular_files import regular
from compress.checkpoint.read.tokenizer_check import tokenizing
from compress.evaluation.document import Generation

TOKENS = 48
PROMPTS, BEGINNING = 3, 24  # number of default prompts, and the tokens of each


def read_prompts(path: str) -> list[str]:
    """The lines of a text file that are not empty. Raises InputError where all are empty."""
    file = regular(Path(path), "prompts")
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); give a UTF-8 text file, a prompt on each line") from None
    found = [line for line in lines if line]
    if not found:
        raise InputError(f"{path} holds no prompt; give a UTF-8 text file, a prompt on each line")
    return found


def beginnings(tokenizer: Any, ids_BT: Tensor) -> list[str]:
    """Prompts from the first tokens of some windows of a text, spread over it."""
    count = min(PROMPTS, len(ids_BT))
    rows = [i * len(ids_BT) // count for i in range(count)]
    found = [tokenizer.decode(ids_BT[row, :BEGINNING], skip_special_tokens=True).strip() for row in rows]
    return [each for each in found if each]


def generate(
    model: Any, reference: Any, tokenizer: Any, prompts: Sequence[str], tokens: int = TOKENS
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
            Generation(prompt, texts[0], texts[1], None if texts[1] is None else parting(texts[0], texts[1]))
        )
    return generations


def parting(first: str, second: str) -> int | None:
    """The first character in which two texts differ; None where they are the same."""
    if first == second:
        return None
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)


@torch.no_grad()
def continue_prompt(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    if not getattr(model, "can_generate", lambda: False)():
        raise InputError(f"{type(model).__name__} does not generate text; continuations are of decoders")
    with tokenizing(tokenizer, "the prompt", [prompt]):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    count = inputs["input_ids"].shape[1]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = tokens if context is None else min(tokens, context - count)
    if count == 0 or room < 1:
        raise InputError(f"the prompt {prompt[:40]!r} has {count} tokens; allowed: 1 to {(context or 2) - 1}")
    inputs = inputs.to(next(model.parameters()).device)
    output = model.generate(**inputs, max_new_tokens=room, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    # Decoded with the prompt and cut: some tokenizers leave out the blank before a first word.
    whole: str = tokenizer.decode(output[0], skip_special_tokens=True)
    before: str = tokenizer.decode(output[0, :count], skip_special_tokens=True)
    return whole[len(before) :] if whole.startswith(before) else whole
