"""Sparse rows as torch operators: alone, or added to codes.

    sparse_linear               x times a weight that is `Entries` and nothing else
    weight_only_sparse_linear   x times the sum of a `layouts.words.Planar` and `Entries`
    strips_sparse_linear        the same of a `layouts.strips.Strips`

Like those of `ops`: weights are frozen, x gets a gradient, one path runs by device and by reasons.

    cpu      C++; beside codes one pass over both, whose sums meet before they are rounded
    triton   few tokens: the product of the codes, then a kernel that adds the entries' to it; many: blocks of the
             weight are dequantized, entries added, and multiplied by cuBLAS
    torch    the sum of both products, anywhere else

Shapes: x [..., K], M tokens once flattened, N outputs, E entries.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.errors import InputError
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.strips import ROWS, Strips, unpack_strips
from compress.kernels.layouts.words import Planar
from compress.kernels.operators import words as ops
from compress.kernels.operators.register import operator
from compress.kernels.operators.strips import check_lines, strips_gradient
from compress.kernels.operators.words import (
    HALF,
    _check_words,
    _like_product,
    _rows,
    _unpacked_product,
    _why_not_triton,
    path_of,
)

FLOATS = (*HALF, torch.float32)
# Tokens up to which the entries are added to a product by a kernel of their own.
DECODE_TOKENS = 16


def why_not_sparse(x: Tensor, value: Tensor) -> list[str]:
    """Reasons why the Triton kernels cannot multiply x by entries of these values; empty when they can."""
    reasons = [*_why_not_triton(x.device)]
    for what, dtype in (("x is", x.dtype), ("entries are", value.dtype)):
        if dtype not in FLOATS:
            reasons.append(f"{what} {dtype}; allowed: float16, bfloat16, float32")
    return reasons


def check_columns(x: Tensor, columns: int) -> None:
    """Raises InputError where x is not as wide as the weight."""
    if x.shape[-1] != columns:
        raise InputError(f"x has {x.shape[-1]} columns, the weight {columns}")


@operator("compress::sparse_linear")
def sparse_linear(
    x: Tensor, row_start: Tensor, column: Tensor, value: Tensor, bias: Tensor | None, columns: int
) -> Tensor:
    """[..., N] = x entries^T + bias, in the dtype of x. columns: K."""
    check_columns(x, columns)
    entries, x_MK = Entries(row_start, column, value), _rows(x)
    path = path_of(x.device, why_not_sparse(x, value))
    if path == "triton":
        from compress.kernels.triton.sparse_rows import sparse_product

        out_MN = sparse_product(x_MK, entries, bias)
    elif path == "cpu" and not cpu_gemm.why_not("sparse_rows", x, value):
        out_MN = cpu_gemm.sparse_rows(x_MK, entries, bias)
    else:
        out_MN = reference.sparse_rows(x_MK, *entries)
        out_MN = out_MN if bias is None else (out_MN + bias).to(x.dtype)
    return out_MN.view(*x.shape[:-1], len(row_start) - 1)


@sparse_linear.register_fake
def _(x: Tensor, row_start: Tensor, column: Tensor, value: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    torch._check(x.shape[-1] == columns, lambda: "weight and x differ in columns")
    return x.new_empty(*x.shape[:-1], row_start.shape[0] - 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *entries, _, columns = inputs
    ctx.save_for_backward(*entries)
    ctx.columns = columns


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return sparse_gradient(grad, *ctx.saved_tensors, ctx.columns), None, None, None, None, None


sparse_linear.register_autograd(_gradient, setup_context=_save)


@operator("compress::sparse_gradient")
def sparse_gradient(grad: Tensor, row_start: Tensor, column: Tensor, value: Tensor, columns: int) -> Tensor:
    """[..., K] = grad entries, in the dtype of grad [..., N]: the input gradient of `sparse_linear`."""
    entries, grad_MN = Entries(row_start, column, value), _rows(grad)
    if why_not_sparse(grad, value):
        out_MK = reference.sparse_gradient(grad_MN, *entries, columns)
    else:
        from compress.kernels.triton import sparse_rows

        out_MK = sparse_rows.input_gradient(grad_MN, entries, columns)
    return out_MK.view(*grad.shape[:-1], columns)


@sparse_gradient.register_fake
def _(grad: Tensor, row_start: Tensor, column: Tensor, value: Tensor, columns: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], columns)


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *entries, columns = inputs
    ctx.save_for_backward(*entries)
    ctx.columns = columns


def _gradient_of_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return sparse_linear(grad, *ctx.saved_tensors, None, ctx.columns), None, None, None, None


sparse_gradient.register_autograd(_gradient_of_gradient, setup_context=_save_gradient)


@operator("compress::weight_only_sparse_linear")
def weight_only_sparse_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    row_start: Tensor,
    column: Tensor,
    value: Tensor,
) -> Tensor:
    """[..., N] = x (weight + entries)^T + bias, in the dtype of x. The weight is the parts of a
    `layouts.words.Planar`."""
    _check_words(x, words, bits)
    weight, entries = Planar(words, scale, zero, group_size, bits), Entries(row_start, column, value)
    x_MK = _rows(x)
    reasons = [*ops.why_not_dequantize(x, weight), *why_not_sparse(x, value)]
    if not reasons:
        out_MN = _triton_sum(x_MK, weight, entries, bias)
    elif not cpu_gemm.why_not("weight_only", x, scale, group_size) and value.dtype in FLOATS:
        out_MN = cpu_gemm.weight_only(x_MK, weight, bias, entries)
    else:
        out_MN = _unpacked_product(x_MK, weight, bias) + reference.sparse_rows(x_MK, *entries)
    return out_MN.view(*x.shape[:-1], len(words))


def _triton_sum(x_MK: Tensor, weight: Planar, entries: Entries, bias: Tensor | None) -> Tensor:
    path, shape = ops.weight_only_path(x_MK, weight)
    if path == "triton" and len(x_MK) <= DECODE_TOKENS:
        from compress.kernels.triton.planar_gemm import planar_gemm
        from compress.kernels.triton.sparse_rows import add_product

        return add_product(x_MK, entries, planar_gemm(x_MK, weight, bias, shape))
    from compress.kernels.triton.dequantize_gemm import dequantize_gemm

    return dequantize_gemm(x_MK, weight, bias, entries)


@weight_only_sparse_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    row_start: Tensor,
    column: Tensor,
    value: Tensor,
) -> Tensor:
    return _like_product(x, words, bits)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, words, scale, zero, _, bits, group_size, *entries = inputs
    ctx.save_for_backward(words, scale, zero, *entries)
    ctx.layout = (bits, group_size, x.shape[-1])


def _sum_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    words, scale, zero, *entries = ctx.saved_tensors
    back = ops.weight_only_gradient(grad, words, scale, zero, *ctx.layout)
    return back + sparse_gradient(grad, *entries, ctx.layout[-1]), *(None,) * 9


weight_only_sparse_linear.register_autograd(_sum_gradient, setup_context=_save_sum)


@operator("compress::strips_sparse_linear")
def strips_sparse_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    row_start: Tensor,
    column: Tensor,
    value: Tensor,
) -> Tensor:
    """[..., N] = x (weight + entries)^T + bias, in the dtype of x. The weight is the parts of a `Strips`."""
    check_lines(words, x.shape[-1], bits)
    weight, entries = Strips(words, scale, zero, group_size, bits), Entries(row_start, column, value)
    if cpu_gemm.why_not("strips", x, scale, group_size) or value.dtype not in FLOATS:
        planar = unpack_strips(weight, x.shape[-1])
        return weight_only_sparse_linear(x, *planar[:3], bias, bits, group_size, *entries)
    return cpu_gemm.strips(_rows(x), weight, bias, entries=entries).view(*x.shape[:-1], len(words) * ROWS)


@strips_sparse_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    row_start: Tensor,
    column: Tensor,
    value: Tensor,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], words.shape[0] * ROWS)


def _strips_sum_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    words, scale, zero, *entries = ctx.saved_tensors
    back = strips_gradient(grad, words, scale, zero, *ctx.layout)
    return back + sparse_gradient(grad, *entries, ctx.layout[-1]), *(None,) * 9


strips_sparse_linear.register_autograd(_strips_sum_gradient, setup_context=_save_sum)
