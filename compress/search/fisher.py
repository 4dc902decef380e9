"""The Fisher information of each layer's output: what an error of that output costs the model's predictions.

    KL(p || p') per token  ~  1/2 sum over outputs n of  F_n  e_n H e_n^T

Shapes: N outputs, K inputs, M tokens. e [N, K] is the change of the layer's weight, of row n e_n; y = x W^T.

    g_mn  gradient by y_mn, of one draw (`engine.walk.output_gradients`)
    F_n   mean over tokens of g_mn^2
    H     sum over tokens of s_m x_m x_m^T / sum of s_m,   s_m = sum over n of g_mn^2

The mean of g^2 over draws is the diagonal of the Fisher information. Tokens are taken to be independent of each other,
and g^2 to be a product of a part of its token and a part of its output. s_m keeps tokens with large inputs that no
prediction depends on (the first of a sequence, often) from counting.

One forward and one backward pass over a few micro-batches, a block in memory at a time (`engine.walk.gradients`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from compress.engine.plan.batches import tokens_of
from compress.engine.walk.capture import check_hidden_alone
from compress.engine.walk.gradients import MicroBatches
from compress.engine.walk.output_gradients import OutputGradients
from compress.engine.walk.state import Run
from compress.model.calls import Arrivals, Batch, Call, token_mask
from compress.model.layers import Layer, Stack

# Tokens of the backward pass, at least, where there are as many.
TOKENS = 4096


@dataclass
class Squares:
    """Squared gradients of a layer's output. of_outputs [N]: summed over tokens, float64. of_tokens: summed over
    outputs, [M] for each micro-batch, none where the layer was not called."""

    of_outputs: Tensor
    of_tokens: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighted:
    """Factors of a layer's Fisher information. of_outputs [N]: F_n. hessian [K, K]: H."""

    of_outputs: Tensor
    hessian: Tensor

    def cost(self, error_NK: Tensor) -> float:
        """The KL of a model whose layer has this error of its weight, in nats per token."""
        error = error_NK.to(self.hessian.dtype)
        return float(((error @ self.hessian) * error).sum(1).double() @ self.of_outputs) / 2


class Fisher:
    """Squared gradients of the outputs of all layers, over the first micro-batches of a run."""

    def __init__(self, run: Run, stack: Stack, calls: Sequence[Sequence[Call]]) -> None:
        """calls: of the blocks, for each micro-batch. Raises ChainBrokenError where blocks hand on more than the hidden
        state."""
        check_hidden_alone(calls)
        self.run, self.stack = run, stack
        self.found: dict[str, Squares] = {}
        self.batches = run.batches[: _enough(run.batches)]
        self.predicted = sum(_predicted(batch) for batch in self.batches)
        some = MicroBatches(self.batches, [of_block[: len(self.batches)] for of_block in calls])
        OutputGradients(run, stack, lambda _: True, self._count).through(some)

    def weighted(self, site: Sequence[Layer], arrivals: Arrivals) -> dict[str, Weighted]:
        """{layer of a site: its factors}, of the layers that a gradient reached. arrivals: of all micro-batches."""
        sums: dict[str, Tensor] = {}
        of_site = [layer for layer in site if layer.name in self.found]
        for i, arrival in enumerate(islice(arrivals, len(self.batches) if of_site else 0)):
            for layer in of_site:
                size_M = self.found[layer.name].of_tokens.get(i)
                if arrival is None or size_M is None or len(size_M) != len(arrival.own):
                    continue  # an expert, which calibration has shown other tokens
                x_MK = arrival.own.float()
                before = sums.get(layer.name, x_MK.new_zeros(x_MK.shape[1], x_MK.shape[1]))
                sums[layer.name] = before.addmm_((x_MK * size_M[:, None]).t(), x_MK)
        factors = {}
        for name, sum_KK in sums.items():
            of_outputs = self.found[name].of_outputs
            total = float(of_outputs.sum())
            if total > 0:
                factors[name] = Weighted(of_outputs / self.predicted, sum_KK / total)
        return factors

    def _count(self, layer: Layer, index: int, gradient_MN: Tensor) -> None:
        squares = gradient_MN.float().square()
        counted = self.found.setdefault(layer.name, Squares(squares.new_zeros(squares.shape[1], dtype=torch.float64)))
        counted.of_outputs += squares.sum(0, dtype=torch.float64)
        counted.of_tokens[index] = squares.sum(1)


def _enough(batches: Sequence[Batch]) -> int:
    """The number of first micro-batches that have `TOKENS` tokens; all where there are fewer."""
    total = 0
    for i, batch in enumerate(batches, 1):
        total += tokens_of([batch])
        if total >= TOKENS:
            return i
    return len(batches)


def _predicted(batch: Batch) -> int:
    """The tokens of a micro-batch that have one before them."""
    mask_BT = token_mask(batch)
    ids_BT = batch["input_ids"]
    return int(ids_BT[:, 1:].numel() if mask_BT is None else mask_BT[:, 1:].sum())
