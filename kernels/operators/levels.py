"""The linear of codes of a table of 16 levels (`weights.levels`: E2M1, NF4) as a torch operator.

    weight = table[code] (scale factor)        table fp32 [17]: the values of codes, and the factor

Codes are looked up as they are read. On a CPU the weight is in strips of 4 bits (`layouts.strips`), words of three
dimensions: AVX-512 has a permutation of 16 floats, or of 16 pairs of bfloat16 (to which the table is then rounded);
AVX2 a shuffle of bytes where levels are whole numbers, as those of E2M1 are in units of a half. On a GPU the weight is
in planar words of 4 bits (`layouts.words`), of two dimensions, and takes the paths of `words` (`triton.look_up`).

Shapes: x [..., K] in any leading shape, M tokens once flattened, N outputs, G groups of inputs.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.layouts.strips import NIBBLE, ROWS, STRIPS_DIMENSIONS, Strips, unpack_strips, why_not_strips
from compress.kernels.layouts.words import LevelTable, Planar, unpack_planar
from compress.kernels.operators.register import operator
from compress.kernels.operators.strips import check_lines
from compress.kernels.operators.words import planar_gradient, planar_product

CODES = 2**NIBBLE


def why_not_levels(rows: int, columns: int, group_size: int) -> list[str]:
    """Reasons why no loop of this CPU multiplies codes of a table, of so many rows and columns; empty when one does."""
    reasons = why_not_strips(rows, NIBBLE) + cpu_gemm.why_not_sizes("table_strips", columns, group_size)
    return reasons or [*cpu.why_not()]


def level_values(words: Tensor, scale: Tensor, table: Tensor, group_size: int, columns: int) -> Tensor:
    """fp32 [N, K]: the values of a weight in strips."""
    planar = unpack_strips(Strips(words, scale, None, group_size, NIBBLE), columns)
    codes = unpack_planar(planar.words, NIBBLE, columns)
    values = table[:CODES].index_select(0, codes.flatten().int()).view(len(codes), len(planar.scale), -1)
    return (values * (planar.scale.float() * table[CODES]).t().unsqueeze(-1)).view(len(codes), columns)


@operator("compress::levels_linear")
def levels_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    table: Tensor,
    bias: Tensor | None,
    group_size: int,
    batch_invariant: bool = False,
    signed: bool = False,
) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x. words, scale: of `Strips`, or of a `layouts.words.Planar`.
    batch_invariant: as in `words`. signed: as in `layouts.words.LevelTable`; planar words alone use it."""
    if words.dim() != STRIPS_DIMENSIONS:
        weight = Planar(words, scale, None, group_size, NIBBLE, LevelTable(table, signed))
        return planar_product(x, weight, bias, batch_invariant)
    check_lines(words, x.shape[-1], NIBBLE)
    if cpu_gemm.why_not("table_strips", x, scale, group_size):
        values = level_values(words, scale, table, group_size, x.shape[-1])
        work = torch.promote_types(x.dtype, torch.float32)
        return torch.nn.functional.linear(x.to(work), values.to(work), None if bias is None else bias.to(work)).to(x)
    flat = x.reshape(-1, x.shape[-1])
    laid = Strips(words, scale, None, group_size, NIBBLE)
    out_MN = cpu_gemm.strips(flat, laid, bias, None, batch_invariant, table=table)
    return out_MN.view(*x.shape[:-1], len(words) * ROWS)


@levels_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    table: Tensor,
    bias: Tensor | None,
    group_size: int,
    batch_invariant: bool = False,
    signed: bool = False,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], words.shape[0] * (ROWS if words.dim() == STRIPS_DIMENSIONS else 1))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, words, scale, table, _, group_size, _, signed = inputs
    ctx.save_for_backward(words, scale, table)
    ctx.layout = (group_size, x.shape[-1], signed)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return levels_gradient(grad, *ctx.saved_tensors, *ctx.layout), *(None,) * 7


levels_linear.register_autograd(_gradient, setup_context=_save)


@operator("compress::levels_gradient")
def levels_gradient(
    grad: Tensor, words: Tensor, scale: Tensor, table: Tensor, group_size: int, columns: int, signed: bool
) -> Tensor:
    """[..., K] = grad weight, in the dtype of grad [..., N]: the input gradient of `levels_linear`."""
    if words.dim() != STRIPS_DIMENSIONS:
        return planar_gradient(grad, Planar(words, scale, None, group_size, NIBBLE, LevelTable(table, signed)), columns)
    return grad @ level_values(words, scale, table, group_size, columns).to(grad.dtype)


@levels_gradient.register_fake
def _(grad: Tensor, words: Tensor, scale: Tensor, table: Tensor, group_size: int, columns: int, signed: bool) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], columns)


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, words, scale, table, group_size, _, signed = inputs
    ctx.save_for_backward(words, scale, table)
    ctx.layout = (group_size, signed)


def _gradient_of_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    group_size, signed = ctx.layout
    return levels_linear(grad, *ctx.saved_tensors, None, group_size, False, signed), *(None,) * 6


levels_gradient.register_autograd(_gradient_of_gradient, setup_context=_save_gradient)
