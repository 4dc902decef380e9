"""w8a8 in float8 e4m3: x rounded to float8 per token or by a static scale, float8 products, scales in the epilogue.

    scale_m = max|x_m| / 448        x_codes = e4m3(x / scale_m), saturating        (`weights.grid`, a float grid)
    out = x_scale_m w_scale_n sum_k x_codes_mk w_codes_nk + bias_n

Shapes: M tokens, N outputs, K inputs. A product of two codes has eight significant bits: exact in float32, and the sum
of up to 2^16 of them is exact in float64. Two paths, the same numbers up to the order of the sums:

    scaled_mm    torch's product of float8 matrices, on GPUs that have one (`why_not_fp8`). bfloat16 outputs take both
                 scales in its epilogue; others take unit scales, float32 sums and the epilogue of `rescale`
    torch        anywhere: blocks of rows of the weight in float32 and bounded memory, then torch's own product

Given up: fast accumulation, which Hopper's tensor cores do in fewer bits than float32. Within an instruction they have
about 14 bits in any case (`fp8_blocks.SHORT_SUMS`).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from compress.kernels.division import divide
from compress.kernels.errors import InputError
from compress.kernels.operators.register import gradient, operator, outputs
from compress.kernels.reference import rescale

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
OLDEST_CAPABILITY = (8, 9)
# cuBLAS and CUTLASS read rows of float8 in units of 16 bytes.
MULTIPLE = 16
TYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT16_SHIFT, FLOAT16_TOP_EXPONENT, BIAS_DIFFERENCE = 7, 1 << 14, 8
# What a block of rows may take as float32.
BLOCK_BYTES = 4 * 2**20


def quantize_tokens(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(codes float8 [M, K], scale fp32 [M]): one scale per row, fitted to it. A row of zeros has zero codes."""
    x = x_MK.to(torch.float32)
    scale = divide(x.abs().amax(-1), E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return _encode(x, scale.unsqueeze(-1)), scale


def quantize_static(x_MK: Tensor, scale: Tensor) -> Tensor:
    """float8 codes [M, K] by a scale fp32 [1] that calibration has fixed."""
    return _encode(x_MK.to(torch.float32), scale)


def _encode(x: Tensor, scale: Tensor) -> Tensor:
    # Clamped first: a conversion beyond 448 is NaN on some devices.
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def values(codes: Tensor) -> Tensor:
    """float32 values of finite float8 codes.

    On a CPU by the bits, ten times as fast as torch converts one by one: s eeee mmm is the float16 s 0eeee mmm0000000
    but for the bias of the exponent, 15 instead of 7.
    """
    if codes.device.type != "cpu":
        return codes.to(torch.float32)
    bits = codes.view(torch.int8).to(torch.int16) << FLOAT16_SHIFT  # the sign is in bits 15 and 14
    return (bits & ~FLOAT16_TOP_EXPONENT).view(torch.float16).to(torch.float32).mul_(2.0**BIAS_DIFFERENCE)


@cache
def _why_not_device(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return (f"the device is {device.type}, not cuda",)
    if torch.version.hip is not None:
        return ("ROCm multiplies another kind of float8",)
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return (f"compute capability {capability[0]}.{capability[1]}; float8 products need 8.9",)
    return ()


def why_not_fp8(x: Tensor, weight_NK: Tensor) -> list[str]:
    """Reasons why x cannot be multiplied by this weight as float8; empty when it can."""
    reasons = [*_why_not_device(x.device)]
    if x.dtype not in TYPES:
        reasons.append(f"x is {x.dtype}; allowed: float32, float16, bfloat16")
    for what, size in zip(("outputs", "inputs"), weight_NK.shape, strict=True):
        if size % MULTIPLE:
            reasons.append(f"{size} {what}; float8 products need a multiple of {MULTIPLE}")
    return reasons


def scaled_product(
    codes_MK: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale_N: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[M, N] in `dtype` by torch's product of float8 matrices. scale fp32 [M] or [1]."""
    weight_KN = weight_NK.t()
    if dtype != torch.bfloat16:
        one = torch.ones(1, device=scale.device)
        tensor = ScalingType.TensorWise
        sums_MN = scaled_mm(codes_MK, weight_KN, one, tensor, one, tensor, output_dtype=torch.float32)
        return rescale(sums_MN, scale, weight_scale_N, None, None, bias, dtype)
    rows = scale.expand(len(codes_MK)).contiguous().unsqueeze(-1)
    row = ScalingType.RowWise
    added = None if bias is None else bias.to(dtype)
    return scaled_mm(codes_MK, weight_KN, rows, row, weight_scale_N.unsqueeze(0), row, bias=added, output_dtype=dtype)


def blocked_product(
    codes_MK: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale_N: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[M, N] in `dtype` by float32 products, a block of the weight's rows at a time. scale fp32 [M] or [1]."""
    x_MK = values(codes_MK)
    rows, columns = weight_NK.shape
    out_MN = torch.empty(len(x_MK), rows, dtype=dtype, device=x_MK.device)
    most = max(1, BLOCK_BYTES // (torch.float32.itemsize * columns))
    for start in range(0, rows, most):
        part = slice(start, start + most)
        sums = x_MK @ values(weight_NK[part]).t()
        added = None if bias is None else bias[part]
        out_MN[:, part] = rescale(sums, scale, weight_scale_N[part], None, None, added, dtype)
    return out_MN


def reference(
    codes_MK: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale_N: Tensor, bias: Tensor | None = None
) -> Tensor:
    """[M, N] float64: exact sums, then the scales. The truth of both paths."""
    sums_MN = codes_MK.to(torch.float64) @ weight_NK.to(torch.float64).t()
    out_MN = sums_MN * scale.to(torch.float64).unsqueeze(-1) * weight_scale_N.to(torch.float64)
    return out_MN if bias is None else out_MN + bias.to(torch.float64)


@operator("compress::fp8_linear", outputs(lambda weight, *_: weight.shape[0]))
def fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None
) -> Tensor:
    """[..., N] = quantize(x) weight^T scaled + bias, in the dtype of x.

    weight uint8 [N, K], the bytes of float8 codes: a tensor of bytes can be copied, compared and converted like any.
    weight_scale fp32 [N]; input_scale fp32 [1]: static; without it every token is fitted.
    """
    if weight.shape[1] != x.shape[-1]:
        raise InputError(f"x has {x.shape[-1]} columns, the weight {weight.shape[1]}")
    if weight.dtype != torch.uint8:
        raise InputError(f"the weight is {weight.dtype}; allowed: uint8, the bytes of float8 codes")
    x_MK = x.reshape(-1, x.shape[-1])
    if input_scale is None:
        codes_MK, scale = quantize_tokens(x_MK)
    else:
        codes_MK, scale = quantize_static(x_MK, input_scale), input_scale
    fast = len(x_MK) > 0 and not why_not_fp8(x, weight)
    product = scaled_product if fast else blocked_product
    out_MN = product(codes_MK, scale, weight.view(E4M3), weight_scale, bias, x.dtype)
    return out_MN.view(*x.shape[:-1], len(weight))


@gradient(fp8_linear)
def _(grad: Tensor, shape: tuple[int, ...], weight: Tensor, weight_scale: Tensor, *_: Any) -> Tensor:
    """Straight through the rounding of x."""
    dense_NK = weight.view(E4M3).to(torch.float32) * weight_scale.unsqueeze(-1)
    return grad @ dense_NK.to(grad.dtype)
