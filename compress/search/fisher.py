"""The Fisher information of each layer's output: what an error of that output costs the model's predictions.

    KL(p || p') per token  ~  1/2 sum over outputs n of  F_n  e_n H e_n^T

Shapes: N outputs, K inputs, M tokens. e [N, K] is the change of the layer's weight, of row n e_n; y = x W^T.

    g_mn  gradient by y_mn of sum_t z_t l_t, for the logits l_t of each token and z_t ~ N(0, diag(p_t) - p_t p_t^T)
    F_n   mean over tokens of g_mn^2
    H     sum over tokens of s_m x_m x_m^T / sum of s_m,   s_m = sum over n of g_mn^2

The covariance of z is the Hessian of the KL by the logits, so that the mean of g^2 over draws is the diagonal of the
Fisher information (Amari 1998; Martens, arXiv 1412.1193). Tokens are taken to be independent of each other, and g^2 to
be a product of a part of its token and a part of its output. s_m keeps tokens with large inputs that no prediction
depends on (the first of a sequence, often) from counting.

One forward and one backward pass over a few micro-batches, a block in memory at a time (`engine.walk.gradients`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from compress.engine.plan.batches import tokens_of
from compress.engine.walk.capture import check_hidden_alone
from compress.engine.walk.gradients import MicroBatches, forwards, in_memory, of_the_end
from compress.engine.walk.state import Run
from compress.model.calls import Arrivals, Batch, Call, hidden_of, real_tokens, token_mask
from compress.model.layers import Layer, Stack

# Tokens of the backward pass, at least, where there are as many.
TOKENS = 4096
SEED = 0


@dataclass
class OutputGradients:
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
        self.found: dict[str, OutputGradients] = {}
        self.batches = run.batches[: _enough(run.batches)]
        self.predicted = sum(_predicted(batch) for batch in self.batches)
        self.draws = torch.Generator(run.residency.device).manual_seed(SEED)
        first = 0
        some = MicroBatches(self.batches, [of_block[: len(self.batches)] for of_block in calls])
        for part in in_memory(run, stack, some):
            self._through(part, first)
            first += len(part.batches)

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

    def _through(self, part: MicroBatches, first: int) -> None:
        """Forward and backward for some micro-batches, of which the first has this number."""
        run, stack = self.run, self.stack
        if stack.container is None:
            ((name, block),) = stack.blocks
            with run.residency.open(block, keep=False):
                for i, call in enumerate(part.calls[0]):
                    self._differentiate(name, block, call, first + i, None, part.batches[i])
            return
        kept, outputs = forwards(run, stack, part)
        gradients = of_the_end(run, stack, part.batches, outputs, self._drawn)
        for name, block in reversed(stack.blocks):
            with run.residency.open(block, keep=False):
                ends = zip(kept.pop(), gradients, part.batches, strict=True)
                gradients = [
                    self._differentiate(name, block, call, first + i, gradient, batch)
                    for i, (call, gradient, batch) in enumerate(ends)
                ]

    def _differentiate(
        self, name: str, block: nn.Module, call: Call, index: int, gradient: Tensor | None, batch: Batch
    ) -> Tensor:
        """Run a block with a graph, count the gradients of its layers' outputs, and return that of what went in.
        gradient: by what the block returns; None where that is what the model returns."""
        leaf = torch.empty(0) if call.key is None else call.hidden.detach().requires_grad_()
        layers = [layer for layer in self.run.plan.layers[name] if layer.is_called]
        with _outputs_of(layers) as outputs, torch.enable_grad():
            own = call if call.key is None else call.with_hidden(leaf.clone())
            output = block(*own.args, **own.kwargs)
            value, by = self._drawn(output, batch) if gradient is None else (hidden_of(output), gradient)
            wanted = [*outputs.values()] + ([] if call.key is None else [leaf])
            found = list(torch.autograd.grad(value, wanted, by, allow_unused=True))
        self.run.record.block_forwards += 1
        of_input = torch.zeros_like(leaf)
        if call.key is not None and (last := found.pop()) is not None:
            of_input = last
        for layer, of_output in zip(outputs, found, strict=True):
            if of_output is not None:
                self._count(layer, index, real_tokens(of_output, call))
        return of_input

    def _count(self, layer: Layer, index: int, gradient_MN: Tensor) -> None:
        squares = gradient_MN.float().square()
        counted = self.found.setdefault(
            layer.name, OutputGradients(squares.new_zeros(squares.shape[1], dtype=torch.float64))
        )
        counted.of_outputs += squares.sum(0, dtype=torch.float64)
        counted.of_tokens[index] = squares.sum(1)

    def _drawn(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """(Logits of what the model predicts, z for each of them)."""
        logits_BTV = output.logits[:, :-1].float()
        mask_BT = token_mask(batch)
        drawn = torch.zeros_like(logits_BTV)
        with torch.no_grad():
            for i, logits_TV in enumerate(logits_BTV):  # a row at a time, for the vocabulary may be large
                p = logits_TV.softmax(-1)
                z = p.sqrt() * torch.randn(p.shape, generator=self.draws, device=p.device)
                drawn[i] = z - p * z.sum(-1, keepdim=True)
            if mask_BT is not None:
                drawn[~mask_BT[:, 1:].to(drawn.device)] = 0.0
        return logits_BTV, drawn


@contextmanager
def _outputs_of(layers: Sequence[Layer]) -> Iterator[Mapping[Layer, Tensor]]:
    """The outputs of layers in the forwards of the body, each to be differentiated by. Of one that is called several
    times, the last."""
    outputs: dict[Layer, Tensor] = {}

    def note(layer: Layer, output: Tensor) -> Tensor:
        outputs[layer] = output if output.requires_grad else output.requires_grad_()
        return output.clone()  # which the model may change in place

    hooks = [layer.module.register_forward_hook(lambda _m, _a, y, la=layer: note(la, y)) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


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
