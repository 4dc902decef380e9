"""Products of weights that are made dense a block of rows at a time, by torch, on every device.

M tokens, N outputs, K inputs. Blocks are (rows, their values [rows, K]).
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.kernels import reference

Blocks = Iterable[tuple[slice, Tensor]]

# Bytes that unpacking a block of rows may take: per weight, int32 codes and the values beside them.
UNPACKED_BYTES = 16 * 2**20
BYTES_PER_WEIGHT = 8


def row_blocks(rows: int, columns: int, together: int = 1) -> Iterator[slice]:
    """Blocks of rows that unpack into bounded memory. together: so many consecutive rows stay in one block."""
    step = max(1, UNPACKED_BYTES // (BYTES_PER_WEIGHT * columns) // together) * together
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """True where torch multiplies matrices of this dtype natively on this CPU; elsewhere that takes several times as
    long as in fp32."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    asked = f"_is_mkldnn_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_supported"
    answers: Any = torch.ops.mkldnn  # what inductor asks; a build without oneDNN has none
    return hasattr(answers, asked) and bool(getattr(answers, asked)())


def product_of_blocks(x_MK: Tensor, blocks: Blocks, N: int, bias: Tensor | None) -> Tensor:
    """[M, N] x weight^T + bias: torch's own product of each block where dtypes and the CPU allow it, else the
    reference's, in fp32."""
    out_MN = x_MK.new_empty(len(x_MK), N)
    for rows, dense_NK in blocks:
        added = None if bias is None else bias[rows]
        if x_MK.device.type == "cpu" and dense_NK.dtype == x_MK.dtype and _multiplies(x_MK.dtype):
            added = None if added is None else added.to(x_MK.dtype)
            out_MN[:, rows] = torch.nn.functional.linear(x_MK, dense_NK, added)
        else:
            out_MN[:, rows] = reference.linear(x_MK, dense_NK, added)
    return out_MN


def gradient_of_blocks(grad: Tensor, blocks: Blocks, columns: int) -> Tensor:
    """[..., K] grad weight, summed in fp32 (fp64 for fp64), in the dtype of grad [..., N]."""
    work = torch.promote_types(grad.dtype, torch.float32)
    sums = grad.new_zeros((*grad.shape[:-1], columns), dtype=work)
    for rows, dense_NK in blocks:
        sums = sums + grad[..., rows].to(work) @ dense_NK.to(work)
    return sums.to(grad.dtype)
