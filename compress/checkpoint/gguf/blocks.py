"""Blocks of GGUF: packing and layouts, as functions of tensors.

A row of K inputs is a row of blocks, each with its own scale. d and m are float16, stored lowest byte first. Bits are
numbered from the lowest. Layouts are those of ggml-common.h and ggml-quants.c (ggml-org/llama.cpp).

    Q4_0   32 in 18 bytes    d | 16 x (q[j] in bits 0-3, q[j + 16] in bits 4-7)                 w = d (q - 8)
    Q4_1   32 in 20 bytes    d | m | 16 bytes as Q4_0                                           w = d q + m
    Q5_0   32 in 22 bytes    d | 32 bits: bit 4 of q[j] | 16 bytes of bits 0-3, as Q4_0         w = d (q - 16)
    Q8_0   32 in 34 bytes    d | 32 x int8                                                      w = d q
    Q2_0   64 in 18 bytes    d | 16 x (four codes, one after the other)                         w = d (q - 1)
    TQ2_0  256 in 66 bytes   64 x (four codes: of j, j + 32, j + 64, j + 96 in 128) | d         w = d (q - 1)
    Q1_0   128 in 18 bytes   d | 128 bits, one after the other                                  w = d (2 q - 1)
    MXFP4  32 in 17 bytes    exponent of d, in e8m0 | 16 bytes as Q4_0                          w = d E2M1[q]
    IQ4_NL 32 in 18 bytes    d | 16 bytes as Q4_0                                               w = d level[q]
    NVFP4  64 in 36 bytes    4 x d, in e4m3 | 4 x (8 bytes: q[j], q[j + 8] of 16)               w = d E2M1[q]

N outputs, K inputs, B blocks of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HALF = 16  # the codes whose bits 0-3 lie in the low halves of a block's bytes
BYTE = 8


@dataclass(frozen=True)
class Block:
    """A type of block: its name in ggml, elements and bytes.

    least, most: the codes that it holds, as factors of the scale. pack: (codes int16 [N, K], scale float16 [N, B]) ->
    uint8 [N, bytes of a row]. unpack: of blocks, uint8 [N, B, bytes] -> (codes int8 [N, B, size], scale [N, B]); None
    where no reader needs it.
    """

    name: str
    size: int
    bytes: int
    least: int
    most: int
    pack: Callable[[Tensor, Tensor], Tensor]
    unpack: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def row(self, columns: int) -> int:
        """Bytes of a row of so many inputs, which must be a multiple of `size`."""
        return columns // self.size * self.bytes

    def codes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inverse of `pack`: (codes int8 [N, K], scale float16 [N, B]) of uint8 [N, bytes of a row]."""
        assert self.unpack is not None
        codes, scale = self.unpack(rows.unflatten(-1, (-1, self.bytes)))
        return codes.flatten(-2), scale


def pack_q4_0(codes_NK: Tensor, scale_NB: Tensor) -> Tensor:
    """Codes -8 to 7."""
    codes = _blocks(codes_NK + 8, 32)
    return _joined(_bytes(scale_NB), _nibbles(codes))


def unpack_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _codes(blocks[..., 2:]) - 8, _float16(blocks)


def pack_q4_1(codes_NK: Tensor, scale_NB: Tensor, least_NB: Tensor) -> Tensor:
    """Codes 0 to 15. least: the value of code 0, float16."""
    return _joined(_bytes(scale_NB), _bytes(least_NB), _nibbles(_blocks(codes_NK, 32)))


def pack_q5_0(codes_NK: Tensor, scale_NB: Tensor) -> Tensor:
    """Codes -16 to 15."""
    codes = _blocks(codes_NK + 16, 32)
    return _joined(_bytes(scale_NB), _bits(codes >> 4), _nibbles(codes & 15))


def unpack_q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    fifth = (blocks[..., 2:6].unsqueeze(-1) >> torch.arange(BYTE, dtype=torch.uint8) & 1).flatten(-2)
    return (_codes(blocks[..., 6:]) | fifth.to(torch.int8) << 4) - 16, _float16(blocks)


def pack_q8_0(codes_NK: Tensor, scale_NB: Tensor) -> Tensor:
    """Codes -128 to 127."""
    return _joined(_bytes(scale_NB), _blocks(codes_NK, 32).to(torch.int8).view(torch.uint8))


def unpack_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[..., 2:].contiguous().view(torch.int8), _float16(blocks)


def pack_q2_0(codes_NK: Tensor, scale_NB: Tensor) -> Tensor:
    """Codes -2 to 1, which it holds as 1 - code by a scale of the other sign."""
    codes = (1 - _blocks(codes_NK, 64)).to(torch.uint8).unflatten(-1, (-1, 4))
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return _joined(_bytes(-scale_NB), (codes << places).sum(-1, dtype=torch.uint8))


def unpack_q2_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -2 to 1, and scales of the other sign."""
    codes = 1 - (blocks[..., 2:].unsqueeze(-1) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).to(torch.int8)
    return codes.flatten(-2), -_float16(blocks)


def pack_tq2_0(codes_NK: Tensor, scale_NB: Tensor) -> Tensor:
    """Codes -1 to 1."""
    codes = _blocks(codes_NK + 1, 256).unflatten(-1, (2, 4, 32))
    packed = sum(codes[..., place, :] << (2 * place) for place in range(4))
    assert isinstance(packed, Tensor)
    return _joined(packed.to(torch.uint8).flatten(-2), _bytes(scale_NB))


def pack_q1_0(codes_NK: Tensor, scale_NB: Tensor) -> Tensor:
    """Codes -1 and 1."""
    return _joined(_bytes(scale_NB), _bits(_blocks(codes_NK > 0, 128)))


def pack_mxfp4(codes_NK: Tensor, scale_NB: Tensor) -> Tensor:
    """uint8 codes of E2M1, and of e8m0."""
    return _joined(scale_NB.unsqueeze(-1), _nibbles(_blocks(codes_NK, 32)))


def pack_iq4_nl(codes_NK: Tensor, scale_NB: Tensor) -> Tensor:
    """uint8 codes of IQ4_NL's levels, and float16 scales."""
    return _joined(_bytes(scale_NB), _nibbles(_blocks(codes_NK, 32)))


def pack_nvfp4(codes_NK: Tensor, scale_NG: Tensor) -> Tensor:
    """uint8 codes of E2M1, and of e4m3 for every 16 of them."""
    sixteens = _blocks(codes_NK, 64).unflatten(-1, (4, 2, 8))
    packed = (sixteens[..., 0, :] | sixteens[..., 1, :] << 4).flatten(-2)
    return _joined(_blocks(scale_NG, 4), packed)


Q4_0 = Block("Q4_0", 32, 18, -8, 7, pack_q4_0, unpack_q4_0)
Q5_0 = Block("Q5_0", 32, 22, -16, 15, pack_q5_0, unpack_q5_0)
Q8_0 = Block("Q8_0", 32, 34, -128, 127, pack_q8_0, unpack_q8_0)
Q2_0 = Block("Q2_0", 64, 18, -2, 1, pack_q2_0, unpack_q2_0)
TQ2_0 = Block("TQ2_0", 256, 66, -1, 1, pack_tq2_0)
Q1_0 = Block("Q1_0", 128, 18, -1, 1, pack_q1_0)
# Codes of tables of levels.
MXFP4 = Block("MXFP4", 32, 17, 0, 15, pack_mxfp4)
NVFP4 = Block("NVFP4", 64, 36, 0, 15, pack_nvfp4)
IQ4_NL = Block("IQ4_NL", 32, 18, 0, 15, pack_iq4_nl)
# Codes of a scale and a minimum: packed by `pack_q4_1`, which takes both.
Q4_1_NAME, Q4_1_SIZE, Q4_1_BYTES = "Q4_1", 32, 20


def _blocks(codes: Tensor, size: int) -> Tensor:
    """[N, K] as [N, B, size]."""
    return codes.unflatten(-1, (-1, size))


def _bytes(numbers_NB: Tensor) -> Tensor:
    """The two bytes of each float16: uint8 [N, B, 2]."""
    return numbers_NB.to(torch.float16).contiguous().unsqueeze(-1).view(torch.uint8)


def _float16(blocks: Tensor) -> Tensor:
    """The number in the first two bytes of each block: float16 [N, B]."""
    return blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)


def _codes(halves: Tensor) -> Tensor:
    """Inverse of `_nibbles`: int8."""
    return torch.cat([halves & 15, halves >> 4], -1).to(torch.int8)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes 0 to 15 of [N, B, 32] in [N, B, 16] bytes."""
    return (codes[..., :HALF] | codes[..., HALF:] << 4).to(torch.uint8)


def _bits(flags: Tensor) -> Tensor:
    """Zeros and ones [N, B, size] in bytes, lowest bit first."""
    eights = flags.to(torch.uint8).unflatten(-1, (-1, BYTE))
    return (eights << torch.arange(BYTE, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _joined(*parts: Tensor) -> Tensor:
    """Parts [N, B, bytes] of blocks, as rows of blocks [N, bytes of a row]."""
    return torch.cat(parts, -1).flatten(1)
