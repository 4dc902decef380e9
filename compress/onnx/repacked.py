"""Codes of a layer as ONNX's operators read them. Nothing is rounded here: the values are those of the checkpoint.

Of a layer with N outputs, K inputs, codes q of n bits and values (q - z) scale, in blocks of b inputs, B = ceil(K / b):

    MatMulNBits (com.microsoft)    B            uint8 [N, B, b n / 8]         q + 2^(n-1), lowest bits first
                                   scales       float32 [N, B]
                                   zero_points  uint8 [N, ceil(B n / 8)]      z + 2^(n-1), lowest bits first; absent
                                                                              where all are 2^(n-1)
    DequantizeLinear, MatMul       x            int4 or int8 [K, N]           q; uint4 or uint8 with 2^(n-1) added where
                                                                              there are zero points
                                   scale        float32 [B, N]
                                   zero point   the type of x [B, N]          asymmetric only

MatMulNBits has blocks of 16, 32, 64, 128 and 256 inputs. A group of another size repeats its scale: groups of 96 inputs
become blocks of 32, and one scale per output becomes blocks of 256 at most.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from compress.checkpoint.export.integers import unsigned, why_not_integer
from compress.checkpoint.export.limits import LIMITS
from compress.kernels.layouts.words import pack_rows
from compress.weights.formats.codes import CodesFormat
from compress.weights.grid import Quantized
from compress.weights.scheme import Scheme

PORTABLE_BITS = (4, 8)
LEAST_BLOCK, MOST_BLOCK = LIMITS["onnx"].unit, 256
BYTE = 8


@dataclass(frozen=True)
class BlockCodes:
    """A weight (codes - zero) scale in blocks of inputs. codes uint8 [N, K]; scale float32 [N, B]; zero uint8 [N, B],
    or None where the codes are symmetric (2^(bits - 1) everywhere)."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    block: int


def block_of(group: int | None, columns: int) -> int | None:
    """The largest block that fits the groups of a row of `columns` inputs (None: one group): a power of two from 16 to
    256 that divides the group, or covers the row. None where there is none."""
    if group is None and columns <= MOST_BLOCK:
        return next(size for size in _sizes() if size >= columns)
    if group is None:
        return MOST_BLOCK
    return max((size for size in _sizes() if group % size == 0), default=None)


def _sizes() -> list[int]:
    return [2**n for n in range(LEAST_BLOCK.bit_length() - 1, MOST_BLOCK.bit_length())]


def blocks_of(quantized: Quantized) -> BlockCodes:
    """The codes of a layer in blocks. The grid has signed integer codes, and groups that `block_of` fits."""
    grid, columns = quantized.grid, quantized.codes.shape[1]
    block = block_of(grid.group_size, columns)
    assert block is not None
    held, count = unsigned(quantized), -(-columns // block)
    repeats = count if grid.group_size is None else grid.group_size // block
    scale, zero = (part.repeat_interleave(repeats, 1).contiguous() for part in (held.scale.float(), held.zero))
    return BlockCodes(held.codes, scale, None if quantized.zero_point is None else zero, grid.bits, block)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., K] codes of 2, 4 or 8 bits -> uint8 [..., ceil(K bits / 8)], lowest bits first; the last byte is
    filled with zeros."""
    rows = pack_rows(codes.flatten(0, -2), bits, signed=False).view(torch.uint8)
    return rows[:, : -(-codes.shape[-1] * bits // BYTE)].unflatten(0, codes.shape[:-1]).contiguous()


def why_not(scheme: Scheme, portable: bool) -> str | None:
    """The reason why a layer has no exact form in ONNX, the end of a sentence about it; None where it has one.
    portable: in standard operators alone."""
    if (why := why_not_integer(scheme)) is not None:
        return why
    form = cast(CodesFormat, scheme.codes)
    return _why_not_codes(form, portable) if scheme.inputs is None else _why_not_inputs(scheme, form)


def _why_not_codes(form: CodesFormat, portable: bool) -> str | None:
    bits, group = form.grid.bits, form.grid.group_size
    if bits not in LIMITS["onnx"].bits:
        return f"has codes of {bits} bits; ONNX Runtime multiplies codes of 2, 4 and 8: quantize with --scheme w4a16"
    if portable and bits not in PORTABLE_BITS:
        return f"has codes of {bits} bits; standard operators have 4 and 8: `--to onnx` takes it"
    if group is not None and block_of(group, group) is None:
        return f"has groups of {group}, which no block of {LEAST_BLOCK} divides; quantize with --group-size 32"
    return None


def _why_not_inputs(scheme: Scheme, form: CodesFormat) -> str | None:
    grid = form.grid
    assert scheme.inputs is not None
    whole = grid.bits == BYTE and grid.symmetric and grid.group_size is None
    if scheme.outputs is not None:
        return f"rounds its output, too ({scheme}); quantize it without rounded outputs"
    if not whole or scheme.inputs.bits != BYTE or scheme.inputs.floating or scheme.inputs.group_size is not None:
        return (
            f"is {scheme}, and ONNX's integer products take 8 bits of both; quantize with --scheme w8a8, or w4a16, "
            "whose inputs `--to onnx` rounds to int8"
        )
    return None
