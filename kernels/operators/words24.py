"""The linear of 4-bit 2:4 weights as a torch operator: x times a weight in the words of `layouts.words24.Sparse24`.

Like those of `ops`: a Triton path and a reference, chosen by `why_not_sparse24`; a CPU has another layout (`strips24`).
Weights are frozen, only x gets a gradient. The reference makes a block of rows dense at a time. Shapes: x [..., K],
M tokens once flattened, N outputs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compress.kernels.errors import InputError
from compress.kernels.layouts.words import PLANE
from compress.kernels.layouts.words24 import QUAD, Words24, blocks_of, quad_planar, sparse24_weight
from compress.kernels.operators.blocks import gradient_of_blocks, product_of_blocks, row_blocks
from compress.kernels.operators.register import operator
from compress.kernels.operators.words import HALF, _rows, _why_not_triton


def why_not_sparse24(x: Tensor, weight: Words24) -> list[str]:
    """Reasons why the Triton kernel cannot multiply x by this weight; empty when it can."""
    reasons = [*_why_not_triton(x.device)]
    if x.dtype not in HALF:
        reasons.append(f"x is {x.dtype}; allowed: float16, bfloat16")
    if weight.scale.dtype != x.dtype:
        reasons.append(f"scales are {weight.scale.dtype}, x is {x.dtype}; lay the weight out for the dtype of x")
    if weight.group_size != -1 and weight.group_size % QUAD:
        reasons.append(f"group size {weight.group_size}; allowed: multiples of {QUAD}, -1 (one scale per channel)")
    return reasons


def _blocks(weight: Words24, columns: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their values) of a weight, by torch alone: a gradient is traced through it."""
    for rows in row_blocks(len(weight.codes), columns):
        zero = None if weight.zero is None else weight.zero[:, rows]
        part = Words24(weight.codes[rows], weight.kept[rows], weight.scale[:, rows], zero, weight.group_size)
        yield rows, sparse24_weight(part, columns)


@operator("compress::sparse24_linear")
def sparse24_linear(
    x: Tensor, codes: Tensor, kept: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x. The weight is the parts of a `Words24`."""
    columns = x.shape[-1]
    if kept.shape[1] != blocks_of(columns) * PLANE:
        raise InputError(f"x has {columns} columns; {kept.shape[1]} words of kept bits do not hold as many")
    weight = Words24(codes, kept, scale, zero, group_size)
    x_MK = _rows(x)
    if not why_not_sparse24(x, weight):
        from compress.kernels.triton.sparse24_gemm import sparse24_gemm

        out_MN = sparse24_gemm(quad_planar(x_MK), columns, weight, bias)
    else:
        out_MN = product_of_blocks(x_MK, _blocks(weight, columns), len(codes), bias)
    return out_MN.view(*x.shape[:-1], len(codes))


@sparse24_linear.register_fake
def _(
    x: Tensor, codes: Tensor, kept: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    torch._check(kept.shape[1] == blocks_of(x.shape[-1]) * PLANE, lambda: "words do not hold as many columns as x")
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, codes, kept, scale, zero, _, group_size = inputs
    ctx.save_for_backward(codes, kept, scale, zero)
    ctx.layout = (group_size, x.shape[-1])


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    codes, kept, scale, zero = ctx.saved_tensors
    group_size, columns = ctx.layout
    blocks = _blocks(Words24(codes, kept, scale, zero, group_size), columns)
    return gradient_of_blocks(grad, blocks, columns), *(None,) * 6


sparse24_linear.register_autograd(_gradient, setup_context=_save)
