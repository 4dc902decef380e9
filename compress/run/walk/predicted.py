"""A model's predictions from the outputs of its last block, and another version's distance from them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from compress.model.calls import Batch, Call, real_tokens
from compress.model.layers import Stack
from compress.run.walk.capture import Recorder, instead, swapped
from compress.run.walk.held_out import divergence

Measure = Callable[[Tensor, Tensor], float]


def predicted(
    model: nn.Module, stack: Stack, batch: Batch, call: Call, output: Any, device: torch.device
) -> tuple[Tensor, Measure]:
    """[M, C] what the model returns where its last block returned this, log-probabilities or else numbers; and the sum
    over rows of what others are off. call: of a block, for the same micro-batch."""
    made = output
    if stack.container is not None:
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        with swapped(stack.container, [Recorder(block, partial(instead, output)) for _, block in stack.blocks]):
            made = model(**moved)
    logits = getattr(made, "logits", None)
    probable = isinstance(logits, Tensor) and logits.shape[-1] > 1
    found = logits if isinstance(logits, Tensor) and probable else _numbers(output)
    of_tokens = found.ndim > 2 and (call.tokens is None or found.shape[:2] == call.tokens.shape)
    rows = real_tokens(found, call) if of_tokens else found.flatten(0, -2)
    return (functional.log_softmax(rows.float(), -1), divergence) if probable else (rows.float(), relative_error)


def _numbers(output: Any) -> Tensor:
    """The first tensor of numbers [..., C] in what a block or a model returned."""
    return next(t for t in tree_leaves(output) if isinstance(t, Tensor) and t.ndim > 1 and t.is_floating_point())


def relative_error(expected: Tensor, found: Tensor) -> float:
    """The part of the squares [M, C] that is wrong, times M."""
    energy = expected.square().sum().clamp(min=torch.finfo(expected.dtype).tiny)
    return float((expected - found).square().sum() / energy) * len(expected)
