"""The linear of 2:4 weights as pairs (`layouts.pairs24.Pairs`) as a torch operator, which makes a block of rows dense
at a time.

No GPU kernel reads pairs, and a CPU has another layout (`strips24`), in which nothing is made dense.

Shapes: x [..., K], M tokens once flattened, N outputs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compress.kernels.errors import InputError
from compress.kernels.layouts.pairs24 import Pairs, pairs_weight
from compress.kernels.layouts.words24 import KEPT, QUAD
from compress.kernels.operators.blocks import gradient_of_blocks, product_of_blocks, row_blocks
from compress.kernels.operators.register import operator
from compress.kernels.operators.words import _rows

NO_KERNEL = "no GPU kernel reads pairs: torch makes a block of rows dense at a time"


def dense_blocks(weight: Pairs) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their values) of a weight, by torch alone: a gradient is traced through it."""
    for rows in row_blocks(len(weight.held), weight.held.shape[1] * QUAD // KEPT):
        scale, zero = (None if part is None else part[:, rows] for part in (weight.scale, weight.zero))
        part = Pairs(weight.held[rows], weight.position[rows], scale, zero, weight.group_size)
        yield rows, pairs_weight(part)


@operator("compress::pairs24_linear")
def pairs24_linear(
    x: Tensor,
    held: Tensor,
    position: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x. The weight is the parts of `Pairs`."""
    if held.shape[1] * QUAD != x.shape[-1] * KEPT:
        raise InputError(f"x has {x.shape[-1]} columns; {held.shape[1]} pairs' halves do not make as many")
    weight = Pairs(held, position, scale, zero, group_size)
    out_MN = product_of_blocks(_rows(x), dense_blocks(weight), len(held), bias)
    return out_MN.view(*x.shape[:-1], len(held))


@pairs24_linear.register_fake
def _(
    x: Tensor,
    held: Tensor,
    position: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    torch._check(held.shape[1] * QUAD == x.shape[-1] * KEPT, lambda: "pairs do not make as many columns as x has")
    return x.new_empty(*x.shape[:-1], held.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *weight, _, ctx.group_size = inputs
    ctx.save_for_backward(*weight)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    held, position, scale, zero = ctx.saved_tensors
    blocks = dense_blocks(Pairs(held, position, scale, zero, ctx.group_size))
    return gradient_of_blocks(grad, blocks, held.shape[1] * QUAD // KEPT), *(None,) * 6


pairs24_linear.register_autograd(_gradient, setup_context=_save)
