"""Runs the steps of a decoder block in one call.

`install` gives a block a forward that does so for one token per sequence on a CPU, without gradients, once the form of
the block is known (`form.py`) and its program returned what the block's own forward does, in a trial at the first step.
Everything else goes to that forward: prompts, training, blocks with hooks inside, other attention functions, tracing.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.modules import module as torch_module

from compress.base.errors import first_line
from compress.inference.layers.base import OnCodes
from compress.inference.steps.form import form_of
from compress.inference.steps.parts import EPSILONS, AttentionForm, near
from compress.inference.steps.program import Leave, Planner, StepPlan
from compress.inference.steps.room import layer_of, slot_in, take
from compress.inference.steps.trace import HISTORY, TOKENS, NotYetError, Trace, UnknownFormError, trace
from compress.kernels.cpu import steps
from compress.kernels.cpu.arguments import TYPES
from compress.kernels.cpu.steps import Operand, StepCall

STATE = "compress_steps"
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
    reasons = Counter(steps.why_not or untried for steps in every if steps.known is None)
    return [
        f"steps of {count} of {len(every)} blocks are run by their own modules, not in one call: {reason}"
        for reason, count in reasons.items()
    ]


def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a block: in one call where that can be."""
    if not is_compiling() and len(args) == 1:
        out = block.__dict__[STATE].run(block, args[0], kwargs)
        if out is not None:
            return out
    return type(block).forward(block, *args, **kwargs)


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
    """The steps of a block. why_not: the reason why they are left to its own forward, if they are."""

    def __init__(self) -> None:
        self.known: KnownBlock | None = None
        self.why_not: str | None = None
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
            known = self.learn(block, x, kwargs)
            if known is None:
                return None
        if x.dtype is not known.planned.program.dtype:
            return None
        return step(known, x, kwargs)

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
            except RuntimeError as error:  # of a module that does with its tensors what no form expects
                self.why_not = f"its trial failed: {first_line(error)}"
        return self.known


def may_step(x: Any) -> bool:
    """True for the input of a step without a gradient, on a CPU and outside of what traces or records operations."""
    return (
        type(x) is Tensor
        and x.dim() == 3
        and x.shape[1] == 1
        and x.is_cpu
        and x.dtype in TYPES
        and not torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


# --- trials ----------------------------------------------------------------------------------------------------------


def known_block(block: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> KnownBlock:
    """A block with its program, which has computed the same as its own forward. Raises UnknownFormError."""
    if reasons := steps.why_not():
        raise UnknownFormError("; ".join(reasons))
    state = torch.random.get_rng_state()
    try:
        tried, loud = (trace(block, x.shape[2], x.dtype, kwargs, loud) for loud in (False, True))
    finally:
        torch.random.set_rng_state(state)
    form = form_of(tried)
    if form_of(loud) != form:
        raise UnknownFormError("large numbers are treated in another way than small ones")
    planned = Planner(x.dtype, x.shape[2]).plan(form)
    if not planned.weights:
        raise UnknownFormError("no loop multiplies by its weights")
    links, hooks, places = _dependencies(block, planned)
    held, keys, found = zip(*links, strict=True)
    known = KnownBlock(planned, form.attention, tried.cache_index, held, keys, found, tuple(hooks), tuple(places))
    _compare(known, tried)
    return known


def _dependencies(block: nn.Module, planned: StepPlan) -> tuple[list[Any], list[Any], list[Any]]:
    """Links, hooks and places of `KnownBlock`."""
    links: list[Any] = [(block.__dict__, "training", False)]
    hooks: list[Any] = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    places: list[Any] = []
    left = {part.module for part in planned.parts if isinstance(part, Leave)}
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
    """Raise UnknownFormError unless the program returns what the block did."""
    form, (keys, values) = known.form, (tried.keys.clone(), tried.values.clone())
    keys[:, :, HISTORY], values[:, :, HISTORY] = torch.nan, torch.nan
    call = _call(known, tried.x, tried.cos, tried.sin)
    _show(call, keys, values, HISTORY, 0, HISTORY + 1)
    _mask(call, tried.mask)
    out = _run(known, call, tried.x, None)
    assert keys.shape[:2] == (TOKENS, form.key_heads)
    wrong = [
        what
        for what, found, expected in (
            ("result", out, tried.out),
            ("keys", keys, tried.keys),
            ("values", values, tried.values),
        )
        if not near(found, expected)
    ]
    if wrong:
        raise UnknownFormError(f"a step in one call gives other {', '.join(wrong)} than its own forward")


# --- steps -----------------------------------------------------------------------------------------------------------


def step(known: KnownBlock, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """The result of a step; None, with nothing changed, where its arguments are none that a program takes."""
    form, cache, mask = known.form, kwargs.get("past_key_values"), kwargs.get("attention_mask")
    batch, dtype = x.shape[0], x.dtype
    if not x.is_contiguous():
        return None
    cos = sin = None
    if form.states.rotated:
        rotary = kwargs.get("position_embeddings")
        if rotary is None or not all(_turns(part, form.states.rotated, batch, dtype) for part in rotary):
            return None
        cos, sin = rotary
    call = _call(known, x, cos, sin)
    layer = layer_of(cache, known.cache_index)
    slot = None if layer is None else slot_in(layer, (batch, form.key_heads, form.size, form.value_size), dtype)
    if slot is None:
        if mask is not None and not _masks(mask, batch, form.heads, None):
            return None
        return _apart(known, call, x, cache, mask)
    if mask is not None and not _masks(mask, batch, form.heads, slot.stop - slot.first):
        return None
    _show(call, slot.keys, slot.values, slot.place, slot.first, slot.stop)
    held = _mask(call, mask)
    out = _run(known, call, x, None)
    del held
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


def _call(known: KnownBlock, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> StepCall:
    """A call that lacks its cache and its mask."""
    call = StepCall(x=x.data_ptr(), M=x.shape[0], type=TYPES[x.dtype], threads=torch.get_num_threads())
    if cos is not None and sin is not None:
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        call.rotary_stride = 0 if cos.shape[0] == 1 else cos.stride(0)
    return call


def _show(call: StepCall, keys: Tensor, values: Tensor, place: int, first: int, stop: int) -> None:
    """Let a call write to a place of keys and values, and attend to tokens [first, stop)."""
    for tensor, name, slot in ((keys, "key", "key_slot"), (values, "value", "value_slot")):
        batch, heads, tokens, _ = tensor.stride()
        start, token_bytes = tensor.data_ptr(), tokens * tensor.element_size()
        setattr(call, slot, start + place * token_bytes)
        setattr(call, f"{name}s", start + first * token_bytes)
        setattr(call, f"{slot}_strides", (batch, heads))
        setattr(call, f"{name}_strides", (batch, heads, tokens))
    call.key_count = stop - first


def _mask(call: StepCall, mask: Tensor | None) -> Tensor | None:
    """Give a call its mask. Returns the tensor that must live as long."""
    if mask is None:
        return None
    if mask.stride(3) != 1:
        mask = mask.contiguous()
    call.mask, call.has_mask, call.bool_mask = mask.data_ptr(), 1, int(mask.dtype is torch.bool)
    call.mask_type = 0 if call.bool_mask else TYPES[mask.dtype]
    call.mask_strides = tuple(0 if mask.shape[i] == 1 else mask.stride(i) for i in range(2))
    return mask


def _apart(known: KnownBlock, call: StepCall, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
    """A step over a cache that keeps its tokens by its own `update`."""
    form, batch = known.form, x.shape[0]
    keys, values = (
        x.new_empty(batch, form.key_heads, 1, form.size),
        x.new_empty(batch, form.key_heads, 1, form.value_size),
    )
    _show(call, keys, values, 0, 0, 1)
    states: list[Any] = []

    def update() -> None:
        every = cache.update(keys, values, known.cache_index)
        states[:] = [part if part.stride(3) == 1 else part.contiguous() for part in every]
        count = states[0].shape[2]
        _show(call, states[0], states[1], 0, 0, count)
        seen = mask if mask is None or mask.shape[3] == count else mask[..., :count]
        states.append(_mask(call, seen))

    return _run(known, call, x, update)


def _run(known: KnownBlock, call: StepCall, x: Tensor, update: Any) -> Tensor:
    """Run a program. update: to be called once keys and values are computed, where they are not in the cache then."""
    planned = known.planned
    program, batch = planned.program, call.M
    out, work = torch.empty_like(x), x.new_empty(program.width * batch)
    call.out, call.work = out.data_ptr(), work.data_ptr()
    for part in planned.parts:
        if isinstance(part, Leave):
            out_of = part.module(x if part.x.at == steps.IN else _register(part.x, work, batch))
            _register(part.to, work, batch).copy_(out_of[0] if isinstance(out_of, tuple) else out_of)
            continue
        first, stop = part
        if update is not None and first <= planned.kept < stop:
            program.run(call, first, planned.kept + 1)
            update()
            first = planned.kept + 1
        program.run(call, first, stop)
    return out


def _register(of: Operand, work: Tensor, batch: int) -> Tensor:
    start = of.at * batch
    return work[start : start + of.row * batch].view(batch, 1, of.row)
