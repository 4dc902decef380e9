"""Makes the program of a block from its form: instructions for `kernels.cpu.steps`, and calls of the layers that no
loop multiplies, in their places."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compress.inference.layers.base import OnCodes
from compress.inference.layers.fused import FusedLinear
from compress.inference.steps.parts import AttentionForm, BlockForm, MlpForm, NormForm, ProductColumns
from compress.kernels.cpu.arguments import LoopWeight
from compress.kernels.cpu.steps import IN, OUT, Operand, Program, takes


@dataclass(frozen=True)
class Leave:
    """A module that is called from Python with one register; what it returns goes to another."""

    module: nn.Module
    x: Operand
    to: Operand


@dataclass(frozen=True)
class StepPlan:
    """A program. parts: ranges of instructions and modules to call between them, in order. kept: the instruction that
    stores keys and values, and the registers that it takes them from."""

    program: Program
    parts: tuple[tuple[int, int] | Leave, ...]
    kept: int
    key: Operand
    value: Operand
    weights: tuple[LoopWeight, ...]


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
        self.weights: list[LoopWeight] = []

    def plan(self, form: BlockForm) -> StepPlan:
        """The program of a block."""
        self.terms = {"x": self.x}
        read, store_index, key, value = self.attention(form.attention)
        one, two = form.sums
        if not form.parallel:
            self.sum(one)
        self.mlp(form, read)
        if form.parallel:
            self.sum(one)
        self.program.add(self.terms[two[0]], self.terms[two[1]], self.out, self.width)
        self.close()
        return StepPlan(self.program, tuple(self.parts), store_index, key, value, tuple(self.weights))

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
            self.weights.append(weight)

    def leave(self, module: nn.Module, x: Operand, to: Operand) -> None:
        """A call of a module."""
        self.close()
        self.parts.append(Leave(module, x, to))

    def attention(self, form: AttentionForm) -> tuple[Operand, int, Operand, Operand]:
        """(What its products read, the instruction that stores keys and values, their registers)."""
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
        return read, store_index, key, value

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
