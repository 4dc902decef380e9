"""A layer's output rounded to 8 bits by fixed scales, as an operator: the input of the next integer layer.

    codes = clamp(round(y / s_n) + z_n)        out = (codes - z_n) s_n        int8, in float32
    codes = e4m3(y / s_n), saturating          out = codes s_n                float8

Shapes: y [..., N]; one scale per output, so that stacked layers with ranges of their own stay one product. Given up: an
epilogue of the product's kernel, which would save reading and writing y once more.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.errors import InputError
from compress.kernels.operators import fp8
from compress.kernels.operators.register import gradient, operator


@operator("compress::round_output", lambda y, *_: torch.empty_like(y))
def round_output(y: Tensor, scale: Tensor, zero: Tensor | None, floating: bool) -> Tensor:
    """y [..., N] rounded, in its own dtype. scale fp32 [N]; zero int32 [N], of int8 codes only; floating: float8 codes.

    The gradient is straight through: as if nothing were rounded.
    """
    if len(scale) != y.shape[-1]:
        raise InputError(f"y has {y.shape[-1]} columns, there are {len(scale)} scales")
    if floating:
        values = fp8.values(fp8.quantize_static(y, scale))
    else:
        values = reference.quantize_static(y, scale, zero).to(torch.float32)
        if zero is not None:
            values -= zero
    return (values * scale).to(y.dtype)


@gradient(round_output)
def _(grad: Tensor, *_: Any) -> Tensor:
    return grad
