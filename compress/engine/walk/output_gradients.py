"""Gradients by what layers return, of draws whose covariance is the Hessian of the KL by the logits.

    v = sqrt(p) s - p (sqrt(p) . s),   s = +-1 at random,   E v v^T = diag(p) - p p^T,   p: the model's predictions
    g = gradient of sum_t v_t l_t by a layer's output, for the logits l_t of each token

So E g g^T is the Fisher information of that output (Amari 1998; Martens, arXiv 1412.1193), the model's own predictions
being the labels. Signs have no rare large draws, as sampled labels have.

Forward and backward, a block in memory at a time, as in `engine.walk.gradients`. Signs depend on the micro-batch alone,
so that many ranks sum what one process sums, and a resumed run what the first one summed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.engine.walk.gradients import MicroBatches, forwards, in_memory, of_the_end
from compress.engine.walk.state import Run
from compress.model.calls import Batch, Call, hidden_of, real_tokens, removing, token_mask
from compress.model.layers import Layer, Stack

SEED = 0
AT_ONCE = 2**20  # probabilities, for the vocabulary may be large


@dataclass(frozen=True)
class OutputGradients:
    """A pass through a model that hands over gradients by the outputs of layers.

    wants: the layers, among those whose product is a module's call. count: takes a layer, the number of a micro-batch,
    and the gradient [M, N] by the layer's output for its tokens. finish: takes the name of a block and
    how many of the micro-batches have been through it.
    """

    run: Run
    stack: Stack
    wants: Callable[[Layer], bool]
    count: Callable[[Layer, int, Tensor], None]
    finish: Callable[[str, int], None] = lambda name, batches: None

    def through(self, whole: MicroBatches) -> None:
        """Forward and backward for some micro-batches."""
        first = 0
        for part in in_memory(self.run, self.stack, whole):
            self._through(part, first)
            first += len(part.batches)

    def _through(self, part: MicroBatches, first: int) -> None:
        run, stack = self.run, self.stack
        if stack.container is None:
            ((name, block),) = stack.blocks
            with run.residency.open(block, keep=False):
                for i, call in enumerate(part.calls[0]):
                    self._differentiate(name, block, call, first + i, None, part.batches[i])
            self.finish(name, len(part.batches))
            return
        kept, outputs = forwards(run, stack, part)
        gradients = of_the_end(run, stack, part.batches, outputs, drawn)
        for name, block in reversed(stack.blocks):
            with run.residency.open(block, keep=False):
                ends = zip(kept.pop(), gradients, part.batches, strict=True)
                gradients = [
                    self._differentiate(name, block, call, first + i, gradient, batch)
                    for i, (call, gradient, batch) in enumerate(ends)
                ]
            self.finish(name, len(part.batches))

    def _differentiate(
        self, name: str, block: nn.Module, call: Call, index: int, gradient: Tensor | None, batch: Batch
    ) -> Tensor:
        """Run a block with a graph, hand over the gradients of its layers' outputs, and return that of what went in.
        gradient: by what the block returns; None where that is what the model returns."""
        leaf = torch.empty(0) if call.key is None else call.hidden.detach().requires_grad_()
        layers = [layer for layer in self.run.plan.layers[name] if layer.is_called and self.wants(layer)]
        with _outputs_of(layers) as outputs, torch.enable_grad():
            own = call if call.key is None else call.with_hidden(leaf.clone())
            output = block(*own.args, **own.kwargs)
            value, by = drawn(output, batch) if gradient is None else (hidden_of(output), gradient)
            wanted = [*outputs.values()] + ([] if call.key is None else [leaf])
            found = list(torch.autograd.grad(value, wanted, by, allow_unused=True))
        self.run.record.block_forwards += 1
        of_input = torch.zeros_like(leaf)
        if call.key is not None and (last := found.pop()) is not None:
            of_input = last
        for layer, of_output in zip(outputs, found, strict=True):
            if of_output is not None:
                self.count(layer, index, real_tokens(of_output, call))
        return of_input


def drawn(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """(Logits of what the model predicts, v for each of them)."""
    logits_BTV = output.logits[:, :-1].float()
    mask_BT = token_mask(batch)
    ids = batch["input_ids"].to("cpu", torch.int64).contiguous()
    signs = torch.Generator(logits_BTV.device).manual_seed(SEED + crc32(ids.numpy().tobytes()))
    draws = torch.empty_like(logits_BTV)
    with torch.no_grad():
        rows = max(1, AT_ONCE // logits_BTV.shape[-1])
        for logits_TV, draws_TV in zip(logits_BTV, draws, strict=True):
            for logits_MV, draws_MV in zip(logits_TV.split(rows), draws_TV.split(rows), strict=True):
                p = logits_MV.softmax(-1)
                z = p.sqrt().mul_(random_signs(p, signs))
                torch.sub(z, p.mul_(z.sum(-1, keepdim=True)), out=draws_MV)
        if mask_BT is not None:
            draws[~mask_BT[:, 1:].to(draws.device)] = 0.0
    return logits_BTV, draws


def random_signs(like_MV: Tensor, generator: torch.Generator) -> Tensor:
    """+-1 at random, [M, V]: eight of each random byte."""
    count, length = like_MV.shape
    bits = torch.arange(256, device=like_MV.device)[:, None] >> torch.arange(8, device=like_MV.device) & 1
    drawn_MB = torch.randint(256, (count, -(-length // 8)), generator=generator, device=like_MV.device)
    return functional.embedding(drawn_MB, (2 * bits - 1).to(like_MV)).flatten(1)[:, :length]


@contextmanager
def _outputs_of(layers: Sequence[Layer]) -> Iterator[Mapping[Layer, Tensor]]:
    """The outputs of layers in the forwards of the body, each to be differentiated by. Of one that is called several
    times, the last."""
    outputs: dict[Layer, Tensor] = {}

    def note(layer: Layer, output: Tensor) -> Tensor:
        outputs[layer] = output if output.requires_grad else output.requires_grad_()
        return output.clone()  # which the model may change in place

    hooks = [layer.module.register_forward_hook(lambda _m, _a, y, la=layer: note(la, y)) for layer in layers]
    with removing(hooks):
        yield outputs
