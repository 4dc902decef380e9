"""Forwards that pause where a site begins.

Each micro-batch's forward of a block runs in its own greenlet and parks in a pre-hook of the first layer of each site,
or, of a layer that no module is, before the product with its weight (`run.walk.products`).
When all are parked, the site's statistics are complete; it is solved, its new weights are installed and the forwards
resume. One forward per block and micro-batch, and every later site sees the compressed prefix of its own block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import greenlet
import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.model.apart.recurrent import is_step
from compress.model.calls import Arrival, Arrivals, Call, arrived, paired
from compress.model.experts import Calibration, calibrating, shown_now
from compress.model.layers import Layer
from compress.run.installed import Versions
from compress.run.plan.batches import running
from compress.run.walk.products import Products


class _Runner:
    """One micro-batch's forward of the block, in a greenlet that parks at the sites."""

    def __init__(
        self,
        block: nn.Module,
        call: Call,
        site_of: Mapping[nn.Module | Layer, int],
        done: set[int],
        index: int,
        beside: "_Runner | None" = None,
    ) -> None:
        """beside: the forward in the compressed model, for one in the original."""
        routes = {} if beside is None else beside.routing.routes
        self.routing: Calibration = Calibration(routes, beside is not None, call.tokens)
        self.call, self.index = call, index
        self.inputs: dict[int, ReferenceType[Tensor]] = {}
        self.site_of, self.done = site_of, done
        self.parked: tuple[int, Tensor, Tensor | None] | None = None
        self.output: Any = None
        self.finished = False
        # One block in all: what it returns are the model's logits, which nobody needs.
        keep = (lambda output: output) if call.key is not None else (lambda output: None)
        inside = [layer for layer in site_of if isinstance(layer, Layer)]
        self.products = Products(inside, self.reach) if inside else None

        def forward() -> Any:
            with calibrating(self.routing), self.products or nullcontext():
                return keep(block(*call.args, **call.kwargs))

        self.task = greenlet.greenlet(forward)

    def reach(self, layer: nn.Module | Layer, x: Tensor) -> None:
        """Called inside the forward, before a layer runs: the module that is called, or a layer that none is."""
        site = self.site_of[layer]
        if site in self.inputs:
            if self.inputs[site]() is not x:
                raise CompressError("layers that shared an input while the block was traced do not share it now")
            return
        self.inputs[site] = ref(x)
        if site not in self.done:
            with nullcontext() if self.products is None else self.products.away():
                shown = shown_now()
                self.task.parent.switch((site, x, None if shown is None else shown.weight_M))
        elif isinstance(layer, Layer):
            raise CompressError(
                f"{layer.name} is multiplied in another order than in other micro-batches, so that statistics would "
                "miss it; ignore the layer"
            )

    def advance(self, site: int) -> tuple[Tensor, Tensor | None] | None:
        """Run on until the forward parks at `site` (its input, and the weights of the rows there that count, None for
        all alike), parks at a later one or ends (None)."""
        while not self.finished and (self.parked is None or self.parked[0] < site):
            result = self.task.switch()
            if self.task.dead:
                self.output, self.finished, self.parked = result, True, None
            else:
                self.parked = result
        if self.parked is None or self.parked[0] != site:
            return None
        return self.parked[1:]


def suspended_forward(
    block: nn.Module,
    calls: Sequence[Call],
    sites: Sequence[Sequence[Layer]],
    visit: Callable[[Sequence[Layer], Arrivals], None],
    reference: Sequence[Call],
    versions: Versions,
) -> tuple[list[Any], list[Any]]:
    """Run the block once per micro-batch, calling `visit(site, arrivals)` when a site is due.

    `visit` walks the arrivals (None for a micro-batch that does not come by), installs in `versions` what the layers of
    the site become, and may walk them again. `reference` are the same calls on the original model's hidden states (none
    where nothing compares with it); they run on what `versions` knows to have been there before.
    Returns the block's outputs for calls and for reference.
    """
    site_of = {layer.module if layer.is_called else layer: i for i, site in enumerate(sites) for layer in site}
    done: set[int] = set()
    runners = [_Runner(block, call, site_of, done, i) for i, call in enumerate(calls)]
    shadows = [_Runner(block, call, site_of, done, i, runners[i]) for i, call in enumerate(reference)]
    current: list[_Runner] = []

    def advance(runner: _Runner, site: int) -> tuple[Tensor, Tensor | None] | None:
        current[:] = [runner]
        with running(runner.call, runner.index):
            return runner.advance(site)

    def arrivals(site: int) -> Iterator[Arrival | None]:
        for i, runner in enumerate(runners):
            here, other = advance(runner, site), None  # first, for its routing is that of the other's experts
            if shadows:
                with versions.original():
                    other = advance(shadows[i], site)
            reference = None if other is None else other[0]
            arrival = None if here is None else arrived(sites[site][0], calls[i], here[0], reference, here[1])
            yield paired(arrival) if shadows and arrival is not None else arrival

    def park(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not is_step():
            current[0].reach(module, args[0])

    parking = [module.register_forward_pre_hook(park) for module in site_of if isinstance(module, nn.Module)]
    try:
        # The hooks that round come after those that park: switched on meanwhile, they act on what goes on from there.
        with torch.no_grad(), versions.ready(layer for site in sites for layer in site):
            for i, site in enumerate(sites):
                visit(site, Arrivals(partial(arrivals, i)))
                done.add(i)
            with versions.original():
                for shadow in shadows:
                    advance(shadow, len(sites))
            for runner in runners:
                advance(runner, len(sites))
    finally:
        for hook in parking:
            hook.remove()
    return [r.output for r in runners], [s.output for s in shadows]
