"""Running a model block by block: capture every block's inputs, then forwards that pause where a site begins.

*Capture.* The blocks are swapped for recorders that note their arguments and hand the hidden state on; the model runs
once per micro-batch at the cost of its embedding. Each block keeps its own arguments (masks and rotary tables differ
between sliding and full attention). A model that changes the hidden state between two blocks, or passes another
tensor from block to block, is detected: it is then run as one block.

*Suspended forward.* Each micro-batch's forward of a block runs in its own greenlet and parks in a pre-hook of the
first layer of each site. When all are parked, the site's statistics are complete; it is solved, its new weights are
installed and the forwards resume. One forward per block and micro-batch, and every later site sees the compressed
prefix of its own block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType, ref

import greenlet
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from compress.architecture import Layer, Stack
from compress.errors import CompressError
from compress.residency import Residency

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """One micro-batch on its way through the blocks: the arguments of a block and where its hidden state is.

    key: position or keyword of the hidden state. tokens: bool mask of the tokens that count, of the batch's leading
    shape [B, T], or None when all do.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: int | str | None
    tokens: Tensor | None

    @property
    def hidden(self) -> Tensor:
        assert self.key is not None
        return self.args[self.key] if isinstance(self.key, int) else self.kwargs[self.key]

    def with_hidden(self, hidden: Tensor) -> "Call":
        """The same call on another hidden state."""
        if isinstance(self.key, int):
            return replace(self, args=(*self.args[: self.key], hidden, *self.args[self.key + 1 :]))
        assert self.key is not None
        return replace(self, kwargs={**self.kwargs, self.key: hidden})


def hidden_of(output: Any) -> Tensor:
    """The hidden state in what a block returned."""
    return output if isinstance(output, Tensor) else output[0]


def real_tokens(x: Tensor, call: Call) -> Tensor:
    """The tokens of a layer's input as rows [M, K], pads removed."""
    rows = x.reshape(-1, x.shape[-1])
    if call.tokens is None:
        return rows
    if x.shape[:-1].numel() != call.tokens.numel():
        raise CompressError(
            f"a layer's input of shape {tuple(x.shape)} cannot be matched with the batch's padding mask "
            f"{tuple(call.tokens.shape)}; calibrate with samples of one length"
        )
    return rows[call.tokens.reshape(-1)]


class ChainBrokenError(Exception):
    """The blocks of a stack do not simply hand the hidden state on."""


class _StopError(Exception):
    """Leave the model: everything worth recording has been recorded."""


class _Recorder(nn.Module):
    """Stands in for a block during capture. Attributes that the model reads come from the block itself."""

    def __init__(self, block: nn.Module, record: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.stands_for = block  # a submodule, so that FSDP's root finds the block's unit when it first runs
        self.record = record

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("stands_for"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.record(args, kwargs)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Key-value caches off: a cache would be filled by every block forward."""
    configs = [c for c in (getattr(model, "config", None),) if c is not None]
    configs += [c for c in (getattr(configs[0], "text_config", None),) if c is not None] if configs else []
    before = [(c, c.use_cache) for c in configs if hasattr(c, "use_cache")]
    for config, _ in before:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in before:
            config.use_cache = value


@contextmanager
def _swapped(container: nn.ModuleList, stand_ins: Sequence[nn.Module]) -> Iterator[None]:
    originals = list(container)
    for i, module in enumerate(stand_ins):
        container[i] = module
    try:
        yield
    finally:
        for i, module in enumerate(originals):
            container[i] = module


def _hidden_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str:
    if args and isinstance(args[0], Tensor):
        return 0
    for name in ("hidden_states", "x", *kwargs):
        if isinstance(kwargs.get(name), Tensor):
            return name
    raise ChainBrokenError("a block is called without a tensor")


def token_mask(batch: Batch) -> Tensor | None:
    """Which tokens of a batch count: its attention mask, or None where all of them do."""
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2 or bool((mask != 0).all()):
        return None
    return mask != 0


def _moved(batch: Batch, device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def capture(
    model: nn.Module,
    stack: Stack,
    done: Sequence[Stack],
    batches: Sequence[Batch],
    residency: Residency,
    calls_of_all_ranks: int,
    outputs: Callable[[int, tuple[Any, ...], Mapping[str, Any]], Any],
) -> list[list[Call]]:
    """calls[block][micro-batch] of one stack. `done` are the stacks before it, which run for real.

    `outputs(block, args, kwargs)` gives a block's return structure with tensors on the meta device.
    calls_of_all_ranks: how often every rank runs the model (ranks with fewer micro-batches repeat their last), since
    a sharded embedding is gathered by all of them together.
    """
    if stack.container is None:
        return [[Call((), b, None, token_mask(b)) for b in (_moved(b, residency.device) for b in batches)]]
    count = len(stack.blocks)
    calls: list[list[Call]] = [[] for _ in range(count)]
    inside = {block for s in [stack, *done] for _, block in s.blocks}
    previous: dict[str, Any] = {}

    def recorder(i: int, block: nn.Module) -> _Recorder:
        def record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            key = _hidden_key(args, kwargs)
            call = Call(args, kwargs, key, previous["tokens"])
            if i > 0:
                if call.hidden is not previous["hidden"]:
                    raise ChainBrokenError("the hidden state changes between two blocks")
                tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
                if any(t is extra for t in tensors for extra in previous["extras"]):
                    raise ChainBrokenError("a block's second output feeds the next block")
            calls[i].append(call)
            if i == count - 1:
                raise _StopError
            if i == 0 and "shape" not in previous:
                previous["shape"] = outputs(i, args, kwargs)
            previous["hidden"] = call.hidden
            previous["extras"] = []
            shape = previous["shape"]
            if isinstance(shape, Tensor):
                return call.hidden
            rest = [torch.empty(0, device=call.hidden.device) if isinstance(o, Tensor) else o for o in shape[1:]]
            previous["extras"] = [r for r in rest if isinstance(r, Tensor)]
            return (call.hidden, *rest)

        return _Recorder(block, record)

    def runner(block: nn.Module) -> _Recorder:
        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with residency.open(block):
                return block(*args, **kwargs)

        return _Recorder(block, run)

    stand_ins = [recorder(i, block) for i, (_, block) in enumerate(stack.blocks)]
    with torch.no_grad(), _without_cache(model), residency.open(model, inside), _swapped(stack.container, stand_ins):
        for other in done:
            assert other.container is not None
            for i, (_, block) in enumerate(other.blocks):
                other.container[i] = runner(block)
        try:
            for j in range(calls_of_all_ranks):
                batch = batches[min(j, len(batches) - 1)]
                moved = _moved(batch, residency.device)
                previous["tokens"] = token_mask(moved)
                try:
                    model(**moved)
                except _StopError:
                    pass
                else:
                    raise ChainBrokenError("the last block of the list is never called")
        finally:
            for other in done:
                assert other.container is not None
                for i, (_, block) in enumerate(other.blocks):
                    other.container[i] = block
    return [of_block[: len(batches)] for of_block in calls]


@dataclass(frozen=True)
class Structure:
    """How a block calls its layers: sites (names of layers that read one tensor, in call order), and the others."""

    sites: tuple[tuple[str, ...], ...]
    unreached: tuple[str, ...]
    repeated: tuple[str, ...]
    traced: bool


def structure_of(block: nn.Module, call: Call, layers: Sequence[Layer]) -> Structure:
    """Which layers share an input, from one forward on tensors without data.

    A block whose control flow depends on data is run for real on the micro-batch instead (traced=False).
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = tree_map(
                lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, (call.args, dict(call.kwargs))
            )
            seen = _observe(block, fake[0], fake[1], layers)
        traced = True
    except Exception:  # noqa: BLE001 - whatever tracing cannot do, running can
        seen = _observe(block, call.args, call.kwargs, layers)
        traced = False
    order: dict[int, list[str]] = {}
    counts: dict[str, int] = {}
    for name, x in seen:
        counts[name] = counts.get(name, 0) + 1
        order.setdefault(id(x), []).append(name)
    repeated = {name for name, n in counts.items() if n > 1}
    sites = [tuple(n for n in names if n not in repeated) for names in order.values()]
    return Structure(
        sites=tuple(s for s in sites if s),
        unreached=tuple(layer.name for layer in layers if layer.name not in counts),
        repeated=tuple(sorted(repeated)),
        traced=traced,
    )


def _observe(block: nn.Module, args: Any, kwargs: Any, layers: Sequence[Layer]) -> list[tuple[str, Tensor]]:
    """(layer, its input) in call order; the inputs are kept alive so that identity means something."""
    seen: list[tuple[str, Tensor]] = []
    hooks = [
        layer.module.register_forward_pre_hook(lambda _, a, name=layer.name: seen.append((name, a[0])))
        for layer in layers
    ]
    try:
        with torch.no_grad():
            block(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def output_shape(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the block would return, on tensors without data (a plain tensor where that cannot be told)."""
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = tree_map(lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, (args, dict(kwargs)))
            return block(*fake[0], **fake[1])
    except Exception:  # noqa: BLE001 - whatever tracing cannot do, running can
        with torch.no_grad():
            return block(*args, **kwargs)


class _Runner:
    """One micro-batch's forward of the block, in a greenlet that parks at the sites."""

    def __init__(self, block: nn.Module, call: Call, site_of: Mapping[nn.Module, int], done: set[int]) -> None:
        self.inputs: dict[int, ReferenceType[Tensor]] = {}
        self.site_of, self.done = site_of, done
        self.parked: tuple[int, Tensor] | None = None
        self.output: Any = None
        self.finished = False
        self.task = greenlet.greenlet(lambda: block(*call.args, **call.kwargs))

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


@dataclass(frozen=True)
class Arrival:
    """A micro-batch at a site: its tokens as rows, in the compressed model and (where it runs) in the original."""

    x_MK: Tensor
    reference_MK: Tensor | None


def suspended_forward(
    block: nn.Module,
    calls: Sequence[Call],
    layers: Mapping[str, Layer],
    sites: Sequence[Sequence[str]],
    visit: Callable[[int, Iterator[Arrival]], None],
    reference: Sequence[Call] | None,
    use_original: Callable[[bool], None],
) -> tuple[list[Any], list[Any]]:
    """Run the block once per micro-batch, calling `visit(site, arrivals)` when a site is due.

    `visit` consumes the arrivals, then changes the weights of the site's layers. `reference` are the same calls on the
    original model's hidden states; `use_original(True)` puts the original weights of the layers changed so far in
    place, `use_original(False)` the new ones. Returns the block's outputs for calls and for reference.
    """
    site_of = {layers[name].module: i for i, names in enumerate(sites) for name in names}
    done: set[int] = set()
    runners = [_Runner(block, call, site_of, done) for call in calls]
    shadows = [_Runner(block, call, site_of, done) for call in reference or ()]
    current: list[_Runner] = []

    def advance(runner: _Runner, site: int) -> Tensor | None:
        current[:] = [runner]
        return runner.advance(site)

    def arrivals(site: int) -> Iterator[Arrival]:
        for i, runner in enumerate(runners):
            other = None
            if shadows:
                use_original(True)
                other = advance(shadows[i], site)
                use_original(False)
            x = advance(runner, site)
            if x is not None:
                rows = None if other is None else real_tokens(other, calls[i])
                yield Arrival(real_tokens(x, calls[i]), rows)

    hooks = [m.register_forward_pre_hook(lambda m, a: current[0].reach(m, a[0])) for m in site_of]
    try:
        with torch.no_grad():
            for site in range(len(sites)):
                visit(site, arrivals(site))
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
