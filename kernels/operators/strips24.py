"""The linear of 2:4 weights in strips (`layouts.strips24.Strips24`) as a torch operator: CPUs use it in place of pairs
and of the words of `pack24`, where the weight can be laid out so (`lay_in_strips24`).

The numbers are those of `pairs24_linear` and `sparse24_linear`, up to the order of the sums, and with values of codes
that are not rounded to the type of their scales. Where no loop of `cpu_gemm` takes a call, pairs are laid out for it.

Shapes: x [..., K] in any leading shape, M tokens once flattened, N outputs.
"""

from typing import Any

from torch import Tensor

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.errors import InputError
from compress.kernels.layouts.pairs24 import Pairs
from compress.kernels.layouts.strips import BLOCK, ROWS
from compress.kernels.layouts.strips24 import Strips24, pack_pairs, pack_words24, unpack_pairs, why_not_strips24
from compress.kernels.layouts.words24 import Words24
from compress.kernels.operators.blocks import gradient_of_blocks
from compress.kernels.operators.pairs24 import dense_blocks, pairs24_linear
from compress.kernels.operators.register import operator


def why_not_lay_in_strips24(rows: int, columns: int, group_size: int) -> list[str]:
    """Reasons why a weight is not better off in strips on this CPU; empty when it is."""
    return [*why_not_strips24(rows), *cpu_gemm.why_not_sizes("sparse24", columns, group_size)] or [*cpu.why_not()]


def lay_in_strips24(weight: Pairs | Words24, columns: int) -> Strips24 | None:
    """A weight of `columns` columns on a CPU in strips; None where it is better off as it is."""
    held = weight[0]
    if held.device.type != "cpu" or why_not_lay_in_strips24(len(held), columns, weight.group_size):
        return None
    return pack_words24(weight, columns) if isinstance(weight, Words24) else pack_pairs(weight)


@operator("compress::strips24_linear")
def strips24_linear(
    x: Tensor,
    held: Tensor,
    position: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    bits: int,
) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x. The weight is the parts of a `Strips24`."""
    columns = x.shape[-1]
    if position.shape[1] != -(-columns // BLOCK):
        raise InputError(f"x has {columns} columns; {position.shape[1]} blocks of {BLOCK} do not hold as many")
    weight = Strips24(held, position, scale, zero, group_size, bits)
    if cpu_gemm.why_not("sparse24", x, held if scale is None else scale, group_size):
        pairs = unpack_pairs(weight, columns)
        return pairs24_linear(x, *pairs[:4], bias, group_size)
    out_MN = cpu_gemm.strips24(x.reshape(-1, columns), weight, bias)
    return out_MN.view(*x.shape[:-1], len(held) * ROWS)


@strips24_linear.register_fake
def _(
    x: Tensor,
    held: Tensor,
    position: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    bits: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], held.shape[0] * ROWS)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, held, position, scale, zero, _, *layout = inputs
    ctx.save_for_backward(held, position, scale, zero)
    ctx.layout, ctx.columns = layout, x.shape[-1]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    pairs = unpack_pairs(Strips24(*ctx.saved_tensors, *ctx.layout), ctx.columns)
    return gradient_of_blocks(grad, dense_blocks(pairs), ctx.columns), *(None,) * 7


strips24_linear.register_autograd(_gradient, setup_context=_save)
