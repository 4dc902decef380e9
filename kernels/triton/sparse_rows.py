"""Products with sparse rows on a GPU: few tokens by `sparse_kernels`, many and gradients by dense blocks and cuBLAS."""

from functools import partial

import torch
from torch import Tensor

from compress.kernels.layouts.entries import Entries
from compress.kernels.triton.dequantize_gemm import block_gradient, block_product
from compress.kernels.triton.sparse_kernels import MAX_BLOCK_M, add_entries, add_product

__all__ = ["add_product", "input_gradient", "sparse_product"]


def _write(entries: Entries, rows: range, columns: range, out: Tensor) -> None:
    add_entries(entries, rows, columns, out.zero_())


def sparse_product(x_MK: Tensor, entries: Entries, bias_N: Tensor | None = None) -> Tensor:
    """[M, N] = x entries^T + bias on a GPU (or under the interpreter), in the dtype of x."""
    N = len(entries.row_start) - 1
    if len(x_MK) <= MAX_BLOCK_M:
        start_MN = torch.zeros(len(x_MK), N, dtype=x_MK.dtype, device=x_MK.device)
        return add_product(x_MK, entries, start_MN if bias_N is None else start_MN + bias_N.to(x_MK.dtype))
    work = torch.promote_types(x_MK.dtype, entries.value.dtype)
    return block_product(x_MK, N, work, bias_N, partial(_write, entries))


def input_gradient(grad_MN: Tensor, entries: Entries, K: int) -> Tensor:
    """[M, K] = grad entries on a GPU (or under the interpreter), in the dtype of grad."""
    work = torch.promote_types(grad_MN.dtype, entries.value.dtype)
    return block_gradient(grad_MN, K, work, partial(_write, entries))
