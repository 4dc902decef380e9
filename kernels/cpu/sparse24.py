"""The CPU products of 2:4 weights: pairs of numbers, pairs of codes, and 4-bit codes in words (`cpu_sparse24.h`).

Few tokens are multiplied by what is kept and nothing else is read. For more, `expand` makes blocks of rows dense for
torch's own product: its matrix units then gain more than half of the weight costs.
"""

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.blocks import product_of_blocks, row_blocks
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import gemm

NUMBERS, PAIRED, WORDS = 16, 8, 4


class Half(NamedTuple):
    """What is kept of a weight [N, K]; bits says how it lies.

    NUMBERS   held [N, K / 2] in any floating dtype, kept int32 positions (`pairs24.Pairs`); no scale, no zero
    PAIRED    the same with uint8 codes
    WORDS     held and kept int16 words (`pack24.Sparse24`); zero None: every code is centred on 8

    scale [G, N] in a floating dtype, zero uint8 [G, N]; group_size in columns, -1 for one scale per output channel.
    """

    held: Tensor
    kept: Tensor
    scale: Tensor | None
    zero: Tensor | None
    group_size: int
    bits: int

    @property
    def numbers(self) -> Tensor:
        """The tensor whose dtype the values have."""
        return self.held if self.scale is None else self.scale

    def of_rows(self, rows: slice) -> "Half":
        """Some rows of it."""
        scale, zero = (None if part is None else part[:, rows] for part in (self.scale, self.zero))
        return self._replace(held=self.held[rows], kept=self.kept[rows], scale=scale, zero=zero)


def why_not(x: Tensor, weight: Half) -> list[str]:
    """Reasons why x cannot be multiplied here by this weight; empty when it can."""
    return gemm.why_not("sparse24", x, weight.numbers, weight.group_size)


def _filled(weight: Half, columns: int) -> gemm.Arguments:
    """A call on a contiguous weight, which must live until it returns."""
    filled = gemm.Arguments(weight=weight.held.data_ptr(), kept=weight.kept.data_ptr(), N=len(weight.held), K=columns)
    filled.row_bytes = weight.held.shape[1] * weight.held.element_size()
    filled.bits, filled.group, filled.by_rows = weight.bits, weight.group_size, True
    filled.threads = torch.get_num_threads()
    if weight.scale is None:
        filled.value_type = gemm.TYPES[weight.held.dtype]
    else:
        filled.scale, filled.scale_type = weight.scale.data_ptr(), gemm.TYPES[weight.scale.dtype]
        filled.G = len(weight.scale)
        filled.zero = None if weight.zero is None else weight.zero.data_ptr()
    return filled


def _contiguous(weight: Half) -> Half:
    held, kept = weight.held.contiguous(), weight.kept.contiguous()
    scale, zero = (None if part is None else part.contiguous() for part in (weight.scale, weight.zero))
    return weight._replace(held=held, kept=kept, scale=scale, zero=zero)


def product(x_MK: Tensor, weight: Half, bias: Tensor | None = None) -> Tensor:
    """[M, N] = x weight^T + bias, in the dtype of x: fp32 products and sums, of any number of tokens."""
    weight, x_MK, bias = _contiguous(weight), x_MK.contiguous(), gemm.bias_of(bias)
    filled = _filled(weight, x_MK.shape[1])
    filled.x, filled.x_type, filled.M = x_MK.data_ptr(), gemm.TYPES[x_MK.dtype], len(x_MK)
    if bias is not None:
        filled.bias, filled.bias_type = bias.data_ptr(), gemm.TYPES[bias.dtype]
    return gemm.call("sparse24", filled, x_MK)


def expand(weight: Half, columns: int) -> Tensor:
    """[N, columns] the values, bit for bit those of `pairs24.pairs_weight` or `pack24.sparse24_weight`."""
    weight = _contiguous(weight)
    filled = _filled(weight, columns)
    out_NK = weight.numbers.new_empty(len(weight.held), columns)
    filled.out = out_NK.data_ptr()
    if cpu.library().expand24(ctypes.byref(filled)):
        raise MemoryError(f"no memory to make {len(weight.held)} rows of {columns} columns dense")
    return out_NK


def dense_blocks(weight: Half, columns: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their values) of a weight."""
    return ((rows, expand(weight.of_rows(rows), columns)) for rows in row_blocks(len(weight.held), columns))


def linear(x_MK: Tensor, weight: Half, bias: Tensor | None = None) -> Tensor:
    """[M, N] = x weight^T + bias, in the dtype of x, by whichever is faster for so many tokens."""
    if gemm.by_rows("sparse24", len(x_MK)):
        return product(x_MK, weight, bias)
    return product_of_blocks(x_MK, dense_blocks(weight, x_MK.shape[1]), len(weight.held), bias)
