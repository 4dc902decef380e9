"""Packing codes into int32 words, as compressed-tensors stores them.

A row of K codes of n bits is one little-endian stream of bits: code k occupies bits [k n, k n + n) of the row, bit b of
the stream is bit b % 32 of word b // 32. A signed code q is stored as q + 2^(n-1). Rows are padded to whole words, so
a row takes ceil(K n / 32) words; 32 codes fill n words exactly.

    n = 4:  word 0 = q0 | q1 << 4 | ... | q7 << 28          n = 3:  word 0 = q0 | ... | q9 << 27 | (q10 & 3) << 30
                                                                    word 1 = q10 >> 2 | q11 << 1 | ...
"""

import torch
from torch import Tensor

WORD = 32


def words_of(count: int, bits: int) -> int:
    """int32 words that a row of `count` codes takes."""
    return -(-count * bits // WORD)


def pack_rows(codes: Tensor, bits: int, signed: bool = True) -> Tensor:
    """[R, K] codes (int8 or uint8, in range) -> [R, ceil(K bits / 32)] int32."""
    rows, count = codes.shape
    offset = 2 ** (bits - 1) if signed else 0
    padded = -(-count // WORD) * WORD
    values = torch.zeros(rows, padded, dtype=torch.int64, device=codes.device)
    values[:, :count] = codes.to(torch.int64) + offset
    runs = values.view(rows, -1, WORD)
    words = torch.zeros(rows, runs.shape[1], bits, dtype=torch.int64, device=codes.device)
    for k in range(WORD):
        word, shift = divmod(k * bits, WORD)
        words[:, :, word] |= runs[:, :, k] << shift & 0xFFFFFFFF
        if shift + bits > WORD:
            words[:, :, word + 1] |= runs[:, :, k] >> (WORD - shift)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).view(rows, -1)[:, : words_of(count, bits)].contiguous()


def unpack_rows(words: Tensor, bits: int, count: int, signed: bool = True) -> Tensor:
    """[R, ceil(count bits / 32)] int32 -> [R, count] int8 (uint8 when unsigned). Inverse of `pack_rows`."""
    rows = len(words)
    runs = -(-count // WORD)
    full = torch.zeros(rows, runs * bits, dtype=torch.int64, device=words.device)
    full[:, : words.shape[1]] = words.to(torch.int64) & 0xFFFFFFFF
    full = full.view(rows, runs, bits)
    codes = torch.empty(rows, runs, WORD, dtype=torch.int64, device=words.device)
    for k in range(WORD):
        word, shift = divmod(k * bits, WORD)
        value = full[:, :, word] >> shift
        if shift + bits > WORD:
            value = value | full[:, :, word + 1] << (WORD - shift)
        codes[:, :, k] = value & (2**bits - 1)
    offset = 2 ** (bits - 1) if signed else 0
    return (codes.view(rows, -1)[:, :count] - offset).to(torch.int8 if signed else torch.uint8)
