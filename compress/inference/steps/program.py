"""Makes the program of a block from its form, and runs it on a CPU: instructions for `kernels.cpu.steps`, and calls of
the layers that no loop multiplies, in their places."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.inference.layers.base import OnCodes
from compress.inference.layers.fused import FusedLinear
from compress.inference.steps.parts import AttentionForm, BlockForm, MlpForm, NormForm, ProductColumns
from compress.inference.steps.room import CacheSlot
from compress.inference.steps.trace import UnknownFormError
from compress.kernels.cpu.arguments import TYPES, LoopWeight
from compress.kernels.cpu.steps import IN, OUT, Operand, Program, StepCall, takes

Turn = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Leave:
    """A module that is called from Python with one register; what it returns goes to another."""

    module: nn.Module
    x: Operand
    to: Operand


@dataclass(frozen=True)
class ProgramPlan:
    """A program (`StepPlan` of block.py). parts: ranges of instructions and modules to call between them, in order.
    kept: the instruction that stores keys and values."""

    program: Program
    form: AttentionForm
    parts: tuple[tuple[int, int] | Leave, ...]
    kept: int
    by_length: ClassVar[bool] = False

    @property
    def dtype(self) -> torch.dtype:
        return self.program.dtype

    @property
    def left(self) -> set[nn.Module]:
        return {part.module for part in self.parts if isinstance(part, Leave)}

    def run(self, x: Tensor, turn: Turn, slot: CacheSlot, mask: Tensor | None) -> Tensor:
        """The block's result, its key and value written to the slot."""
        call = _call(x, turn)
        _show(call, slot.keys, slot.values, slot.place, slot.first, slot.stop)
        held = _mask(call, mask)
        out = self._run(call, x, None)
        del held
        return out

    def apart(self, x: Tensor, turn: Turn, cache: Any, index: int, mask: Tensor | None) -> Tensor:
        """The same over a cache that keeps its tokens by its own `update`."""
        form, batch, call = self.form, x.shape[0], _call(x, turn)
        keys, values = (
            x.new_empty(batch, form.key_heads, 1, form.size),
            x.new_empty(batch, form.key_heads, 1, form.value_size),
        )
        _show(call, keys, values, 0, 0, 1)
        states: list[Any] = []

        def update() -> None:
            every = cache.update(keys, values, index)
            states[:] = [part if part.stride(3) == 1 else part.contiguous() for part in every]
            count = states[0].shape[2]
            _show(call, states[0], states[1], 0, 0, count)
            seen = mask if mask is None or mask.shape[3] == count else mask[..., :count]
            states.append(_mask(call, seen))

        return self._run(call, x, update)

    def _run(self, call: StepCall, x: Tensor, update: Callable[[], None] | None) -> Tensor:
        """Run the program. update: to be called once keys and values are computed, where they are not in the cache
        then."""
        program, batch = self.program, call.M
        out, work = torch.empty_like(x), x.new_empty(program.width * batch)
        call.out, call.work = out.data_ptr(), work.data_ptr()
        for part in self.parts:
            if isinstance(part, Leave):
                out_of = part.module(x if part.x.at == IN else _register(part.x, work, batch))
                _register(part.to, work, batch).copy_(out_of[0] if isinstance(out_of, tuple) else out_of)
                continue
            first, stop = part
            if update is not None and first <= self.kept < stop:
                program.run(call, first, self.kept + 1)
                update()
                first = self.kept + 1
            program.run(call, first, stop)
        return out


def _call(x: Tensor, turn: Turn) -> StepCall:
    """A call that lacks its cache and its mask."""
    call = StepCall(x=x.data_ptr(), M=x.shape[0], type=TYPES[x.dtype], threads=torch.get_num_threads())
    if turn is not None:
        cos, sin = turn
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


def _register(of: Operand, work: Tensor, batch: int) -> Tensor:
    start = of.at * batch
    return work[start : start + of.row * batch].view(batch, 1, of.row)


def weight_of(module: nn.Module) -> LoopWeight | None:
    """The weight of a layer where a loop multiplies by it as it lies; None elsewhere."""
    weight = module.step_weight() if isinstance(module, OnCodes) else None
    return weight if weight is not None and takes(weight) else None


def multiplier(module: nn.Module) -> tuple[nn.Module, int]:
    """(The layer that multiplies for this one, the first column of its result that is this one's)."""
    return (module.whole, module.rows.start) if isinstance(module, FusedLinear) else (module, 0)


class Planner:
    """Writes a program."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self.program = Program(dtype)
        self.x, self.out = Operand(IN, width, 0), Operand(OUT, width, 0)
        self.width = width
        self.parts: list[tuple[int, int] | Leave] = []
        self.begun = 0
        self.multiplies = False

    def plan(self, form: BlockForm) -> ProgramPlan:
        """The program of a block. Raises UnknownFormError."""
        self.terms = {"x": self.x}
        read, store_index = self.attention(form.attention)
        one, two = form.sums
        if not form.parallel:
            self.sum(one)
        self.mlp(form, read)
        if form.parallel:
            self.sum(one)
        self.program.add(self.terms[two[0]], self.terms[two[1]], self.out, self.width)
        self.close()
        if not self.multiplies:
            raise UnknownFormError("no loop multiplies by its weights")
        return ProgramPlan(self.program, form.attention, tuple(self.parts), store_index)

    def sum(self, names: str) -> None:
        """The first of a block's two additions."""
        self.terms["s"] = self.program.register(self.width)
        self.program.add(self.terms[names[0]], self.terms[names[1]], self.terms["s"], self.width)

    def close(self) -> None:
        """End a range of instructions."""
        if len(self.program) > self.begun:
            self.parts.append((self.begun, len(self.program)))
            self.begun = len(self.program)

    def norm(self, form: NormForm | None, x: Operand, count: int = 1) -> Operand:
        """A norm of x, or x where there is none."""
        if form is None:
            return x
        to = self.program.register(form.size * count)
        self.program.normalize(form.variant, x, to, form.size, form.weight, form.bias, form.epsilon, count)
        return to

    def products(self, modules: tuple[nn.Module, ...], x: Operand, widths: dict[nn.Module, int]) -> dict[Any, Operand]:
        """{module: the register of its result, from its first column on}."""
        registers: dict[nn.Module, Operand] = {}
        outs = {}
        for module in modules:
            layer, start = multiplier(module)
            weight = weight_of(layer)
            if weight is None:
                layer, start = module, 0
            if layer not in registers:
                out_features = getattr(layer, "out_features", None) or widths[module]
                registers[layer] = self.program.register(out_features)
                self.multiply(layer, weight, x, registers[layer])
            outs[module] = registers[layer].columns(start)
        return outs

    def multiply(self, layer: nn.Module, weight: LoopWeight | None, x: Operand, to: Operand) -> None:
        """A product by a loop, or by the layer itself."""
        if weight is None:
            self.leave(layer, x, to)
        else:
            self.program.multiply(weight, x, to)
            self.multiplies = True

    def leave(self, module: nn.Module, x: Operand, to: Operand) -> None:
        """A call of a module."""
        self.close()
        self.parts.append(Leave(module, x, to))

    def attention(self, form: AttentionForm) -> tuple[Operand, int]:
        """(What its products read, the instruction that stores keys and values)."""
        read = self.norm(form.norm, self.x)
        states = form.states
        columns = (states.query, states.key, states.value)
        widths = {part.product: max(c.stop for c in columns if c.product is part.product) for part in columns}
        outs = self.products(form.products, read, widths)
        query, key, value = (outs[part.product].columns(part.start) for part in columns)
        query = self.states(states.query_norm, query, form.heads, form.size, states.rotated)
        key = self.states(states.key_norm, key, form.key_heads, form.size, states.rotated)
        store_index = len(self.program)
        self.program.keep(key, value, form.key_heads, form.size, form.value_size)
        to = self.program.register(form.heads * form.value_size)
        self.program.attend(query, to, form.heads, form.key_heads, form.size, form.value_size, form.scale)
        added = self.program.register(self.width)
        self.multiply(form.output, weight_of(form.output), to, added)
        self.terms["a"] = self.norm(form.after, added)
        return read, store_index

    def states(self, norm: NormForm | None, x: Operand, heads: int, size: int, rotated: int) -> Operand:
        """Queries or keys, normalized and rotated."""
        if norm is not None:
            x = self.norm(norm, x, heads * size // norm.size)
        if rotated:
            self.program.rotate(x, heads, size, rotated)
        return x

    def mlp(self, block: BlockForm, read: Operand) -> None:
        """The MLP of a block. read: what its attention reads."""
        form: MlpForm = block.mlp
        x = read if form.shares_norm else self.norm(form.norm, self.x if block.parallel else self.terms["s"])
        added = self.program.register(self.width)
        if form.whole is not None:
            self.leave(form.whole, x, added)
        else:
            assert form.gate is not None
            assert form.down is not None
            ends = [part for part in (form.gate, form.up) if part is not None]
            widths = {part.product: max(e.stop for e in ends if e.product is part.product) for part in ends}
            outs = self.products(form.products, x, widths)
            gate, up = _place(outs, form.gate), None if form.up is None else _place(outs, form.up)
            width = form.gate.stop - form.gate.start
            acted = self.program.register(width)
            self.program.activate(form.activation, gate, up, acted, width)
            self.multiply(form.down, weight_of(form.down), acted, added)
        self.terms["m"] = self.norm(form.after, added)


def _place(outs: dict[Any, Operand], part: ProductColumns) -> Operand:
    return outs[part.product].columns(part.start)
