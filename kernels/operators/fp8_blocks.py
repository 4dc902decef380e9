"""w8a8 in float8 e4m3 with scales of blocks (`scale_blocks`), as DeepSeek-V3 multiplies (arXiv 2412.19437, 3.3).

    x_scale_mb = max|x_m| / 448 over the columns of block b      x_codes = e4m3(x / x_scale), saturating
    out_mn = sum_b x_scale_mb w_scale_[n / 128],b sum_{k in b} x_codes_mk w_codes_nk + bias_n

Shapes: M tokens, N outputs, K inputs, B = ceil(K / 128) blocks of columns. Two paths, the same numbers up to the order
of the sums:

    triton       on GPUs that multiply float8 (compute capability 8.9), and under the interpreter: the sums of each
                 block of columns apart, then scaled and added in float32 (`triton/fp8_block_gemm.py`)
    torch        anywhere: blocks of rows of the weight in float32 and bounded memory, then torch's own product
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.division import divide
from compress.kernels.errors import InputError
from compress.kernels.layouts.scale_blocks import BLOCK, INPUT_BLOCK, WEIGHT_BLOCK, blocked, blocks_of, multiply_
from compress.kernels.operators import fp8
from compress.kernels.operators.devices import why_not_triton
from compress.kernels.operators.register import gradient, operator, outputs

# Of a sum of 128 products on a GPU, whose tensor cores keep about 14 bits of float8 sums (DeepSeek-V3, 3.3.2).
SHORT_SUMS = 2.0**-13


def quantize_token_blocks(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(codes float8 [M, K], scale fp32 [M, B]): one scale per row and 128 columns. Zeros alone have zero codes."""
    blocks_MBC = blocked(x_MK.to(torch.float32), INPUT_BLOCK)
    scale = divide(blocks_MBC.abs().amax(-1), fp8.E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    codes = fp8._encode(blocks_MBC, scale.unsqueeze(-1)).flatten(1)
    return codes[:, : x_MK.shape[1]], scale


def dequantized(weight_NK: Tensor, scale: Tensor, rows: slice) -> Tensor:
    """float32 values of some rows of a float8 weight, which begin where a block does."""
    of_blocks = scale[rows.start // BLOCK : -(-rows.stop // BLOCK)]
    return multiply_(fp8.values(weight_NK[rows]), of_blocks.to(torch.float32), WEIGHT_BLOCK)


def why_not_fp8_blocks(x: Tensor) -> list[str]:
    """Reasons why the Triton kernel cannot multiply x by a weight of blocks; empty when it can."""
    reasons = [*why_not_triton(x.device)]
    if x.device.type == "cuda":
        reasons += [reason for reason in fp8._why_not_device(x.device) if reason not in reasons]
    if x.dtype not in fp8.TYPES:
        reasons.append(f"x is {x.dtype}; allowed: float32, float16, bfloat16")
    if x.shape[-1] % fp8.MULTIPLE:
        reasons.append(f"{x.shape[-1]} inputs; float8 products need a multiple of {fp8.MULTIPLE}")
    return reasons


def blocked_product(
    codes_MK: Tensor, scale_MB: Tensor, weight_NK: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[M, N] in `dtype` by float32 products, blocks of the weight's rows at a time."""
    x_MK = multiply_(fp8.values(codes_MK), scale_MB, INPUT_BLOCK)
    N, columns = weight_NK.shape
    out_MN = torch.empty(len(x_MK), N, dtype=dtype, device=x_MK.device)
    most = max(1, fp8.BLOCK_BYTES // (torch.float32.itemsize * columns * BLOCK)) * BLOCK
    for start in range(0, N, most):
        rows = slice(start, min(start + most, N))
        sums = x_MK @ dequantized(weight_NK, weight_scale, rows).t()
        out_MN[:, rows] = sums if bias is None else sums + bias[rows].to(torch.float32)
    return out_MN


def reference(
    codes_MK: Tensor, scale_MB: Tensor, weight_NK: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """[M, N] float64: the sums of each block of columns, then the scales. The truth of both paths."""
    (M, K), N = codes_MK.shape, len(weight_NK)
    out_MN = torch.zeros(M, N, dtype=torch.float64, device=codes_MK.device)
    by_row_NB = weight_scale.to(torch.float64).repeat_interleave(BLOCK, 0)[:N]
    for b in range(-(-K // BLOCK)):
        part = slice(b * BLOCK, (b + 1) * BLOCK)
        sums_MN = codes_MK[:, part].to(torch.float64) @ weight_NK[:, part].to(torch.float64).t()
        out_MN += sums_MN * scale_MB[:, b, None].to(torch.float64) * by_row_NB[:, b]
    return out_MN if bias is None else out_MN + bias.to(torch.float64)


@operator("compress::fp8_block_linear", outputs(lambda weight, *_: weight.shape[0]))
def fp8_block_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """[..., N] = quantize(x) weight^T scaled + bias, in the dtype of x; every token is fitted, 128 columns at a time.

    weight uint8 [N, K], the bytes of float8 codes; weight_scale [ceil(N / 128), ceil(K / 128)], any float.
    """
    if weight.shape[1] != x.shape[-1]:
        raise InputError(f"x has {x.shape[-1]} columns, the weight {weight.shape[1]}")
    if weight.dtype != torch.uint8:
        raise InputError(f"the weight is {weight.dtype}; allowed: uint8, the bytes of float8 codes")
    wanted = blocks_of(weight.shape, WEIGHT_BLOCK)
    if weight_scale.shape != wanted:
        raise InputError(f"the scales are {tuple(weight_scale.shape)}; a weight {tuple(weight.shape)} has {wanted}")
    x_MK = x.reshape(-1, x.shape[-1])
    codes_NK = weight.view(fp8.E4M3)
    if not why_not_fp8_blocks(x):
        from compress.kernels.triton.fp8_block_gemm import fp8_block_gemm, quantize_blocks

        out_MN = fp8_block_gemm(*quantize_blocks(x_MK), codes_NK, weight_scale, bias, x.dtype)
    else:
        out_MN = blocked_product(*quantize_token_blocks(x_MK), codes_NK, weight_scale, bias, x.dtype)
    return out_MN.view(*x.shape[:-1], len(weight))


@gradient(fp8_block_linear)
def _(grad: Tensor, shape: tuple[int, ...], weight: Tensor, weight_scale: Tensor, *_: Any) -> Tensor:
    """Straight through the rounding of x."""
    dense_NK = dequantized(weight.view(fp8.E4M3), weight_scale, slice(0, len(weight)))
    return grad @ dense_NK.to(grad.dtype)
