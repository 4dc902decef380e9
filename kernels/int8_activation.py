"""Weights in planar words times inputs that are rounded to int8, as a torch operator (w4a8), and beside inputs as they
are (`planar_linear`). Shapes, gradients and paths are those of `ops`.
"""

from typing import Any

import torch
from torch import Tensor

from compress.errors import InputError
from compress.kernels import ops, reference
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.operators import operator
from compress.kernels.ops import (
    _check_words,
    _like_product,
    _parts,
    _rows,
    _save_weight_only,
    _shaped,
    _weight_only_gradient,
)
from compress.kernels.pack import Planar, unpack_planar


def why_not_input_group(input_group: int) -> list[str]:
    """Reasons why activations cannot be fitted to blocks of so many columns; empty when they can."""
    step = cpu_gemm.INPUT_GROUP_STEP
    if input_group == -1 or (input_group > 0 and input_group % step == 0):
        return []
    return [f"input group {input_group}; allowed: multiples of {step}, -1 (one scale per token)"]


@operator("compress::int8_activation_linear")
def int8_activation_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    input_group: int,
    batch_invariant: bool = False,
) -> Tensor:
    """[..., N] = quantize(x) weight^T + bias, in the dtype of x. The weight is the parts of a `pack.Planar`.

    x becomes int8, symmetric, fitted to every token, or to every token and block of `input_group` columns.
    batch_invariant: as in `ops`; the reference, whose integers are exact and whose scales are multiplied one by one, is
    that anyway.
    """
    _check_words(x, words, bits)
    reasons = why_not_input_group(input_group)
    if reasons:
        raise InputError(reasons[0])
    weight = Planar(words, scale, zero, group_size, bits)
    x_MK = _rows(x)
    if not cpu_gemm.why_not("int8_activation", x, scale, group_size):
        out_MN = cpu_gemm.int8_activation(x_MK, weight, bias, input_group, batch_invariant)
    else:
        out_MN = x_MK.new_empty(len(x_MK), len(words))
        for rows, part in _parts(weight, x_MK.shape[1]):
            middle = torch.full_like(part.scale, 2 ** (bits - 1)) if part.zero is None else part.zero
            codes_NK = unpack_planar(part.words, bits, x_MK.shape[1])
            added = None if bias is None else bias[rows]
            out_MN[:, rows] = reference.int8_activation(x_MK, codes_NK, part.scale, middle, added, input_group)
    return _shaped(out_MN, x)


@int8_activation_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    input_group: int,
    batch_invariant: bool = False,
) -> Tensor:
    return _like_product(x, words, bits)


def _save_int8_activation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save_weight_only(ctx, inputs, output)


def _int8_activation_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_weight_only_gradient(ctx, grad), None


int8_activation_linear.register_autograd(_int8_activation_gradient, setup_context=_save_int8_activation)


def planar_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    input_group: int | None,
    batch_invariant: bool = False,
) -> Tensor:
    """[..., N] = x weight^T + bias by the operator for such inputs: as they are (None), or rounded to int8, per token
    (-1) or per token and so many columns."""
    weight = (words, scale, zero, bias, bits, group_size)
    if input_group is None:
        return ops.weight_only_linear(x, *weight, batch_invariant)
    return int8_activation_linear(x, *weight, input_group, batch_invariant)
