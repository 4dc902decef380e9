"""Rows that no statistic has seen, on their way through the blocks of the original and of uniform models: the KL
between the predictions of both. Of one micro-batch logits are in memory at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.base.errors import InputError
from compress.engine.walk.capture import next_calls, returning
from compress.model.calls import Batch, Call, token_mask
from compress.model.layers import Layer, Stack

Values = Mapping[Layer, Tensor]


class HeldOut:
    """Micro-batches of one length in front of a block, in the original and in each of several uniform models.

    calls[block][micro-batch]: how each block is called (`engine.walk.capture`). names: of the uniform models.
    """

    def __init__(
        self, model: nn.Module, stack: Stack, batches: Sequence[Batch], calls: list[list[Call]], names: Sequence[str]
    ) -> None:
        self.model, self.stack, self.batches, self.calls = model, stack, batches, calls
        self.own = list(calls[0])
        self.uniform = {name: list(calls[0]) for name in names}

    @torch.no_grad()
    def advance(self, index: int, values: Mapping[str, Values]) -> None:
        """Go on to the next block: the original as it is, each uniform model with its values."""
        block = self.stack.blocks[index][1]
        self.own = next_calls(self.calls, index, [block(*call.args, **call.kwargs) for call in self.own])
        for name, calls in self.uniform.items():
            with holding(values[name]):
                self.uniform[name] = next_calls(self.calls, index, [block(*c.args, **c.kwargs) for c in calls])

    @torch.no_grad()
    def uniform_kl(self) -> dict[str, float]:
        """{name: KL(original || uniform model)}, once all blocks are behind."""
        totals, tokens = dict.fromkeys(self.uniform, 0.0), 0
        for i, end in enumerate(self.own):
            expected = self._log_probs(i, end)
            tokens += expected[..., 0].numel()
            for name, ends in self.uniform.items():
                totals[name] += divergence(expected, self._log_probs(i, ends[i]))
        return {name: total / tokens for name, total in totals.items()}

    def _log_probs(self, i: int, output: Any) -> Tensor:
        """`_of_next`, from what the last block returned of a micro-batch."""
        if self.stack.container is not None:
            with returning(self.stack, output):
                output = self.model(**self.batches[i])
        logits = getattr(output, "logits", None)
        if logits is None:
            raise InputError(f"{type(self.model).__name__} predicts no next token, so that there is no KL")
        return _of_next(logits, self.batches[i])


def divergence(expected: Tensor, found: Tensor) -> float:
    """The sum over tokens of KL(expected || found), log-probabilities [..., V]."""
    return float((expected.exp() * (expected - found)).sum(-1).double().clamp(min=0).sum())


@torch.no_grad()
def divergence_between(expected: nn.Module, found: nn.Module, batches: Sequence[Batch]) -> float:
    """KL(expected || found) of two models, nats per predicted token. Both are in evaluation mode."""
    total, tokens = 0.0, 0
    for batch in batches:
        ours, theirs = (_of_whole(model, batch) for model in (expected, found))
        total, tokens = total + divergence(ours, theirs.to(ours.device)), tokens + ours[..., 0].numel()
    return total / tokens


def _of_whole(model: nn.Module, batch: Batch) -> Tensor:
    device = next(model.parameters()).device
    logits = model(**{key: value.to(device) for key, value in batch.items()}).logits
    return _of_next(logits, batch)


def _of_next(logits_BTV: Tensor, batch: Batch) -> Tensor:
    """Log-probabilities of the next token, float32: [B, T-1, V], or [M, V] of those that are no padding."""
    mask_BT = token_mask(batch)
    found = logits_BTV[:, :-1] if mask_BT is None else logits_BTV[:, :-1][mask_BT[:, 1:].to(logits_BTV.device)]
    return functional.log_softmax(found.float(), -1)


@contextmanager
def holding(values: Values) -> Iterator[None]:
    """Gives layers other stored values inside the context; restores them after it."""
    before: list[tuple[Layer, Tensor]] = []
    try:
        for layer, tensor in values.items():
            before.append((layer, layer.put(tensor)))
        yield
    finally:
        for layer, tensor in reversed(before):
            layer.put(tensor)
