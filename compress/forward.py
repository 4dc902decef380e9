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

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import greenlet
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from compress.architecture import Layer, Stack
from compress.convolution import elements, samples
from compress.errors import CompressError, InputError
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
    """The tokens of a layer's input as rows [M, K], pads removed.

    Raises CompressError where the input's leading shape is not that of the padding mask.
    """
    rows = x.reshape(-1, x.shape[-1])
    if call.tokens is None:
        return rows
    mask = call.tokens
    if x.shape[:-1] not in (mask.shape, (mask.numel(),)):
        raise CompressError(
            f"a layer's input of shape {tuple(x.shape)} cannot be matched with the batch's padding mask "
            f"{tuple(mask.shape)}; calibrate with samples of one length"
        )
    return rows[mask.reshape(-1)]


class ChainBrokenError(Exception):
    """The blocks of a stack do not simply hand the hidden state on."""


class _StopError(Exception):
    """Leave the model: everything worth recording has been recorded."""


class _Recorder(nn.Module):
    """Stands in for a block during capture. Attributes that the model reads come from the block itself."""

    def __init__(self, block: nn.Module, record: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.stands_for = block
        self.record = record

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("stands_for"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.record(args, kwargs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module's own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
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
    """Which tokens of a batch count: its attention mask [B, T], or None where all of them do.

    Raises InputError for padding that does not say which token of which layer it is about.
    """
    mask = batch.get("attention_mask")
    if mask is None or bool((mask != 0).all()):
        return None
    if mask.ndim != 2 or any(name.startswith("decoder_") for name in batch):
        raise InputError(
            f"calibration with padding needs an attention mask [batch, tokens] and one token sequence per sample; this "
            f"one has shape {tuple(mask.shape)} with {', '.join(batch)}: calibrate with samples of one length"
        )
    return mask != 0


def _moved(batch: Batch, device: torch.device) -> dict[str, Any]:
    # A tensor of torch.inference_mode cannot be used outside of it; a copy can.
    own = {k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for k, v in batch.items()}
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in own.items()}


def check_batches(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Raises InputError for a batch that a model's forward has no arguments for, or not all that it needs."""
    signature = inspect.signature(model.forward)
    named = [n for n, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for i, batch in enumerate(batches):
        try:
            signature.bind(**batch)
        except TypeError as error:
            raise InputError(
                f"calibration batch {i + 1} has {', '.join(map(str, batch))} for the forward of "
                f"{type(model).__name__}, which takes {', '.join(named)}: {error}"
            ) from None


@contextmanager
def named_failure(batch: Batch, index: int) -> Iterator[None]:
    """Within: what the model's own code raises about a calibration batch is one line, an InputError."""
    try:
        yield
    except (CompressError, ChainBrokenError, _StopError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = ": ".join((type(error).__name__, *str(error).strip().splitlines()[:1]))
        held = (f"{k} {list(v.shape) if isinstance(v, Tensor) else type(v).__name__}" for k, v in batch.items())
        raise InputError(f"the model cannot run calibration batch {index + 1} ({', '.join(held)}): {said}") from error


def running(call: Call, index: int) -> AbstractContextManager[None]:
    """`named_failure` for a model that is one block: it gets what a person gave, not what the block before it made."""
    return named_failure(call.kwargs, index) if call.key is None else nullcontext()


class _Capture:
    """Notes the arguments of every block while the model runs on recorders that only hand the hidden state on."""

    def __init__(self, count: int, output_of_first: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        self.calls: list[list[Call]] = [[] for _ in range(count)]
        self.output_of_first = output_of_first
        self.shape: Any = None
        self.tokens: Tensor | None = None
        self.hidden: Tensor | None = None
        self.extras: list[Tensor] = []

    def record(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for block i: keep its call, check the chain, return the hidden state as the block would."""
        call = Call(args, kwargs, _hidden_key(args, kwargs), self.tokens)
        if i > 0:
            if call.hidden is not self.hidden:
                raise ChainBrokenError("the hidden state changes between two blocks")
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            if any(t is extra for t in tensors for extra in self.extras):
                raise ChainBrokenError("a block's second output feeds the next block")
        self.calls[i].append(call)
        if i == len(self.calls) - 1:
            raise _StopError
        if self.shape is None:
            self.shape = self.output_of_first(args, kwargs)
        self.hidden = call.hidden
        return self.handed_on(call.hidden)

    def handed_on(self, hidden: Tensor) -> Any:
        """The hidden state in the structure that a block returns; other tensors are empty and recognisable."""
        self.extras = []
        if isinstance(self.shape, Tensor):
            return hidden
        rest = [torch.empty(0, device=hidden.device) if isinstance(o, Tensor) else o for o in self.shape[1:]]
        self.extras = [r for r in rest if isinstance(r, Tensor)]
        return (hidden, *rest)


def capture(
    model: nn.Module,
    stack: Stack,
    batches: Sequence[Batch],
    residency: Residency,
    output_of_first: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
) -> list[list[Call]]:
    """calls[block][micro-batch] of a stack. Raises ChainBrokenError where the blocks cannot be run one by one.

    `output_of_first(args, kwargs)` gives what the first block returns, on tensors without data.
    """
    if stack.container is None:
        return [[Call((), b, None, token_mask(b)) for b in (_moved(b, residency.device) for b in batches)]]
    noted = _Capture(len(stack.blocks), output_of_first)
    blocks = [block for _, block in stack.blocks]
    stand_ins = [_Recorder(block, partial(noted.record, i)) for i, block in enumerate(blocks)]
    with torch.no_grad(), residency.open(model, set(blocks)):
        with _swapped(stack.container, stand_ins):
            for i, batch in enumerate(batches):
                moved = _moved(batch, residency.device)
                noted.tokens = token_mask(moved)
                try:
                    with named_failure(batch, i):
                        model(**moved)
                except _StopError:
                    pass
                else:
                    raise ChainBrokenError("the last block of the list is never called")
        if noted.shape is None:  # a stack of one block
            noted.shape = output_of_first(noted.calls[0][0].args, noted.calls[0][0].kwargs)
        _check_called_once(model, stack, noted, _moved(batches[0], residency.device))
    return noted.calls


def _check_called_once(model: nn.Module, stack: Stack, noted: _Capture, batch: Batch) -> None:
    """Raise ChainBrokenError for a model that runs through its blocks more than once (ALBERT shares one block).

    Recording stops at the last block; this goes on to the end, on tensors without data, at no cost.
    """
    assert stack.container is not None
    counts = [0] * len(stack.blocks)

    def count(i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts[i] += 1
        key = _hidden_key(args, kwargs)
        return noted.handed_on(args[key] if isinstance(key, int) else kwargs[key])

    stand_ins = [_Recorder(block, partial(count, i)) for i, (_, block) in enumerate(stack.blocks)]
    with _swapped(stack.container, stand_ins):
        try:
            with without_data() as mode:
                model(**tree_map(lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, dict(batch)))
        except Exception:  # noqa: BLE001 - a head that cannot be traced says nothing about the blocks before it
            pass
    if any(n > 1 for n in counts):
        raise ChainBrokenError("a block is called several times in one forward pass")


@dataclass(frozen=True)
class Structure:
    """How a block calls its layers: sites (names of layers that read one tensor, in call order), and the others.

    Convolutions are of one site if they also read the tensor in the same way: the same patches.
    """

    sites: tuple[tuple[str, ...], ...]
    unreached: tuple[str, ...]
    repeated: tuple[str, ...]
    traced: bool


@contextmanager
def without_data() -> Iterator[FakeTensorMode]:
    """Within: tensors have shapes and no data. What cannot be computed so raises, and torch logs no errors about it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        logger.setLevel(level)


def structure_of(block: nn.Module, call: Call, layers: Sequence[Layer]) -> Structure:
    """Which layers share an input, from one forward on tensors without data.

    A block whose control flow depends on data is run for real on the micro-batch instead (traced=False).
    """
    try:
        with without_data() as mode:
            fake = tree_map(
                lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, (call.args, dict(call.kwargs))
            )
            seen = _observe(block, fake[0], fake[1], layers)
        traced = True
    except Exception:  # noqa: BLE001 - whatever tracing cannot do, running can
        with running(call, 0):
            seen = _observe(block, call.args, call.kwargs, layers)
        traced = False
    order: dict[tuple[Any, ...], list[str]] = {}
    counts: dict[str, int] = {}
    geometry = {layer.name: layer.geometry for layer in layers}
    for name, x, version in seen:
        counts[name] = counts.get(name, 0) + 1
        order.setdefault((id(x), version, geometry[name]), []).append(name)
    repeated = {name for name, n in counts.items() if n > 1}
    sites = [tuple(n for n in names if n not in repeated) for names in order.values()]
    return Structure(
        sites=tuple(s for s in sites if s),
        unreached=tuple(layer.name for layer in layers if layer.name not in counts),
        repeated=tuple(sorted(repeated)),
        traced=traced,
    )


def _observe(block: nn.Module, args: Any, kwargs: Any, layers: Sequence[Layer]) -> list[tuple[str, Tensor, int]]:
    """(layer, its input, the input's version) in call order; inputs are kept alive so that identity means something."""
    seen: list[tuple[str, Tensor, int]] = []
    hooks = [
        layer.module.register_forward_pre_hook(lambda _, a, name=layer.name: seen.append((name, a[0], a[0]._version)))
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
        with without_data() as mode:
            fake = tree_map(lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, (args, dict(kwargs)))
            return block(*fake[0], **fake[1])
    except Exception:  # noqa: BLE001 - whatever tracing cannot do, running can
        with torch.no_grad():
            return block(*args, **kwargs)


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


@dataclass(frozen=True)
class Arrival:
    """A micro-batch at a site: its tokens as rows, in the compressed model and (where it runs) in the original.

    Before a convolution the rows are of channels, one per element of a channel, and `samples` are the inputs as they
    came, [B, C, ...].
    """

    x_MK: Tensor
    reference_MK: Tensor | None
    samples: Tensor | None = None
    reference_samples: Tensor | None = None


@dataclass(frozen=True)
class Arrivals:
    """What arrives at a site, one micro-batch after the other (None where one does not come by). All of them wait
    there, so they can be walked again."""

    walk: Callable[[], Iterator[Arrival | None]]

    def __iter__(self) -> Iterator[Arrival | None]:
        return self.walk()


def arrived(layer: Layer, call: Call, x: Tensor, reference: Tensor | None) -> Arrival:
    """What arrives before a layer (and before the same layer of the original model).

    Raises CompressError where it cannot be told which of it is padding.
    """
    geometry = layer.geometry
    if geometry is None:
        return Arrival(real_tokens(x, call), None if reference is None else real_tokens(reference, call))
    if call.tokens is not None:
        raise CompressError(
            f"{layer.name} is a convolution, whose input of shape {tuple(x.shape)} cannot be matched with the batch's "
            f"padding mask {tuple(call.tokens.shape)}; calibrate with samples of one length"
        )
    if reference is None:
        return Arrival(elements(x, geometry), None, samples(x, geometry))
    other = elements(reference, geometry)
    return Arrival(elements(x, geometry), other, samples(x, geometry), samples(reference, geometry))


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
