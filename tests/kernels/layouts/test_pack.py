"""Packing codes into words: the layout, its inverse, and agreement with compressed-tensors."""

import pytest
import torch
from combinations import every

from compress.kernels.layouts.words import pack_rows, unpack_rows, words_of

COUNTS = [1, 5, 31, 32, 33, 64, 352]
BITS = range(2, 9)


def random_codes(rows: int, count: int, bits: int, signed: bool) -> torch.Tensor:
    low = -(2 ** (bits - 1)) if signed else 0
    generator = torch.Generator().manual_seed(1000 * bits + count)
    codes = torch.randint(low, low + 2**bits, (rows, count), generator=generator)
    # Both ends of the range in every row that has room for them, whatever was drawn.
    codes[:, 0] = low + 2**bits - 1
    codes[:, -1] = low
    return codes.to(torch.int8 if signed else torch.uint8)


def bit_stream(row: list[int], bits: int, offset: int) -> list[int]:
    """The words of one row: code k in bits [k n, k n + n) of one long integer, cut into 32s, as signed words."""
    stream = sum((code + offset) << (k * bits) for k, code in enumerate(row))
    words = [(stream >> first) & 0xFFFFFFFF for first in range(0, len(row) * bits, 32)]
    return [word - 2**32 if word >= 2**31 else word for word in words]


@every("signed", [True, False])
@every("count", COUNTS)
@every("bits", BITS)
def test_unpacking_gives_back_the_codes(bits, count, signed):
    codes = random_codes(3, count, bits, signed)
    words = pack_rows(codes, bits, signed)
    assert words.dtype == torch.int32
    assert words.is_contiguous()
    unpacked = unpack_rows(words, bits, count, signed)
    assert unpacked.dtype == codes.dtype
    assert torch.equal(unpacked, codes)


@every("signed", [True, False])
@every("count", COUNTS)
@every("bits", BITS)
def test_words_are_one_little_endian_bit_stream(bits, count, signed):
    codes = random_codes(3, count, bits, signed)
    offset = 2 ** (bits - 1) if signed else 0
    expected = [bit_stream(row, bits, offset) for row in codes.tolist()]
    assert pack_rows(codes, bits, signed).tolist() == expected
    assert len(expected[0]) == words_of(count, bits)


def test_word_layout_of_four_and_three_bits_is_the_documented_one():
    q = [1, -8, 7, -1, 0, 3, -4, 5]
    u = [code + 8 for code in q]
    word = sum(value << (4 * k) for k, value in enumerate(u))
    assert pack_rows(torch.tensor([q], dtype=torch.int8), 4).tolist() == [[word - 2**32 if word >= 2**31 else word]]
    u = [5, 0, 7, 1, 2, 6, 3, 4, 7, 0, 6, 1]
    first = sum(value << (3 * k) for k, value in enumerate(u[:10])) | (u[10] & 3) << 30
    second = u[10] >> 2 | u[11] << 1
    packed = pack_rows(torch.tensor([u], dtype=torch.uint8), 3, signed=False)
    assert packed.tolist() == [[first - 2**32 if first >= 2**31 else first, second]]


@every("bits", BITS)
def test_thirty_two_codes_fill_whole_words(bits):
    assert words_of(32, bits) == bits
    assert words_of(33, bits) == bits + 1
    assert words_of(1, bits) == 1
    assert words_of(0, bits) == 0


@every("bits", BITS)
def test_rows_do_not_share_words(bits):
    codes = random_codes(4, 33, bits, signed=True)
    together = pack_rows(codes, bits)
    apart = torch.cat([pack_rows(codes[row : row + 1], bits) for row in range(4)])
    assert torch.equal(together, apart)


@every("rows", [1, 7, 32, 33])
@every("count", COUNTS)
@every("bits", BITS)
def test_words_equal_those_of_compressed_tensors_along_both_dimensions(bits, count, rows):
    theirs = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes(rows, count, bits, signed=True)
    across = theirs.pack_to_int32(codes, bits, packed_dim=1)
    assert torch.equal(pack_rows(codes, bits), across)
    assert torch.equal(unpack_rows(across, bits, count), theirs.unpack_from_int32(across, bits, codes.shape, 1))
    down = theirs.pack_to_int32(codes, bits, packed_dim=0)
    assert torch.equal(pack_rows(codes.t().contiguous(), bits).t(), down)
    unpacked = unpack_rows(down.t().contiguous(), bits, rows).t()
    assert torch.equal(unpacked, codes)
    # compressed-tensors 0.20 cannot view a single row of words as bytes along dim 0 (4 bits, 8 rows or fewer).
    if bits != 4 or len(down) > 1:
        assert torch.equal(unpacked, theirs.unpack_from_int32(down, bits, codes.shape, 0))
