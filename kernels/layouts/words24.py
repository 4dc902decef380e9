"""4-bit weights of which two in every four consecutive inputs are pruned (2:4), in 3 bits per weight instead of 4.

A quad is four consecutive columns, of which at most two are kept. It stores two codes, v0 and v1, and one bit per
column that says whether the column is kept. Which code a kept column has follows from its neighbour's bit:

    column 0: v0        column 1: v1 if column 0 is kept, else v0
    column 3: v1        column 2: v0 if column 3 is kept, else v1

A pruned weight is exactly 0, whatever the zero point is. A block of 512 columns is four quarters of 128 columns, 32
quads each. Word j belongs to quad j of every quarter; `_` separates nibbles, most significant first:

    codes int16, 64 words per block     word      j = v1(1)_v0(1)_v1(0)_v0(0)      v0(g), v1(g): the codes of quad j
                                        word 32 + j = v1(3)_v0(3)_v1(2)_v0(2)                    of quarter g
    kept  int16, 32 words per block     bit 15 - 2g of word j = column 0 of quad j of quarter g is kept
                                        bit 14 - 2g           = column 2
                                        bit  7 - 2g           = column 1
                                        bit  6 - 2g           = column 3

so that a shift by 2g or 2g + 1 brings two columns of a quarter to the top bits of the two bytes, where one `prmt`
spreads a bit over the 16 bits of a half-precision number. As in `pack`, everything is done in the registers of the
thread that loaded the word. Column p of the 32 quads of a quarter is one operand [N, 32] of the matrix instruction;
the activations are brought into the same order first (`quad_planar`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.errors import InputError
from compress.kernels.layouts.words import PLANE

QUAD = 4
KEPT = 2
QUARTERS = 4
QUARTER = QUAD * PLANE
BLOCK = QUARTERS * QUARTER
MIDDLE = 8
# Where the bit of column p of quarter 0 is; two bits further down with every quarter.
TOP_BIT = (15, 7, 14, 6)


class Words24(NamedTuple):
    """A weight as the kernel reads it; scale [G, N] in the dtype of the activations, zero uint8 [G, N] or None where
    every code is centred on 8; group_size in columns, -1 for one scale per output channel (G = 1)."""

    codes: Tensor
    kept: Tensor
    scale: Tensor
    zero: Tensor | None
    group_size: int


def blocks_of(columns: int) -> int:
    return -(-columns // BLOCK)


def check_kept(kept_NK: Tensor) -> None:
    """Raises InputError, naming the first quad, where more than two of four consecutive columns are kept."""
    rows, columns = kept_NK.shape
    padded = torch.nn.functional.pad(kept_NK, (0, -columns % QUAD))
    counts = padded.view(rows, -1, QUAD).sum(-1)
    worst = (counts > KEPT).nonzero()
    if len(worst):
        row, quad = worst[0].tolist()
        last = min(columns, (quad + 1) * QUAD) - 1
        raise InputError(
            f"not 2:4: row {row} keeps {int(counts[row, quad])} of columns {quad * QUAD} to {last}, at most {KEPT} are "
            f"allowed ({len(worst)} such places); prune the weight to 2:4 first"
        )


def pack24(codes_NK: Tensor, kept_NK: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] unsigned codes (uint8, below 16) and which of them are kept (bool) -> words of codes and of kept bits.

    Raises InputError where the weight is not 2:4.
    """
    check_kept(kept_NK)
    return words24(codes_NK, kept_NK)


def words24(codes_NK: Tensor, kept_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The words of a weight that is known to be 2:4."""
    rows, columns = codes_NK.shape
    pad = (0, blocks_of(columns) * BLOCK - columns)
    shape = (rows, -1, QUARTERS, PLANE, QUAD)
    c0, c1, c2, c3 = torch.nn.functional.pad(codes_NK.to(torch.int32), pad).view(shape).unbind(-1)
    mask = torch.nn.functional.pad(kept_NK, pad).view(shape)
    m0, m1, m2, m3 = mask.unbind(-1)
    nothing = torch.zeros_like(c0)
    v0 = torch.where(m0, c0, torch.where(m1, c1, torch.where(m2 & m3, c2, nothing)))
    v1 = torch.where(m3, c3, torch.where(m2, c2, torch.where(m0 & m1, c1, nothing)))
    pairs = v0 | v1 << 4
    codes = pairs[:, :, 0::2] | pairs[:, :, 1::2] << 8
    bits = torch.zeros_like(c0[:, :, 0])
    for quarter in range(QUARTERS):
        for column, top in enumerate(TOP_BIT):
            bits |= mask[:, :, quarter, :, column].to(torch.int32) << top - 2 * quarter
    return _int16(codes), _int16(bits)


def _int16(words: Tensor) -> Tensor:
    """int32 [N, ...] of 16-bit patterns -> int16 [N, W]."""
    return torch.where(words >= 2**15, words - 2**16, words).to(torch.int16).reshape(len(words), -1)


def unpack24(codes: Tensor, kept: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Inverse of `pack24`: [N, columns] codes (uint8, 0 where pruned) and which of them are kept (bool)."""
    rows = len(codes)
    words = codes.view(rows, -1, 2, 1, PLANE).to(torch.int32)
    shifts = torch.tensor([0, 8], dtype=torch.int32, device=codes.device).view(2, 1)
    pairs = (words >> shifts).view(rows, -1, QUARTERS, PLANE)
    v0, v1 = pairs & 15, pairs >> 4 & 15
    bits = kept.view(rows, -1, 1, PLANE).to(torch.int32)
    down = 2 * torch.arange(QUARTERS, dtype=torch.int32, device=codes.device).view(-1, 1)
    m0, m1, m2, m3 = ((bits >> top - down & 1).bool() for top in TOP_BIT)
    dense = torch.stack([v0, torch.where(m0, v1, v0), torch.where(m3, v0, v1), v1], -1)
    mask = torch.stack([m0, m1, m2, m3], -1)
    unpacked = (dense * mask).to(torch.uint8).view(rows, -1)[:, :columns]
    return unpacked, mask.view(rows, -1)[:, :columns]


def to_sparse24(
    codes_NK: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    dtype: torch.dtype,
    kept_NK: Tensor | None = None,
) -> Words24:
    """Lay out a quantized weight; `dtype` is the activations', which the scales are cast to.

    codes [N, K] int8 or uint8, 4 bits; scale and zero [N, G], [N, 1] or [1, 1], zero in the dtype of the codes. kept
    bool [N, K]; without it, every weight that is not 0 is kept. Raises InputError where the weight is not 2:4.
    """
    rows, columns = codes_NK.shape
    offset = MIDDLE if codes_NK.dtype == torch.int8 else 0
    scale_NG = scale_NG.expand(rows, -1)
    groups = scale_NG.shape[1]
    zero = torch.zeros(1, 1, dtype=codes_NK.dtype, device=codes_NK.device) if zero_NG is None else zero_NG
    zero_NG8 = (zero.to(torch.int16) + offset).to(torch.uint8).expand(rows, groups)
    raised = (codes_NK.to(torch.int16) + offset).to(torch.uint8)
    if kept_NK is None:
        kept_NK = raised != zero_NG8.repeat_interleave(columns // groups, 1)
    codes, kept = pack24(raised, kept_NK)
    centred = zero_NG is None and offset == MIDDLE
    zero_GN = None if centred else zero_NG8.t().contiguous()
    return Words24(codes, kept, scale_NG.to(dtype).t().contiguous(), zero_GN, -1 if groups == 1 else columns // groups)


def sparse24_weight(weight: Words24, columns: int) -> Tensor:
    """[N, columns] values that a weight stands for, in the dtype of its scale; the kernel's reference."""
    codes, kept = unpack24(weight.codes, weight.kept, columns)
    zero = torch.full_like(weight.scale, MIDDLE) if weight.zero is None else weight.zero
    values = reference.dequantize(codes, weight.scale.t(), zero.t())
    return torch.where(kept, values, torch.zeros_like(values))


def quad_planar(x_MK: Tensor) -> Tensor:
    """Activations in the order of the kernel: column p of quad q of a quarter goes to p * 32 + q; K is filled up to
    whole blocks with zeros."""
    M, K = x_MK.shape
    padded = torch.nn.functional.pad(x_MK, (0, blocks_of(K) * BLOCK - K))
    return padded.view(M, -1, PLANE, QUAD).transpose(2, 3).reshape(M, -1)
