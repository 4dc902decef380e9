"""Continuations of prompts by a transformers model, many at a time.

Prompts of one batch are padded on the left and masked. A batch is `ROWS` prompts, in their order, whatever memory there
is: sums of a product are rounded in another order for another number of rows, and near ties of two tokens would then be
decided otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from compress.base.errors import InputError
from compress.model.calls import evaluating

ROWS = 16


@torch.no_grad()
def continue_rows(
    network: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    ends: bool = True,
    step: Callable[[int], None] = lambda rows: None,
) -> list[list[int]]:
    """The continuation of each prompt, token ids: at most so many tokens, the last of them an end-of-text token where
    one was written (ends=False: none is). temperature: of sampling from the whole vocabulary; 0: the likeliest token.
    step(n) is called after n prompts. Raises InputError for models that generate nothing."""
    if not getattr(network, "can_generate", lambda: False)():
        raise InputError(f"{type(network).__name__} does not generate text; its own continuations need a decoder")
    from transformers import GenerationConfig

    stop = network.generation_config.eos_token_id
    stops = [] if stop is None or not ends else [stop] if isinstance(stop, int) else list(stop)
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": 0} if temperature else {}
    config = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=temperature > 0,
        pad_token_id=0,
        eos_token_id=stops or None,
        **sampling,
    )
    device = next(network.parameters()).device
    continued: list[list[int]] = []
    with (
        evaluating(network),
        _without_preferences(network),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        torch.manual_seed(seed)
        for first in range(0, len(prompts), ROWS):
            rows = prompts[first : first + ROWS]
            longest = max(map(len, rows))
            ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
            output = network.generate(ids, attention_mask=mask, generation_config=config)
            continued += [_until(row, stops) for row in output[:, longest:].tolist()]
            step(len(rows))
    return continued


@contextmanager
def _without_preferences(network: Any) -> Iterator[None]:
    """A model whose own generation_config, which sets what a call leaves open, is empty inside the context."""
    own = network.generation_config
    network.generation_config = type(own)()
    try:
        yield
    finally:
        network.generation_config = own


def _until(row: list[int], stops: Sequence[int]) -> list[int]:
    """A row up to its first token of these."""
    end = next((i for i, token in enumerate(row) if token in stops), None)
    return row if end is None else row[: end + 1]
