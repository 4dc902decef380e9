"""Forwards that pause where a site begins.

Each micro-batch's forward of a block runs in its own greenlet and parks in a pre-hook of the first layer of each site.
When all are parked, the site's statistics are complete; it is solved, its new weights are installed and the forwards
resume. One forward per block and micro-batch, and every later site sees the compressed prefix of its own block.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import greenlet
import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.model.calls import Arrival, Arrivals, Call, arrived
from compress.model.layers import Layer
from compress.run.batches import running


class _Runner:
    """One micro-batch's forward of the block, in a greenlet that parks at the sites."""

    def __init__(
        self, block: nn.Module, call: Call, site_of: Mapping[nn.Module, int], done: set[int], index: int
    ) -> None:
        self.call, self.index = call, index
        self.inputs: dict[int, ReferenceType[Tensor]] = {}
        self.site_of, self.done = site_of, done
        self.parked: tuple[int, Tensor] | None = None
        self.output: Any = None
        self.finished = False
        # One block in all: what it returns are the model's logits, which nobody needs.
        keep = (lambda output: output) if call.key is not None else (lambda output: None)
        self.task = greenlet.greenlet(lambda: keep(block(*call.args, **call.kwargs)))

    def reach(self, module: nn.Module, x: Tensor) -> None:
        """Called inside the forward, before a layer runs."""
        site = self.site_of[module]
        if site in self.inputs:
            if self.inputs[site]() is not x:
                raise CompressError("layers that shared an input while the block was traced do not share it now")
        else:
            self.inputs[site] = ref(x)
            if site not in self.done:
                self.task.parent.switch((site, x))

    def advance(self, site: int) -> Tensor | None:
        """Run on until the forward parks at `site` (its input), parks at a later one or ends (None)."""
        while not self.finished and (self.parked is None or self.parked[0] < site):
            result = self.task.switch()
            if self.task.dead:
                self.output, self.finished, self.parked = result, True, None
            else:
                self.parked = result
        if self.parked is None or self.parked[0] != site:
            return None
        return self.parked[1]


def suspended_forward(
    block: nn.Module,
    calls: Sequence[Call],
    layers: Mapping[str, Layer],
    sites: Sequence[Sequence[str]],
    visit: Callable[[int, Iterable[Arrival | None]], None],
    reference: Sequence[Call] | None,
    use_original: Callable[[bool], None],
    entering: Callable[[nn.Module, Tensor], Tensor] = lambda _, x: x,
    leaving: Callable[[nn.Module, Tensor], Tensor] = lambda _, y: y,
) -> tuple[list[Any], list[Any]]:
    """Run the block once per micro-batch, calling `visit(site, arrivals)` when a site is due.

    `visit` walks the arrivals (None for a micro-batch that does not come by), changes the weights of the site's layers,
    and may walk them again. `reference` are the same calls on the original model's hidden states; `use_original(True)`
    puts the original weights of the layers changed so far in place, `use_original(False)` the new ones.
    `entering(layer, x)` is what a layer multiplies in place of x once its site is done, `leaving(layer, y)` what it
    returns in place of y. Returns the block's outputs for calls and for reference.
    """
    site_of = {layers[name].module: i for i, names in enumerate(sites) for name in names}
    done: set[int] = set()
    runners = [_Runner(block, call, site_of, done, i) for i, call in enumerate(calls)]
    shadows = [_Runner(block, call, site_of, done, i) for i, call in enumerate(reference or ())]
    current: list[_Runner] = []

    def advance(runner: _Runner, site: int) -> Tensor | None:
        current[:] = [runner]
        with running(runner.call, runner.index):
            return runner.advance(site)

    def arrivals(site: int) -> Iterator[Arrival | None]:
        for i, runner in enumerate(runners):
            other = None
            if shadows:
                use_original(True)
                other = advance(shadows[i], site)
                use_original(False)
            x = advance(runner, site)
            yield None if x is None else arrived(layers[sites[site][0]], calls[i], x, other)

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        current[0].reach(module, args[0])
        return (entering(module, args[0]), *args[1:])

    def leave(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return leaving(module, output)

    hooks = [m.register_forward_pre_hook(enter) for m in site_of]
    hooks += [m.register_forward_hook(leave) for m in site_of]
    try:
        with torch.no_grad():
            for site in range(len(sites)):
                visit(site, Arrivals(partial(arrivals, site)))
                done.add(site)
            if shadows:
                use_original(True)
                for shadow in shadows:
                    advance(shadow, len(sites))
                use_original(False)
            for runner in runners:
                advance(runner, len(sites))
    finally:
        for hook in hooks:
            hook.remove()
    return [r.output for r in runners], [s.output for s in shadows]
