"""The damage that each layer does alone: how far a model's predictions move where one layer has other weights.

    a few micro-batches in front of a block: those of the original, and a version for each layer changed so far
    block   every version goes through it; those of the original also once with each of its layers changed
    end     what follows the last block, and the KL between the original's predictions and those of every version

One block is in memory at a time, so that models are measured, too, that are sharded or do not fit on a device. L layers
cost L / 2 forwards of the model on those micro-batches, and the hidden states of L versions.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from compress.base.errors import CompressError
from compress.engine.walk.capture import next_calls, returning
from compress.engine.walk.held_out_kl import divergence, holding
from compress.engine.walk.state import Run
from compress.model.calls import Batch, Call, real_tokens
from compress.model.layers import Layer, Stack

# Of all ranks together: tokens of a model whose blocks run one by one, samples of any other.
TOKENS = 4096
SAMPLES = 32

Values = Mapping[Layer, Tensor]


class Alone:
    """Versions of a few micro-batches on their way through a stack. calls[block][micro-batch]: how each block is called
    in the original (`engine.walk.capture`)."""

    def __init__(self, run: Run, stack: Stack, calls: Sequence[Sequence[Call]]) -> None:
        self.run, self.stack = run, stack
        count = _micro_batches(run, calls[0][0])
        self.calls = [list(of_block[:count]) for of_block in calls]
        self.original: list[Any] = list(self.calls[0])
        self.versions: dict[Hashable, list[Any]] = {}
        self.keys: list[Hashable] = []
        self.sums: dict[Hashable, float] = {}
        self.rows: dict[int, int] = {}

    @torch.no_grad()
    def through(self, index: int, values: Mapping[Hashable, Values]) -> None:
        """Take everything through a block, which is open. values: what its layers become, a version for each."""
        outputs = list(self._ran(index, self.original))
        self.versions = {
            key: next_calls(self.calls, index, self._ran(index, calls)) for key, calls in self.versions.items()
        }
        self.keys += values
        for key, changed in values.items():
            with holding(changed):
                found = self._ran(index, self.original)
                if self.stack.container is None:
                    for i, output in enumerate(found):
                        self._compare(i, outputs[i], {key: output})
                else:
                    self.versions[key] = next_calls(self.calls, index, found)
        self.original = next_calls(self.calls, index, outputs)

    def _ran(self, index: int, calls: Sequence[Call]) -> Iterator[Any]:
        """The outputs of a block for each of its calls."""
        for call in calls:
            self.run.record.block_forwards += 1
            yield self.stack.blocks[index][1](*call.args, **call.kwargs)

    @torch.no_grad()
    def damages(self) -> dict[Any, float]:
        """{version: KL(original || version), nats per prediction}, once all blocks are behind; of a model that returns
        no logits, the part of the squares it returns that is wrong. The same on every rank.

        Raises CompressError for what is not finite.
        """
        if self.stack.container is not None:
            with self.run.residency.open(self.run.model, {block for _, block in self.stack.blocks}, keep=False):
                for i, output in enumerate(self.original):
                    self._compare(i, output, {key: outputs[i] for key, outputs in self.versions.items()})
        lost_here = [self.sums.get(key, 0.0) for key in self.keys]
        sums = torch.tensor([*lost_here, sum(self.rows.values())], dtype=torch.float64)
        *lost, rows = self.run.comm.all_reduce(sums.to(self.run.residency.device)).tolist()
        if not all(map(math.isfinite, lost)):
            raise CompressError("with a layer changed alone the model returns numbers that are not finite")
        return {key: each / rows for key, each in zip(self.keys, lost, strict=True)}

    def _compare(self, i: int, output: Any, versions: Mapping[Hashable, Any]) -> None:
        """Add how far each version of what the last block returned of a micro-batch is off."""
        ends = partial(predictions, self.run.model, self.stack, self.run.batches[i], self.calls[0][i])
        expected, measure = ends(output, self.run.residency.device)
        for key, other in versions.items():
            found, _ = ends(other, self.run.residency.device)
            self.sums[key] = self.sums.get(key, 0.0) + measure(expected, found)
        self.rows[i] = len(expected)


def _micro_batches(run: Run, call: Call) -> int:
    """The number of this rank's micro-batches among the first of all ranks', which are dealt out in turns."""
    if call.key is not None:
        enough, each = TOKENS, call.hidden[..., 0].numel()
    else:
        enough, each = SAMPLES, max(len(v) for v in call.kwargs.values() if isinstance(v, Tensor) and v.ndim)
    each = int(run.comm.all_reduce(torch.tensor(each, device=run.residency.device), "max"))
    return len(range(run.comm.rank, -(-enough // each), run.comm.world))


Measure = Callable[[Tensor, Tensor], float]


def predictions(
    model: nn.Module, stack: Stack, batch: Batch, call: Call, output: Any, device: torch.device
) -> tuple[Tensor, Measure]:
    """[M, C] what the model returns where its last block returned this, log-probabilities or else numbers; and the sum
    over rows of what others are off. call: of a block, for the same micro-batch."""
    made = output
    if stack.container is not None:
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        with returning(stack, output):
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
