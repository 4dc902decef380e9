"""The curvature of the KL to the original by what its layers return, before the first block.

One forward and one backward over all micro-batches (`engine.walk.output_gradients`). What is kept, on the CPU, is a
number for each token of a layer, and the moments of its outputs: at most 4 KiB an output, twice that meanwhile.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from compress.base.progress import Counted, tell
from compress.engine.walk.capture import capture_stack, check_hidden_alone
from compress.engine.walk.gradients import MicroBatches
from compress.engine.walk.output_gradients import OutputGradients
from compress.engine.walk.state import Run
from compress.model.calls import Arrival
from compress.model.layers import Layer
from compress.passes.protocol.stages import LossCurvature
from compress.solvers.output_feedback import token_weights
from compress.solvers.statistics.output_moments import OutputMoments

CPU = torch.device("cpu")


def curvature_of(run: Run) -> Mapping[str, LossCurvature]:
    """The curvature of the layers whose pass asks for it, of those that a gradient reached. A collective."""
    asking = [p for p in run.plan.passes if p.asks_curvature]
    if not asking:
        return {}
    (stack,) = run.plan.stacks  # what is calibrated and has several is one block
    calls = capture_stack(run, stack)
    check_hidden_alone(calls)
    layers = [la for of_block in run.plan.layers.values() for la in of_block if any(p.wants(la.name) for p in asking)]
    called = [la for la in layers if la.is_called and la.geometry is None]  # others have no outputs of single tokens
    progress = Counted(run.reporter, len(stack.blocks) * len(run.batches))
    seen = _Seen({la.name: OutputMoments(la.shape[0], CPU) for la in called}, progress)
    gradients = OutputGradients(run, stack, called.__contains__, seen.count, seen.finish)
    tell(run.reporter, "phase", "differentiate", "part")
    with run.spending.on("forward"):
        gradients.through(MicroBatches(run.batches, calls))
    tell(run.reporter, "phase", "")
    return seen.result(run)


def weighing(of_site: Mapping[str, LossCurvature], arrivals: Iterable[Arrival | None]) -> Iterator[Arrival | None]:
    """The arrivals at a site, whose tokens count by the curvature of its layers."""
    for i, arrival in enumerate(arrivals):
        sizes = [curvature.of_tokens[i] for curvature in of_site.values() if i in curvature.of_tokens]
        if arrival is None or not sizes or len({len(size_M) for size_M in sizes}) > 1:
            yield arrival
        else:
            yield arrival.important(token_weights(sizes))


@dataclass
class _Seen:
    """Sums over the micro-batches so far. moments: of all; now: of those that go through the block that is open, on its
    device. sizes: |g|^2 of each token, by layer and micro-batch."""

    moments: dict[str, OutputMoments]
    progress: Counted
    now: dict[str, OutputMoments] = field(default_factory=dict)
    sizes: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def count(self, layer: Layer, index: int, gradient_MN: Tensor) -> None:
        gradient = gradient_MN.float()
        if layer.name not in self.now:
            self.now[layer.name] = OutputMoments(layer.shape[0], gradient.device)
        self.now[layer.name].update(gradient)
        self.sizes.setdefault(layer.name, {})[index] = gradient.square().sum(1).cpu()

    def finish(self, block: str, batches: int) -> None:
        """So many micro-batches are through a block: its moments need no device any more."""
        for name, moments in self.now.items():
            self.moments[name].add(moments)
        self.now.clear()
        self.progress(batches, block)

    def result(self, run: Run) -> Mapping[str, LossCurvature]:
        """The curvature of the layers that a gradient reached. A collective."""
        device, curvature = run.residency.device, {}
        for name, moments in self.moments.items():
            moments.sync(run.comm, device)
            sizes = self.sizes.get(name, {})
            own = sum((size_M.double().sum() for size_M in sizes.values()), torch.zeros((), dtype=torch.float64))
            total = float(run.comm.all_reduce(own.to(device)))
            if 0 < total < inf:
                of_outputs, noise = moments.result()
                share = moments.tokens / total
                # Where few tokens make noise of moments, they make noise of a weighted H, too.
                of_tokens = {i: noise + (1 - noise) * share * size_M for i, size_M in sizes.items()}
                curvature[name] = LossCurvature(of_tokens, of_outputs)
            moments.total = moments.total.new_zeros(0)  # twice the memory of its result
        return curvature
