"""The linear of rows of int8 as a torch operator: x rounded to int8 per token (or by a static scale), int8 products,
scales in the epilogue (w8a8).

Paths as in `words`, whose weights dequantize; none of these does. Sums of integers are exact, in any order.

Shapes: x [..., K], M tokens once flattened, N outputs.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu import direct
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.errors import InputError
from compress.kernels.operators.devices import MAX_INT8_COLUMNS, as_rows, path_of, shaped, why_not_floats
from compress.kernels.operators.register import gradient, operator, outputs


def why_not_w8a8(x: Tensor, weight_NK: Tensor, device: torch.device | None = None) -> list[str]:
    """Reasons why the Triton kernels cannot run w8a8 on x; empty when they can. device: in place of that of x."""
    reasons = why_not_floats(device or x.device, x=x.dtype)
    if weight_NK.shape[1] >= MAX_INT8_COLUMNS:
        reasons.append(f"{weight_NK.shape[1]} columns; int32 sums are exact below {MAX_INT8_COLUMNS}")
    return reasons


@cache
def _int_mm_is_exact() -> bool:
    """True where torch's int8 product on this CPU is exact: without VNNI, oneDNN adds pairs of products in 16 bits,
    which saturate."""
    codes = torch.full((32, 64), -128, dtype=torch.int8)
    codes[::2] = 127
    return torch.equal(torch.ops.aten._int_mm(codes, codes.t()), reference.int8_matmul(codes, codes))


def _by_cpp(x: Tensor, weight: Tensor, *others: Any) -> Tensor | None:
    """The product by `cpu.direct`; None where that has none of it."""
    weight_scale, row_sum, _, _, input_zero, symmetric = others
    if weight_scale.dtype is not torch.float32 or (row_sum is None and not (symmetric and input_zero is None)):
        return None
    product = direct.product("w8a8", x, weight.shape)
    return product and product(x, weight, *others)


@operator("compress::w8a8_linear", outputs(lambda weight, *_: weight.shape[0]), at_once=_by_cpp)
def w8a8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    row_sum: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    input_zero: Tensor | None,
    symmetric: bool,
) -> Tensor:
    """[..., N] = quantize(x) weight^T scaled + bias, in the dtype of x.

    weight int8 [N, K]; weight_scale fp32 [N]; row_sum int32 [N] = `reference.row_sums(weight)`, needed where the
    activations have a zero point. input_scale fp32 [1] and input_zero int32 [1]: static activations; without them
    every token is fitted, `symmetric` or not.
    """
    if weight.shape[1] != x.shape[-1]:
        raise InputError(f"x has {x.shape[-1]} columns, the weight {weight.shape[1]}")
    if row_sum is None and (input_zero is not None or (input_scale is None and not symmetric)):
        raise InputError("asymmetric activations need the row sums of the weight: pass reference.row_sums(weight)")
    x_MK = as_rows(x)
    path = path_of(x.device, why_not_w8a8(x, weight))
    if path == "cpu" and not cpu_gemm.why_not("w8a8", x, weight_scale):
        out_MN = cpu_gemm.w8a8(x_MK, weight, weight_scale, row_sum, bias, input_scale, input_zero, symmetric)
        return shaped(out_MN, x)
    quantize_static, quantize_tokens = reference.quantize_static, reference.quantize_tokens
    if path == "triton":
        from compress.kernels.triton.int8_quantize import quantize_static, quantize_tokens
    if input_scale is not None:
        codes_MK, scale, zero = quantize_static(x_MK, input_scale, input_zero), input_scale, input_zero
    else:
        codes_MK, scale, zero = quantize_tokens(x_MK, symmetric)
    if path == "triton":
        from compress.kernels.triton.int8_gemm import w8a8_gemm

        out_MN = w8a8_gemm(codes_MK, scale, zero, weight, weight_scale, row_sum, bias, x.dtype)
    else:
        exact = path == "cpu" and _int_mm_is_exact()
        product = torch.ops.aten._int_mm(codes_MK, weight.t()) if exact else reference.int8_matmul(codes_MK, weight)
        out_MN = reference.rescale(product, scale, weight_scale, zero, row_sum, bias, x.dtype)
    return shaped(out_MN, x)


@gradient(w8a8_linear)
def _(grad: Tensor, shape: tuple[int, ...], weight: Tensor, weight_scale: Tensor, *_: Any) -> Tensor:
    dense_NK = weight.to(torch.float32) * weight_scale.unsqueeze(-1)
    return grad @ dense_NK.to(grad.dtype)
