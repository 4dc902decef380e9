"""Every kernel's result in plain torch: the truth the kernels are tested against, and the path of last resort.

Shapes: M tokens, N outputs, K inputs, G groups of K / G consecutive inputs (G = 1: one scale per output channel).

    weight only   out = x (codes - zero)^T scale + bias            codes of 2 to 8 bits, dequantized, then multiplied
    int8 acts     the same with x rounded to int8                  per segment: exact int32 times both scales, in fp32
    w8a8          acc = x_codes w_codes^T                          int8 x int8 -> int32, exact
                  out = x_scale_m w_scale_n (acc_mn - x_zero_m row_sum_n) + bias_n,   row_sum_n = sum_k w_codes_nk

The zero point of the activations costs one row sum per output channel, computed once from the weights, because
sum_k (x - x_zero) w = sum_k x w - x_zero sum_k w.
"""

from collections.abc import Iterator
from math import gcd

import torch
from torch import Tensor

from compress.kernels.division import divide

INT8_MIN, INT8_MAX = -128, 127
INT8_STEPS = INT8_MAX - INT8_MIN
# A symmetric grid spreads the largest magnitude over 127.5 steps, as `weights.grid` does for a whole int8 range.
INT8_HALF_RANGE = INT8_STEPS / 2
ROUNDING_WIDTH = 4
# Rows of a sparse weight that are made dense at a time.
SPARSE_ROWS = 256


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def dequantize(codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None = None) -> Tensor:
    """[N, K] values (codes - zero) * scale, the product rounded once, to the dtype of the scale.

    codes: integers. scale [N, G] or [1, 1]; zero of the same shape, any integer dtype. G divides K.
    """
    rows, columns = codes_NK.shape
    groups = codes_NK.reshape(rows, scale_NG.shape[-1], -1).to(scale_NG.dtype)
    if zero_NG is not None:
        groups = groups - zero_NG.unsqueeze(-1).to(scale_NG.dtype)
    return (groups * scale_NG.unsqueeze(-1)).reshape(rows, columns)


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """[..., N] x weight^T + bias: fp32 products and sums (fp64 for fp64 input), rounded once to the dtype of x."""
    work = _accumulator(x_MK.dtype)
    out = x_MK.to(work) @ weight_NK.to(work).t()
    if bias_N is not None:
        out = out + bias_N.to(work)
    return out.to(x_MK.dtype)


def weight_only(
    x_MK: Tensor,
    codes_NK: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor | None = None,
    bias_N: Tensor | None = None,
) -> Tensor:
    """w4a16, w8a16 and every other width: multiply by the dequantized weight. Result in the dtype of x."""
    return linear(x_MK, dequantize(codes_NK, scale_NG, zero_NG), bias_N)


def _sparse_blocks(
    row_start_N: Tensor, column_E: Tensor, value_E: Tensor, columns: int, work: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their values [R, columns] in `work`) of a weight that is E values, a block of rows at a time."""
    starts, N = row_start_N.tolist(), len(row_start_N) - 1
    for first in range(0, N, SPARSE_ROWS):
        rows = slice(first, min(first + SPARSE_ROWS, N))
        counts = row_start_N[rows.start : rows.stop + 1].long().diff()
        row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        part = slice(starts[rows.start], starts[rows.stop])
        block_RK = torch.zeros(len(counts), columns, dtype=work, device=value_E.device)
        block_RK.index_put_((row, column_E[part].long()), value_E[part].to(work), accumulate=True)
        yield rows, block_RK


def sparse_rows(x: Tensor, row_start_N: Tensor, column_E: Tensor, value_E: Tensor) -> Tensor:
    """[..., N] x W^T of a weight that is E values, of row n those from row_start[n] to row_start[n + 1]; fp32 products
    and sums (fp64 for fp64 input), rounded once to the dtype of x. A block of rows is made dense at a time."""
    work = _accumulator(x.dtype)
    out = x.new_empty(*x.shape[:-1], len(row_start_N) - 1)
    for rows, block_RK in _sparse_blocks(row_start_N, column_E, value_E, x.shape[-1], work):
        out[..., rows] = (x.to(work) @ block_RK.t()).to(x.dtype)
    return out


def sparse_gradient(grad: Tensor, row_start_N: Tensor, column_E: Tensor, value_E: Tensor, columns: int) -> Tensor:
    """[..., columns] grad W of such a weight, as `sparse_rows` computes: the gradient of its input."""
    work = _accumulator(grad.dtype)
    sums = torch.zeros(*grad.shape[:-1], columns, dtype=work, device=grad.device)
    for rows, block_RK in _sparse_blocks(row_start_N, column_E, value_E, columns, work):
        sums += grad[..., rows].to(work) @ block_RK
    return sums.to(grad.dtype)


def tolerance(x_MK: Tensor, weight_NK: Tensor, out_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] the largest distance of a correct kernel's result from `out`, the exact product.

    K products are summed in fp32, in any order, each sum off by at most one unit in the last place (matrix units
    truncate): K eps32 (|x| |weight|^T). The result is rounded once to `dtype`, at worst by truncation: eps |out|.
    All arguments fp64; `weight` holds the values that the kernel multiplies by.
    """
    sums = x_MK.shape[-1] * torch.finfo(torch.float32).eps * (x_MK.abs() @ weight_NK.abs().t())
    return sums + torch.finfo(dtype).eps * out_MN.abs() + torch.finfo(dtype).tiny


def weight_rounding(x_MK: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] the addition to `tolerance` for a kernel that rounds its weights to `dtype`, or does not where `weight` is
    rounded.

    A weight is off by half a unit in the last place, evenly spread: a standard deviation of eps / sqrt(12) of it. The
    sum of K of them is within ROUNDING_WIDTH eps sqrt(x^2 weight^2), fourteen times its own. Arguments fp64.
    """
    return ROUNDING_WIDTH * torch.finfo(dtype).eps * (x_MK.square() @ weight_NK.square().t()).sqrt()


def quantize_tokens(x_MK: Tensor, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes int8 [M, K], scale fp32 [M], zero int32 [M] or None): one scale per row, fitted to the row.

    The values are those of `weights.grid` for 8 bits per token: ties to even, out of range saturates, a row of zeros
    has the smallest normal scale and codes equal to its zero point.
    """
    x = x_MK.to(torch.float32)
    tiny = torch.finfo(torch.float32).tiny
    lo, hi = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    zero = torch.zeros_like(lo)
    if symmetric:
        scale = divide(torch.maximum(-lo, hi), INT8_HALF_RANGE).clamp(min=tiny)
    else:
        scale = divide(hi - lo, INT8_STEPS).clamp(min=tiny)
        zero = torch.round(INT8_MIN - lo / scale).clamp(INT8_MIN, INT8_MAX)
    codes = (torch.round(x / scale.unsqueeze(-1)) + zero.unsqueeze(-1)).clamp(INT8_MIN, INT8_MAX)
    return codes.to(torch.int8), scale, None if symmetric else zero.to(torch.int32)


def quantize_static(x_MK: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """int8 codes [M, K] by a scale fp32 [1] and a zero point int32 [1] that calibration has fixed."""
    codes = torch.round(x_MK.to(torch.float32) / scale)
    if zero is not None:
        codes = codes + zero
    return codes.clamp(INT8_MIN, INT8_MAX).to(torch.int8)


def quantize_token_blocks(x_MK: Tensor, input_group: int) -> tuple[Tensor, Tensor]:
    """(codes int8 [M, K], scale fp32 [M, B]): `quantize_tokens` on blocks of columns; the last may be shorter."""
    columns = x_MK.shape[1]
    width = columns if input_group == -1 else input_group
    blocks = [quantize_tokens(x_MK[:, start : start + width]) for start in range(0, columns, width)]
    return torch.cat([codes for codes, _, _ in blocks], 1), torch.stack([scale for _, scale, _ in blocks], 1)


def row_sums(weight_NK: Tensor) -> Tensor:
    """int32 [N]: the sum of each row of int8 weight codes."""
    return weight_NK.sum(-1, dtype=torch.int32)


def int8_matmul(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """int32 [M, N] = x weight^T of integer codes, exact for int8 and K < 2^17 (where the sum could leave int32).

    fp64 holds every partial sum exactly and runs on every device, unlike an integer matrix product.
    """
    return (x_MK.to(torch.float64) @ weight_NK.to(torch.float64).t()).to(torch.int32)


def int8_activation(
    x_MK: Tensor,
    codes_NK: Tensor,
    scale_GN: Tensor,
    zero_GN: Tensor,
    bias_N: Tensor | None = None,
    input_group: int = -1,
) -> Tensor:
    """[M, N] in the dtype of x, which is rounded to int8 per token, or per token and `input_group` columns.

    codes of the weight unsigned, below 2^8. A segment is a run of columns with one scale on either side.
    """
    columns = x_MK.shape[1]
    group = columns // len(scale_GN)
    x_codes_MK, x_scale_MB = quantize_token_blocks(x_MK, input_group)
    width = columns if input_group == -1 else input_group
    segment = gcd(group, width)
    out_MN = torch.zeros(len(x_MK), len(codes_NK), dtype=torch.float32, device=x_MK.device)
    for start in range(0, columns, segment):
        part, g = slice(start, start + segment), start // group
        weight = codes_NK[:, part].to(torch.int16) - zero_GN[g].to(torch.int16).unsqueeze(-1)
        sums = int8_matmul(x_codes_MK[:, part], weight).to(torch.float32)
        out_MN += sums * x_scale_MB[:, start // width].unsqueeze(-1) * scale_GN[g].to(torch.float32)
    if bias_N is not None:
        out_MN += bias_N.to(torch.float32)
    return out_MN.to(x_MK.dtype)


def rescale(
    sums_MN: Tensor,
    x_scale_M: Tensor,
    weight_scale_N: Tensor,
    x_zero_M: Tensor | None,
    row_sum_N: Tensor | None,
    bias_N: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The w8a8 epilogue: int32 sums [M, N] to `dtype`. x_scale and x_zero may be [1] (static, per tensor)."""
    if x_zero_M is not None:
        assert row_sum_N is not None
        sums_MN = sums_MN - x_zero_M.to(torch.int32).unsqueeze(-1) * row_sum_N
    out = sums_MN.to(torch.float32) * x_scale_M.to(torch.float32).unsqueeze(-1) * weight_scale_N.to(torch.float32)
    if bias_N is not None:
        out = out + bias_N.to(torch.float32)
    return out.to(dtype)


def w8a8(
    x_MK: Tensor,
    x_scale_M: Tensor,
    x_zero_M: Tensor | None,
    weight_NK: Tensor,
    weight_scale_N: Tensor,
    bias_N: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[M, N] from int8 activations and int8 weights (symmetric, one scale per output channel)."""
    row_sum_N = None if x_zero_M is None else row_sums(weight_NK)
    return rescale(int8_matmul(x_MK, weight_NK), x_scale_M, weight_scale_N, x_zero_M, row_sum_N, bias_N, dtype)
