"""Two layouts of integer codes: the words that are stored on disk, and the words that the kernels read.

Stored, as compressed-tensors does (`pack_rows`): int32. A row of K codes of n bits is one little-endian stream of bits:
code k occupies bits [k n, k n + n) of the row, bit b of the stream is bit b % 32 of word b // 32. A signed code q is
stored as q + 2^(n-1). Rows are padded to whole words, so a row takes ceil(K n / 32) words; 32 codes fill n words.

    n = 4:  word 0 = q0 | q1 << 4 | ... | q7 << 28          n = 3:  word 0 = q0 | ... | q9 << 27 | (q10 & 3) << 30
                                                                    word 1 = q10 >> 2 | q11 << 1 | ...

Executed (`pack_planar`): int16, codes of 4 or 8 bits, unsigned (a signed code q is stored as q + 2^(n-1)). A block of
32 * 16 / n columns becomes 32 words; plane p of a block, bits [p n, p n + n) of its words, holds 32 consecutive
columns. Rows are padded to whole blocks with zeros; the kernels read zero activations there.

    n = 4, block of 128 columns:   word j = u[j] | u[j + 32] << 4 | u[j + 64] << 8 | u[j + 96] << 12       0 <= j < 32
    n = 8, block of  64 columns:   word j = u[j] | u[j + 32] << 8

One tile of words [N, 32] thus gives 16 / n tiles of weights [N, 32] by masking alone: every thread unpacks the words
it loaded into the operand registers of the matrix instruction, without a shuffle and without shared memory. Groups of
32, 64, 128 ... columns never split a plane, so a group has one scale per row and plane.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels import reference

WORD = 32
STRIPS_DIMENSIONS = 3  # of words in strips; planar ones have two
ROWS = 16  # of a strip
LINE_BYTES = 64
PLANE = 32
# Weights that are converted at a time: bounds the temporary memory of a conversion.
CHUNK = 2**20
PACKED = 2**24  # codes that are packed at a time, two bytes each
BYTE = 8


def words_of(count: int, bits: int) -> int:
    """int32 words that a row of `count` codes takes."""
    return -(-count * bits // WORD)


def pack_rows(codes: Tensor, bits: int, signed: bool = True) -> Tensor:
    """[R, K] codes (int8 or uint8, in range) -> [R, ceil(K bits / 32)] int32."""
    rows, count = codes.shape
    found = torch.empty(rows, words_of(count, bits), dtype=torch.int32, device=codes.device)
    for part in some_rows(rows, count, at_once=PACKED):
        found[part] = _packed(codes[part], bits, signed)
    return found


def some_rows(rows: int, columns: int, together: int = 1, at_once: int = CHUNK) -> Iterator[slice]:
    """Slices of all rows, `at_once` weights at a time: bounds the temporary memory of work on a whole weight. together:
    so many consecutive rows stay in one slice."""
    step = max(1, at_once // max(columns, 1) // together) * together
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _bytes_of(bits: int) -> Iterator[tuple[int, int, int]]:
    """(Code, byte, shift) of all that 8 codes and the `bits` bytes of their stream share: bits of the byte are those of
    the code, shifted left by `shift`, or right where it is negative."""
    for code in range(BYTE):
        first, last = code * bits // BYTE, ((code + 1) * bits - 1) // BYTE
        yield from ((code, byte, code * bits - byte * BYTE) for byte in range(first, last + 1))


def _packed(codes: Tensor, bits: int, signed: bool) -> Tensor:
    rows, count = codes.shape
    offset = 2 ** (bits - 1) if signed else 0
    values = torch.zeros(rows, -(-count // WORD) * WORD, dtype=torch.uint8, device=codes.device)
    torch.add(codes.view(torch.uint8), offset, out=values[:, :count])
    eights = values.view(rows, -1, BYTE)
    stream = torch.zeros(rows, eights.shape[1], bits, dtype=torch.uint8, device=codes.device)
    for code, byte, shift in _bytes_of(bits):
        value = eights[:, :, code]
        stream[:, :, byte] |= value << shift if shift >= 0 else value >> -shift
    return stream.view(rows, -1).view(torch.int32)[:, : words_of(count, bits)]


def unpack_rows(words: Tensor, bits: int, count: int, signed: bool = True) -> Tensor:
    """[R, ceil(count bits / 32)] int32 -> [R, count] int8 (uint8 when unsigned). Inverse of `pack_rows`."""
    found = torch.empty(len(words), count, dtype=torch.int8 if signed else torch.uint8, device=words.device)
    for part in some_rows(len(words), count, at_once=PACKED):
        found[part] = _unpacked(words[part], bits, count, signed)
    return found


def _unpacked(words: Tensor, bits: int, count: int, signed: bool) -> Tensor:
    rows, runs = len(words), -(-count // WORD)
    full = torch.zeros(rows, runs * bits, dtype=torch.int32, device=words.device)
    full[:, : words.shape[1]] = words
    stream = full.view(torch.uint8).view(rows, -1, bits)
    codes = torch.zeros(rows, stream.shape[1], BYTE, dtype=torch.uint8, device=words.device)
    for code, byte, shift in _bytes_of(bits):
        value = stream[:, :, byte]
        codes[:, :, code] |= value >> shift if shift >= 0 else value << -shift
    codes = codes.view(rows, -1)[:, :count] & (2**bits - 1)
    return (codes - 2 ** (bits - 1)).view(torch.int8) if signed else codes


class LevelTable(NamedTuple):
    """The levels that codes of 4 bits stand for. values: fp32 [17], by code, then a factor of all scales. signed: the
    levels of codes 8 to 15 are those of 0 to 7, negated."""

    values: Tensor
    signed: bool


class CodeWords(NamedTuple):
    """A weight of codes as kernels read it: in planar words, or on a CPU in strips (`layouts.strips`).

    words int16 [N, W] (`pack_planar`); scale [G, N] in the dtype of the activations; zero uint8 [G, N], or None where
    every code is centred on 2^(bits-1); group_size in columns, -1 for one scale per output channel (G = 1); table: the
    levels of codes that are no numbers.
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    group_size: int
    bits: int
    table: LevelTable | None = None

    @property
    def in_strips(self) -> bool:
        """True where the words are those of strips."""
        return self.words.dim() == STRIPS_DIMENSIONS


Planar = CodeWords  # in planar words, as a GPU's kernels read it


def planar_block(bits: int) -> int:
    """Columns of one block: 128 for 4 bits, 64 for 8."""
    assert bits in (4, 8), bits
    return PLANE * 16 // bits


def planar_words(columns: int, bits: int) -> int:
    """int16 words that a row of `columns` codes takes."""
    return -(-columns // planar_block(bits)) * PLANE


def pack_planar(codes: Tensor, bits: int) -> Tensor:
    """[N, K] unsigned codes (uint8, below 2^bits) -> [N, W] int16."""
    rows, columns = codes.shape
    block = planar_block(bits)
    if columns % block:
        codes = torch.nn.functional.pad(codes, (0, -columns % block))
    planes = codes.reshape(rows, -1, 16 // bits, PLANE)
    # A word is two bytes, the low one first.
    if bits == 8:
        low, high = planes.unbind(2)
    else:
        low, high = planes[:, :, 0] | planes[:, :, 1] << 4, planes[:, :, 2] | planes[:, :, 3] << 4
    return torch.stack([low, high], -1).view(torch.int16).view(rows, -1)


def unpack_planar(words: Tensor, bits: int, columns: int) -> Tensor:
    """[N, W] int16 -> [N, columns] uint8. Inverse of `pack_planar`."""
    low, high = words.contiguous().view(len(words), -1, PLANE, 1).view(torch.uint8).unbind(-1)
    planes = [low, high] if bits == 8 else [low & 15, low >> 4, high & 15, high >> 4]
    return torch.stack(planes, 2).view(len(words), -1)[:, :columns]


def planar_from_rows(words: Tensor, bits: int, columns: int, container: int, centred: bool = True) -> Tensor:
    """Stored words of signed codes (`pack_rows`) -> planar words of 4 or 8 bits, CHUNK weights at a time.

    A code keeps its distance from the middle: u becomes u + 2^(container-1) - 2^(bits-1); not `centred`, it stays u.
    """
    out = torch.empty(len(words), planar_words(columns, container), dtype=torch.int16, device=words.device)
    for part in some_rows(len(words), columns):
        out[part] = pack_planar(_raised(words[part], bits, columns, container, centred), container)
    return out


def _raised(words: Tensor, bits: int, columns: int, container: int, centred: bool) -> Tensor:
    """uint8 [R, columns] unsigned codes of the container's width. Whole bytes need no arithmetic."""
    if bits == container:
        stored = words.contiguous().view(torch.uint8)
        if bits == 4:
            stored = torch.stack([stored & 15, stored >> 4], -1).view(len(words), -1)
        return stored[:, :columns]
    codes = unpack_rows(words, bits, columns, signed=False)
    return codes + (2 ** (container - 1) - 2 ** (bits - 1)) if centred else codes


def rows_from_planar(words: Tensor, bits: int, columns: int, container: int, centred: bool = True) -> Tensor:
    """Inverse of `planar_from_rows`: int32 [N, ceil(columns bits / 32)]."""
    out = torch.empty(len(words), words_of(columns, bits), dtype=torch.int32, device=words.device)
    for part in some_rows(len(words), columns):
        raised = unpack_planar(words[part], container, columns)
        codes = raised - (2 ** (container - 1) - 2 ** (bits - 1)) if centred else raised
        out[part] = pack_rows(codes, bits, signed=False)
    return out


def to_planar(codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, bits: int, dtype: torch.dtype) -> CodeWords:
    """Lay out a quantized weight for the kernels; `dtype` is the activations', which the scales are cast to.

    codes [N, K] int8 or uint8; scale and zero [N, G], [N, 1] or [1, 1], zero in the dtype of the codes.
    """
    rows, columns = codes_NK.shape
    signed = codes_NK.dtype == torch.int8
    middle = 2 ** (bits - 1)
    scale_NG = scale_NG.expand(rows, -1)
    groups = scale_NG.shape[1]
    if zero_NG is None and not signed:
        zero_NG = torch.zeros(1, 1, dtype=codes_NK.dtype, device=codes_NK.device)
    zero_GN = None
    if zero_NG is not None:
        raised = zero_NG.to(torch.int16) + (middle if signed else 0)
        zero_GN = raised.to(torch.uint8).expand(rows, groups).t().contiguous()
    raised = (codes_NK.to(torch.int16) + (middle if signed else 0)).to(torch.uint8)
    scale_GN = scale_NG.to(dtype).t().contiguous()
    return CodeWords(pack_planar(raised, bits), scale_GN, zero_GN, -1 if groups == 1 else columns // groups, bits)


def planar_weight(weight: CodeWords, columns: int) -> Tensor:
    """[N, columns] values that a planar weight stands for, in the dtype of its scale; the kernels' reference."""
    codes = unpack_planar(weight.words, weight.bits, columns)
    if weight.table is not None:
        return _looked_up(codes, weight.scale, weight.table)
    scale_NG = weight.scale.t()
    zero = torch.full_like(weight.scale, 2 ** (weight.bits - 1)) if weight.zero is None else weight.zero
    return reference.dequantize(codes, scale_NG, zero.t())


def _looked_up(codes: Tensor, scale_GN: Tensor, table: LevelTable) -> Tensor:
    """[N, columns] the values of codes of a table, in the dtype of the scales."""
    levels = table.values[:-1].index_select(0, codes.flatten().int()).view(len(codes), len(scale_GN), -1)
    scaled = levels * (scale_GN.float() * table.values[-1]).t().unsqueeze(-1)
    return scaled.view(codes.shape).to(scale_GN.dtype)
