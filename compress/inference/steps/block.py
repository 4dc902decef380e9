"""Runs the steps of a decoder block in one call.

`install` gives a block a forward that does so for one token per sequence, without gradients, once the form of the block
is known (`form.py`) and its plan returned what the block's own forward does, in a trial at the first step. A plan is a
program for a CPU (`program.py`), or launches of kernels on a GPU (`launches.py`). Everything else goes to that forward:
prompts, training, blocks with hooks inside, other attention functions, tracing.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from types import MethodType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.modules import module as torch_module

from compress.base.errors import first_line
from compress.inference.layers.base import OnCodes
from compress.inference.steps.form import form_of
from compress.inference.steps.parts import EPSILONS, AttentionForm, BlockForm, near
from compress.inference.steps.program import Planner
from compress.inference.steps.room import CacheSlot, layer_of, slot_in, take
from compress.inference.steps.trace import HISTORY, TOKENS, NotTakenError, NotYetError, Trace, UnknownFormError, trace
from compress.kernels.cpu import steps
from compress.kernels.cpu.arguments import TYPES
from compress.kernels.operators.devices import runs_on_cpu, why_not_triton

STATE = "compress_steps"
NOT_REPLAYED = "compress_not_replayed"  # of a model: why `graph.py` does not replay its steps
# Arguments of a block that a step knows, or that do not change what it computes.
KNOWN = ("attention_mask", "position_embeddings", "past_key_values", "position_ids", "use_cache", "cache_position")
DIMENSIONS = 4  # of a mask
# Attributes of modules that a program depends on: of norms, of attentions, of layers on codes.
SETTINGS = (*EPSILONS, "scaling", "input_group", "batch_invariant", "lookup", "rounding_first", "container")
MOST_TRIALS = 4  # of a block whose layers change


def install(model: nn.Module) -> None:
    """Give the blocks of a model steps in one call: elements of its outermost lists with layers on codes in them."""
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            install(child)
            continue
        for block in child:
            if any(isinstance(module, OnCodes) for module in block.modules()):
                block.__dict__[STATE] = BlockSteps()
                block.forward = MethodType(forward, block)


def installed_steps(model: nn.Module) -> Iterator[tuple[str, "BlockSteps"]]:
    """(Name, steps) of the blocks of a model that have them."""
    yield from ((n, m.__dict__[STATE]) for n, m in model.named_modules() if STATE in m.__dict__)


def remarks(model: nn.Module) -> list[str]:
    """Remarks, after steps were generated, on blocks whose own forward ran them; empty where none did."""
    every = [steps for _, steps in installed_steps(model)]
    untried = "they are not called with one tensor and a cache, as blocks of a decoder are"
    reasons = Counter(
        steps.not_taken or steps.why_not or untried for steps in every if steps.known is None or steps.not_taken
    )
    notes = [
        f"steps of {count} of {len(every)} blocks are run by their own modules, not in one call: {reason}"
        for reason, count in reasons.items()
    ]
    if reason := model.__dict__.get(NOT_REPLAYED):
        notes.append(f"steps are not replayed as one graph: {reason}")
    return notes


def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a block: in one call where that can be."""
    if not is_compiling() and len(args) == 1:
        out = block.__dict__[STATE].run(block, args[0], kwargs)
        if out is not None:
            return out
    return type(block).forward(block, *args, **kwargs)


class StepPlan(Protocol):
    """A block's step on one kind of device. dtype: of its input; left: modules that are called as they are; by_length:
    it reads the place in a cache of fixed size from the cache's own tensor."""

    by_length: ClassVar[bool]

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def left(self) -> set[nn.Module]: ...

    def run(self, x: Tensor, turn: tuple[Tensor, Tensor] | None, slot: CacheSlot, mask: Tensor | None) -> Tensor:
        """The block's result for x [batch, 1, width], its key and value written to the slot. turn: cosines and sines.
        Raises NotTakenError, with nothing changed."""
        ...

    def apart(
        self, x: Tensor, turn: tuple[Tensor, Tensor] | None, cache: Any, index: int, mask: Tensor | None
    ) -> Tensor:
        """The same over a cache that keeps its tokens by its own `update`."""
        ...


@dataclass
class KnownBlock:
    """A block whose form is known. held, keys, links: of all that the program depends on, the dictionary that has it,
    its key, and what is there. hooks: dictionaries that must be empty. places: tensors and their addresses."""

    planned: StepPlan
    form: AttentionForm
    cache_index: int
    held: tuple[dict[str, Any], ...]
    keys: tuple[str, ...]
    links: tuple[Any, ...]
    hooks: tuple[Any, ...]
    places: tuple[tuple[Tensor, int], ...]

    def holds(self) -> bool:
        """True while the block is as it was when it was tried."""
        # In loops of C: this is asked at every step of every block.
        if not all(map(is_, map(dict.get, self.held, self.keys), self.links)):
            return False
        return all(tensor.data_ptr() == place for tensor, place in self.places)


class BlockSteps:
    """The steps of a block. why_not: the reason why they are left to its own forward, if they are; not_taken: the
    reason why the last of those was that was."""

    def __init__(self) -> None:
        self.known: KnownBlock | None = None
        self.why_not: str | None = None
        self.not_taken: str | None = None
        self.trials = 0
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockSteps":
        return BlockSteps()  # a copy of the block has other tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockSteps, ()

    def run(self, block: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The result of a step; None where the block's own forward is to run."""
        if self.why_not is not None or not may_step(x):
            return None
        if kwargs.get("past_key_values") is None or not all(
            key in KNOWN or value is None or value is False for key, value in kwargs.items()
        ):
            return None
        known = self.known
        if known is not None and known.holds():
            if any(known.hooks):
                return None
        else:
            if block.training or any(
                module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
                for module in block.modules()
                if module is not block
            ):
                return None
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            known = self.learn(block, x, kwargs)
            if known is None:
                return None
        if x.dtype is not known.planned.dtype:
            return None
        try:
            return step(known, x, kwargs)
        except NotTakenError as error:
            self.not_taken = str(error)
            return None

    def learn(self, block: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> KnownBlock | None:
        """Try the block."""
        with self.lock:
            if self.known is not None and self.known.holds():
                return self.known
            self.known = None
            self.trials += 1
            try:
                if self.trials > MOST_TRIALS:
                    raise UnknownFormError("its layers change again and again")
                self.known = known_block(block, x, kwargs)
            except NotYetError:
                self.trials -= 1
            except UnknownFormError as error:
                self.why_not = str(error)
            except Exception as error:  # noqa: BLE001 - of a module that no form expects, or of a compiler of kernels
                self.why_not = f"its trial failed: {first_line(error)}"
        return self.known


def may_step(x: Any) -> bool:
    """True for the input of a step without a gradient, outside of what traces or records operations."""
    return (
        type(x) is Tensor
        and x.dim() == 3
        and x.shape[1] == 1
        and (x.is_cpu or x.is_cuda)
        and x.dtype in TYPES
        and not torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled(x.device.type)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


# --- trials ----------------------------------------------------------------------------------------------------------


def known_block(block: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> KnownBlock:
    """A block with its program, which has computed the same as its own forward. Raises UnknownFormError."""
    on_cpu = runs_on_cpu(x.device)
    if reasons := steps.why_not() if on_cpu else why_not_triton(x.device):
        raise UnknownFormError("; ".join(reasons))
    state = torch.random.get_rng_state()
    try:
        tried, loud = (trace(block, x, kwargs, loud) for loud in (False, True))
    finally:
        torch.random.set_rng_state(state)
    form = form_of(tried)
    if form_of(loud) != form:
        raise UnknownFormError("large numbers are treated in another way than small ones")
    planned = _planned(form, x, on_cpu)
    links, hooks, places = _dependencies(block, planned)
    held, keys, found = zip(*links, strict=True)
    known = KnownBlock(planned, form.attention, tried.cache_index, held, keys, found, tuple(hooks), tuple(places))
    _compare(known, tried)
    return known


def _planned(form: BlockForm, x: Tensor, on_cpu: bool) -> StepPlan:
    """The plan of a block for the device of x: here it is chosen. Raises UnknownFormError."""
    if on_cpu:
        return Planner(x.dtype, x.shape[2]).plan(form)
    from compress.inference.steps.launches import plan

    return plan(form, x)


def _dependencies(block: nn.Module, planned: StepPlan) -> tuple[list[Any], list[Any], list[Any]]:
    """Links, hooks and places of `KnownBlock`."""
    links: list[Any] = [(block.__dict__, "training", False)]
    hooks: list[Any] = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    places: list[Any] = []
    left = planned.left
    inside_left = {inner for module in left for inner in module.modules()} - left
    for module in block.modules():
        if module in inside_left:
            continue
        if module not in left:
            links += [(module._modules, name, child) for name, child in module._modules.items()]
        if module is block:
            continue
        links.append((module.__dict__, "forward", None))
        hooks += [module._forward_hooks, module._forward_pre_hooks]
        if module in left:
            continue
        names = (name for name in SETTINGS if name in module.__dict__)
        links += [(module.__dict__, name, module.__dict__[name]) for name in names]
        if module._modules or isinstance(module, nn.Dropout):
            links.append((module.__dict__, "training", module.training))
        for tensors in (module._buffers, module._parameters):
            links += [(tensors, name, tensor) for name, tensor in tensors.items()]
        places += [(t, t.data_ptr()) for t in module._parameters.values() if t is not None]
    return links, hooks, places


def _compare(known: KnownBlock, tried: Trace) -> None:
    """Raise UnknownFormError unless the plan returns what the block did, for all sequences and for one."""
    assert tried.keys.shape[:2] == (TOKENS, known.form.key_heads)
    slot = CacheSlot(tried.keys, tried.values, HISTORY, 0, HISTORY + 1)
    place = torch.tensor(HISTORY, device=tried.x.device)
    of_fixed_size = slot._replace(place=-1, length=place) if known.planned.by_length else slot
    for some, slot_of_some in ((slice(None), slot), (slice(0, 1), of_fixed_size)):
        keys, values = tried.keys[some].clone(), tried.values[some].clone()
        keys[:, :, HISTORY], values[:, :, HISTORY] = torch.nan, torch.nan
        turn = None if tried.cos is None or tried.sin is None else (tried.cos[some], tried.sin[some])
        given = slot_of_some._replace(keys=keys, values=values)
        out = known.planned.run(tried.x[some], turn, given, tried.mask[some])
        pairs = {"result": (out, tried.out), "keys": (keys, tried.keys), "values": (values, tried.values)}
        if wrong := [what for what, (found, expected) in pairs.items() if not near(found, expected[some])]:
            raise UnknownFormError(f"a step in one call gives other {', '.join(wrong)} than its own forward")


# --- steps -----------------------------------------------------------------------------------------------------------


def step(known: KnownBlock, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """The result of a step; None, with nothing changed, where its arguments are none that a program takes."""
    form, cache, mask = known.form, kwargs.get("past_key_values"), kwargs.get("attention_mask")
    batch, dtype = x.shape[0], x.dtype
    if not x.is_contiguous():
        return None
    turn = None
    if form.states.rotated:
        turn = kwargs.get("position_embeddings")
        if turn is None or not all(_turns(part, form.states.rotated, batch, dtype) for part in turn):
            return None
    layer = layer_of(cache, known.cache_index)
    sizes = (batch, form.key_heads, form.size, form.value_size)
    slot = None if layer is None else slot_in(layer, sizes, x, known.planned.by_length)
    if slot is None:
        if mask is not None and not _masks(mask, batch, form.heads, None):
            return None
        return known.planned.apart(x, turn, cache, known.cache_index, mask)
    if mask is not None and not _masks(mask, batch, form.heads, slot.stop - slot.first):
        return None
    out = known.planned.run(x, turn, slot, mask)
    take(layer, slot)
    return out


def _turns(part: Any, rotated: int, batch: int, dtype: torch.dtype) -> bool:
    """True for cosines or sines that a program reads."""
    shape = part.shape
    return bool(
        part.dtype is dtype
        and len(shape) == 3
        and shape[0] in (1, batch)
        and shape[1:] == (1, rotated)
        and part.stride(2) == 1
    )


def _masks(mask: Any, batch: int, heads: int, keys: int | None) -> bool:
    """True for a mask that a program reads."""
    if type(mask) is not Tensor or mask.dim() != DIMENSIONS or not (mask.dtype is torch.bool or mask.dtype in TYPES):
        return False
    shape = mask.shape
    return shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2] == 1 and keys in (None, shape[3])
