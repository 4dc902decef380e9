"""Weights in planar words times inputs that are rounded to int8, as a torch operator (w4a8), and beside inputs as they
are (`planar_linear`). Shapes and gradients are those of `ops`, and three of its paths, none of which dequantizes:

    triton       `triton.int8_planar_gemm`, where `why_not_int8` has nothing against it
    cpu          `cpu_gemm`, where it is compiled and takes the sizes
    reference    plain torch: exact sums of integers in fp64, scaled one by one
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.errors import InputError
from compress.kernels.layouts.words import Planar, planar_block, unpack_planar
from compress.kernels.operators import words as ops
from compress.kernels.operators.register import operator
from compress.kernels.operators.words import (
    MAX_INT8_COLUMNS,
    _check_words,
    _like_product,
    _parts,
    _rows,
    _save_weight_only,
    _shaped,
    _weight_only_gradient,
    path_of,
    why_not_dequantize,
    why_not_groups,
)
from compress.kernels.tuning.choose import choose_shape, device_of, invariant, kind_of
from compress.kernels.tuning.table import Shape


def why_not_input_group(input_group: int) -> list[str]:
    """Reasons why activations cannot be fitted to blocks of so many columns; empty when they can."""
    step = cpu_gemm.INPUT_GROUP_STEP
    if input_group == -1 or (input_group > 0 and input_group % step == 0):
        return []
    return [f"input group {input_group}; allowed: multiples of {step}, -1 (one scale per token)"]


def why_not_int8(x: Tensor, weight: Planar) -> list[str]:
    """Reasons why the Triton kernel cannot multiply x, rounded to int8, by this weight; empty when it can."""
    reasons = why_not_dequantize(x, weight)  # of types and the device
    if weight.zero is not None and planar_block(weight.bits) != planar_block(4):
        reasons.append("codes of 8 bits less a zero point do not fit int8")
    if x.shape[-1] >= MAX_INT8_COLUMNS:
        reasons.append(f"{x.shape[-1]} columns; int32 sums are exact below {MAX_INT8_COLUMNS}")
    return reasons + why_not_groups(weight)


def _configuration(x_MK: Tensor, weight: Planar, batch_invariant: bool) -> Shape:
    kind = kind_of("int8_activation", weight.bits, weight.group_size, weight.zero is not None, x_MK.dtype)
    sizes = (len(weight.words), x_MK.shape[1], device_of(x_MK.device))
    return invariant(kind, *sizes) if batch_invariant else choose_shape(kind, len(x_MK), *sizes)


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
    """[..., N] = quantize(x) weight^T + bias, in the dtype of x. The weight is the parts of a `layouts.words.Planar`.

    x becomes int8, symmetric, fitted to every token, or to every token and block of `input_group` columns.
    batch_invariant: as in `ops`, by every path.
    """
    _check_words(x, words, bits)
    reasons = why_not_input_group(input_group)
    if reasons:
        raise InputError(reasons[0])
    weight = Planar(words, scale, zero, group_size, bits)
    x_MK = _rows(x)
    path = path_of(x.device, why_not_int8(x, weight))
    if path == "triton":
        from compress.kernels.triton.int8_planar_gemm import int8_planar_gemm

        out_MN = int8_planar_gemm(x_MK, weight, bias, input_group, _configuration(x_MK, weight, batch_invariant))
    elif path == "cpu" and not cpu_gemm.why_not("int8_activation", x, scale, group_size):
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


def _int8_activation_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_weight_only_gradient(ctx, grad), None


int8_activation_linear.register_autograd(_int8_activation_gradient, setup_context=_save_weight_only)


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
