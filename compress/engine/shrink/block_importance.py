"""The loss of a model without one of its blocks: some calibration tokens go through all blocks but that one.

    without i:   blocks 0 ... i-1, i+1 ... n-1, then what follows them       KL(original || without i)

Every block is opened once for all of these models, which are half of n^2 forwards of a block in all: as many as n / 2
forwards of the model. A model that returns no logits is judged by the squared error of what it returns.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.engine.residency import Local
from compress.engine.walk.layer_damage import Measure, predictions
from compress.model.calls import Batch, Call, hidden_of
from compress.model.layers import Stack

# Tokens of a rank that are enough to tell blocks apart.
TOKENS = 4096


class Without:
    """A model whose blocks may go. batches: this rank's; captured[block][micro-batch]: how each block is called."""

    def __init__(
        self,
        model: nn.Module,
        stack: Stack,
        batches: Sequence[Batch],
        captured: Sequence[Sequence[Call]],
        residency: Local,
        comm: Comm,
    ) -> None:
        self.model, self.stack, self.residency, self.comm = model, stack, residency, comm
        tokens = [call.hidden[..., 0].numel() for call in captured[0]]
        count = next((i for i in range(1, len(tokens)) if sum(tokens[:i]) >= TOKENS), len(tokens))
        self.batches, self.captured = batches[:count], [calls[:count] for calls in captured]

    @torch.no_grad()
    def losses(self, gone: Collection[int]) -> dict[int, float]:
        """{block: the loss without it and those that are gone}. A collective."""
        left = [i for i in range(len(self.stack.blocks)) if i not in gone]
        ends = self._ends(gone)
        totals = torch.zeros(len(left) + 1, dtype=torch.float64)
        blocks = [block for _, block in self.stack.blocks]
        with self.residency.open(self.model, set(blocks), keep=False):
            for m, (batch, call) in enumerate(zip(self.batches, self.captured[0], strict=True)):
                expected, measure = self._predicted(batch, call, ends[None][m])
                found = (self._predicted(batch, call, ends[i][m])[0] for i in left)
                totals[:-1] += torch.tensor([measure(expected, each) for each in found], dtype=torch.float64)
                totals[-1] += len(expected)
        totals = self.comm.all_reduce(totals.to(self.residency.device)).cpu()
        return {i: float(total / totals[-1]) for i, total in zip(left, totals[:-1], strict=True)}

    def _predicted(self, batch: Batch, call: Call, output: Any) -> tuple[Tensor, Measure]:
        return predictions(self.model, self.stack, batch, call, output, self.residency.device)

    def _ends(self, gone: Collection[int]) -> Mapping[int | None, list[Any]]:
        """{block: what the last block returns of each micro-batch without it and the `gone`}; None: in the original."""
        hidden: dict[int | None, list[Tensor]] = {None: [call.hidden for call in self.captured[0]]}
        base = hidden[None]  # behind those that are gone
        outputs: list[Any] = []
        for i, (_, block) in enumerate(self.stack.blocks):
            with self.residency.open(block, keep=False) as opened:

                def through(states: list[Tensor], i: int = i, block: nn.Module = opened.block) -> list[Any]:
                    calls = [call.with_hidden(h) for call, h in zip(self.captured[i], states, strict=True)]
                    return [block(*call.args, **call.kwargs) for call in calls]

                outputs = through(hidden[None])
                after: dict[int | None, list[Tensor]] = {None: [hidden_of(output) for output in outputs]}
                if i in gone:
                    after |= {key: states for key, states in hidden.items() if key is not None}
                else:
                    after |= {
                        key: [hidden_of(o) for o in through(states)]
                        for key, states in hidden.items()
                        if key is not None
                    }
                    after[i] = base
                    base = after[None] if not gone else [hidden_of(o) for o in through(base)]
                hidden = after
        return {
            key: [h if isinstance(o, Tensor) else (h, *o[1:]) for o, h in zip(outputs, states, strict=True)]
            for key, states in hidden.items()
        }
