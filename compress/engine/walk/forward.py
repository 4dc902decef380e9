"""Forwards that pause where a site begins.

Each micro-batch's forward of a block runs in its own greenlet and parks in a pre-hook of the first layer of each site,
or, of a layer that no module is, before the product with its weight (`engine.walk.products`).
When all are parked, the site's statistics are complete; it is solved, its new weights are installed and the forwards
resume. One forward per block and micro-batch, and every later site sees the compressed prefix of its own block.

Where that many forwards do not fit in memory, they are repeated instead: for each of the first sites of a block a
micro-batch runs from the block's input to the site, and is dropped before the next one begins. The values are the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import greenlet
import torch
from torch import Tensor, nn

from compress.base.errors import CompressError
from compress.engine.layer_versions import Versions
from compress.engine.plan.batches import running
from compress.engine.walk.products import Products
from compress.model.calls import Arrival, Arrivals, Call, arrival_of, pair_with_original, removing
from compress.model.experts import Calibration, apart_in, calibrating, shown_now
from compress.model.layers import Layer
from compress.model.splitting.recurrent import is_step

# Sites of a block, from its first, before which forwards are repeated rather than kept: a block has few, but for its
# experts, and a forward for every expert would take too long.
REPEATED_SITES = 8


class ForwardsDone(NamedTuple):
    """The block's outputs for the calls and for the reference, and the number of forwards that began for them."""

    outputs: list[Any]
    reference: list[Any]
    forwards: int


class _Runner:
    """One micro-batch's forward of the block, in a greenlet that parks at the sites."""

    def __init__(
        self,
        block: nn.Module,
        call: Call,
        site_of: Mapping[nn.Module | Layer, int],
        index: int,
        beside: "_Runner | None" = None,
    ) -> None:
        """beside: the forward in the compressed model, for one in the original."""
        routes = {} if beside is None else beside.routing.routes
        self.routing: Calibration = Calibration(routes, beside is not None, call.tokens)
        self.call, self.index = call, index
        self.inputs: dict[int, ReferenceType[Tensor]] = {}
        self.latest = -1
        self.site_of = site_of
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
        late = site < self.latest  # then the site has been visited
        self.latest = max(self.latest, site)
        self.inputs[site] = ref(x)
        if not late:
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

    def drop(self) -> None:
        """End the forward where it waits, and let go of its tensors."""
        if not self.task.dead:
            self.task.throw()
        self.parked = self.output = None
        del self.task  # which holds what holds it


class _Forwards:
    """The forwards of all micro-batches of a block. Of each: ours, and that of the original model where there is one.

    waiting: those that wait at a site. begun: their number so far.
    """

    def __init__(
        self,
        block: nn.Module,
        calls: Sequence[Call],
        sites: Sequence[Sequence[Layer]],
        reference: Sequence[Call],
        versions: Versions,
        repeats: bool,
    ) -> None:
        self.block, self.calls, self.sites, self.reference = block, calls, sites, reference
        self.versions, self.repeats = versions, repeats
        self.site_of = {layer.module if layer.is_called else layer: i for i, site in enumerate(sites) for layer in site}
        self.waiting: dict[int, list[_Runner]] = {}
        self.begun = 0
        self._current: _Runner | None = None

    def arrivals(self, site: int) -> Iterator[Arrival | None]:
        """The arrivals at a site, one micro-batch after the other."""
        for i in range(len(self.calls)):
            runners = self._of(i)
            if not self.repeats or site >= REPEATED_SITES:
                self.waiting[i] = runners
            try:
                yield self._arrival(runners, site)  # which nothing holds here while the next one is made
            finally:
                if i not in self.waiting:
                    for runner in runners:
                        runner.drop()
                del runners

    def _arrival(self, runners: Sequence[_Runner], site: int) -> Arrival | None:
        """The arrival of a micro-batch at a site."""
        here, *others = self._advance(runners, site)
        if here is None:
            return None
        other = None if not others or others[0] is None else others[0][0]
        arrival = arrival_of(self.sites[site][0], runners[0].call, here[0], other, here[1])
        return pair_with_original(arrival) if others else arrival

    def finish(self, i: int, settled: Callable[[Any], Any]) -> list[Any]:
        """The outputs of the block for a micro-batch, and for its reference, settled."""
        runners = self._of(i)
        self.waiting.pop(i, None)
        self._advance(runners, len(self.sites))
        outputs = [settled(runner.output) for runner in runners]
        for runner in runners:
            runner.drop()
        return outputs

    def parking(self) -> AbstractContextManager[None]:
        """Lets forwards park before modules inside the context."""
        return removing([m.register_forward_pre_hook(self._park) for m in self.site_of if isinstance(m, nn.Module)])

    def _park(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not is_step():
            assert self._current is not None
            self._current.reach(module, args[0])

    def _of(self, i: int) -> list[_Runner]:
        """The forwards of a micro-batch that wait, or new ones."""
        if i in self.waiting:
            return self.waiting[i]
        own = _Runner(self.block, self.calls[i], self.site_of, i)
        others = [_Runner(self.block, call, self.site_of, i, own) for call in self.reference[i : i + 1]]
        self.begun += 1 + len(others)
        return [own, *others]

    def _advance(self, runners: Sequence[_Runner], site: int) -> list[tuple[Tensor, Tensor | None] | None]:
        """Let the forwards of a micro-batch run on to a site: ours first, for its routing is that of the other's
        experts."""
        arrivals = []
        for runner in runners:
            self._current = runner
            original = nullcontext() if runner is runners[0] else self.versions.original()
            with original, running(runner.call, runner.index):
                arrivals.append(runner.advance(site))
        return arrivals


def suspended_forward(
    block: nn.Module,
    calls: Sequence[Call],
    sites: Sequence[Sequence[Layer]],
    visit: Callable[[Sequence[Layer], Arrivals], None],
    reference: Sequence[Call],
    versions: Versions,
    repeats: bool = False,
    settled: Callable[[Any], Any] = lambda output: output,
) -> ForwardsDone:
    """Run the block once per micro-batch, calling `visit(site, arrivals)` when a site is due.

    `visit` walks the arrivals (None for a micro-batch that does not come by), installs in `versions` what the layers of
    the site become, and may walk them again. `reference` are the same calls on the original model's hidden states (none
    where nothing compares with it); they run on what `versions` knows to have been there before. repeats: whether
    forwards are repeated for each of the first `REPEATED_SITES` sites, one micro-batch at a time, instead of waiting
    there all at once. settled: applied to each output. Experts are open while their site is visited.
    """
    forwards = _Forwards(block, calls, sites, reference, versions, repeats)
    experts = apart_in(block)
    # The hooks that round come after those that park: switched on meanwhile, they act on what goes on from there.
    with forwards.parking(), torch.no_grad(), versions.ready(layer for site in sites for layer in site):
        for i, site in enumerate(sites):
            with ExitStack() as opened:
                for expert in {experts[layer.parameter] for layer in site if layer.parameter in experts}:
                    opened.enter_context(expert.opening())
                visit(site, Arrivals(partial(forwards.arrivals, i)))
        outputs = [forwards.finish(i, settled) for i in range(len(calls))]
    others = [of_batch[1] for of_batch in outputs] if reference else []
    return ForwardsDone([of_batch[0] for of_batch in outputs], others, forwards.begun)
