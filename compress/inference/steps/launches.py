"""Makes the launches of a block's step from its form, and runs them on a GPU:

    norm, q, k, v | norms of heads, rotary embedding, cache, attention | o, + x | norm, gate, up, act | down, +

Five for one sequence, where q, k, v are one product, and so are gate and up (`fuse`); for several, norms are two more.
Weights have 4 or 8 bits in planar words. Everything else of a form is refused, with a reason: norms behind a product,
norms over all heads, mixtures of experts.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from compress.inference.layers.packed import PackedLinear
from compress.inference.steps.parts import AttentionForm, BlockForm, MlpForm, NormForm, ProductColumns
from compress.inference.steps.program import Turn, multiplier
from compress.inference.steps.room import CacheSlot
from compress.inference.steps.trace import NotTakenError, UnknownFormError
from compress.kernels.layouts.words import CodeWords
from compress.kernels.operators.words import why_not_weight_only
from compress.kernels.step_functions import Activation, Norm
from compress.kernels.triton.steps.attention import MOST_SIZE, CachedTokens, HeadStates, attend_step
from compress.kernels.triton.steps.norms import RowNorm
from compress.kernels.triton.steps.products import BLOCK_M, step_product


class StepProduct(NamedTuple):
    """A product of a step."""

    weight: CodeWords
    bias: Tensor | None


@dataclass(frozen=True)
class LaunchPlan:
    """Launches of a block's step (`StepPlan` of block.py). first: the products that q, k and v are columns of."""

    dtype: torch.dtype
    norm: RowNorm | None
    first: dict[nn.Module, StepProduct]
    states: tuple[ProductColumns, ...]
    head_norms: tuple[RowNorm | None, RowNorm | None]
    scale: float
    output: StepProduct
    parallel: bool
    mlp_norm: RowNorm | None
    gate: StepProduct
    gated: bool
    activation: Activation
    down: StepProduct
    by_length: ClassVar[bool] = True

    @property
    def left(self) -> set[nn.Module]:
        return set()

    def run(self, x: Tensor, turn: Turn, slot: CacheSlot, mask: Tensor | None) -> Tensor:
        """The block's result, its key and value written to the slot. Raises NotTakenError."""
        if len(x) > BLOCK_M:
            raise NotTakenError(f"{len(x)} sequences; kernels of a step take {BLOCK_M}")
        if mask is not None and (mask.shape[1] != 1 or mask.dtype != torch.bool):
            raise NotTakenError("its mask is none of all heads that says yes or no")
        if slot.length is not None and mask is None:
            raise NotTakenError("no mask hides the end of a cache of fixed size")
        x_MK = x.view(len(x), -1)
        outs = {layer: step_product(x_MK, *product, norm=self.norm) for layer, product in self.first.items()}
        query, key, value = (outs[of.product][:, of.start : of.stop] for of in self.states)
        turned = None if turn is None else (turn[0][:, 0], turn[1][:, 0])
        cached = CachedTokens(slot.keys, slot.values, slot.place, slot.first, slot.stop - slot.first, slot.length)
        seen = None if mask is None else mask[:, 0, 0]
        attended = attend_step(HeadStates(query, key, value, *self.head_norms, turned), cached, seen, self.scale)
        total = step_product(attended, *self.output, residual_MN=x_MK, length=slot.length)
        read = x_MK if self.parallel else total
        acted = step_product(read, *self.gate, norm=self.mlp_norm, activation=self.activation, gated=self.gated)
        return step_product(acted, *self.down, residual_MN=total).view(x.shape)

    def apart(self, x: Tensor, turn: Turn, cache: Any, index: int, mask: Tensor | None) -> Tensor:
        """Raises NotTakenError."""
        raise NotTakenError(f"a {type(cache).__name__} keeps its tokens in a way of its own")


def plan(form: BlockForm, x: Tensor) -> LaunchPlan:
    """The launches of a block for such an x. Raises UnknownFormError."""
    attention, mlp = form.attention, form.mlp
    if attention.after is not None or mlp.after is not None:
        raise UnknownFormError("a norm stands behind its products")
    if max(attention.size, attention.value_size) > MOST_SIZE:
        raise UnknownFormError(f"heads of more than {MOST_SIZE} numbers")
    first, states = _first(attention, x)
    gate, down = _mlp(mlp, x)
    return LaunchPlan(
        dtype=x.dtype,
        norm=_norm(attention.norm),
        first=first,
        states=states,
        head_norms=_head_norms(attention),
        scale=attention.scale,
        output=_whole(attention.output, x),
        parallel=form.parallel,
        mlp_norm=_norm(attention.norm if mlp.shares_norm else mlp.norm),
        gate=gate,
        gated=mlp.up is not None,
        activation=mlp.activation,
        down=down,
    )


def _norm(form: NormForm | None) -> RowNorm | None:
    return None if form is None else RowNorm(form.variant, form.weight, form.bias, form.epsilon)


def _head_norms(form: AttentionForm) -> tuple[RowNorm | None, RowNorm | None]:
    norms = form.states.query_norm, form.states.key_norm
    if any(norm is not None and (norm.size != form.size or norm.variant == Norm.LAYER) for norm in norms):
        raise UnknownFormError("a norm of queries or keys is none of the RMS of a head")
    return _norm(norms[0]), _norm(norms[1])


def _product(layer: nn.Module, x: Tensor) -> StepProduct:
    """The product of a layer. Raises UnknownFormError."""
    if type(layer) is not PackedLinear or layer.input_group is not None or layer.rounding_first is not None:
        raise UnknownFormError(f"kernels of a step do not multiply by a {type(layer).__name__} as it is here")
    if layer.batch_invariant:
        raise UnknownFormError("kernels of a step are not batch-invariant")
    weight = layer.planar
    if reasons := why_not_weight_only(x, weight):
        raise UnknownFormError(f"no kernel of a step multiplies by its weights ({'; '.join(reasons)})")
    return StepProduct(weight, layer.bias)


def _whole(module: nn.Module, x: Tensor) -> StepProduct:
    """The product of a layer that is called for itself."""
    layer, start = multiplier(module)
    product = _product(layer, x)
    if start or layer.out_features != getattr(module, "out_features", None):
        raise UnknownFormError("a product is part of another one")
    return product


def _first(form: AttentionForm, x: Tensor) -> tuple[dict[nn.Module, StepProduct], tuple[ProductColumns, ...]]:
    """(The products that queries, keys and values are made of, by layer, and their columns of these)."""
    states: list[ProductColumns] = []
    found: dict[nn.Module, StepProduct] = {}
    for part in (form.states.query, form.states.key, form.states.value):
        layer, start = multiplier(part.product)
        states.append(ProductColumns(layer, start + part.start, start + part.stop))
        found[layer] = found.get(layer) or _product(layer, x)
    return found, tuple(states)


def _mlp(form: MlpForm, x: Tensor) -> tuple[StepProduct, StepProduct]:
    """(The product of gate and up, that of down)."""
    if form.whole is not None or form.gate is None or form.down is None:
        raise UnknownFormError("its MLP is a module of another form")
    ends = [part for part in (form.gate, form.up) if part is not None]
    layer, _ = multiplier(form.gate.product)
    starts = [multiplier(part.product)[1] + part.start for part in ends if multiplier(part.product)[0] is layer]
    width = form.gate.stop - form.gate.start
    if starts != [width * i for i in range(len(ends))] or layer.out_features != width * len(ends):
        raise UnknownFormError("gate and up are not one product, the gate first")
    return _product(layer, x), _whole(form.down, x)
