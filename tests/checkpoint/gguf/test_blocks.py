"""Blocks of GGUF hold the codes that they are given, as gguf-py reads them."""

import gguf
import numpy as np
import pytest
import torch

from compress.checkpoint.gguf.blocks import Q1_0, Q2_0, Q4_0, Q5_0, Q8_0, TQ2_0, pack_q4_1

ROWS, COLUMNS = 3, 512


def drawn(least: int, most: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [3, 512], the extremes among them, and float16 scales of either sign; one is subnormal, one 0."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(least, most + 1, (ROWS, COLUMNS), generator=generator, dtype=torch.int16)
    codes[0, :2] = torch.tensor([least, most])
    scale = torch.randn(ROWS, COLUMNS // size, generator=generator).to(torch.float16)
    scale[0, 0], scale[1, 0] = 2**-20, 0
    return codes, scale


def expected(codes: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    return (codes.float() * scale.float().repeat_interleave(COLUMNS // scale.shape[1], 1)).numpy()


@pytest.mark.parametrize("block", [Q4_0, Q5_0, Q8_0, TQ2_0], ids=lambda block: block.name)
def test_gguf_py_reads_what_was_packed(block):
    codes, scale = drawn(block.least, block.most, block.size)
    packed = block.pack(codes, scale).numpy()
    assert packed.shape == (ROWS, block.row(COLUMNS))
    kind = gguf.GGMLQuantizationType[block.name]
    assert gguf.GGML_QUANT_SIZES[kind] == (block.size, block.bytes)
    assert np.array_equal(gguf.quants.dequantize(packed, kind), expected(codes, scale))


def test_minima_are_read_as_packed():
    codes, scale = drawn(0, 15, 32)
    least = scale * -4
    packed = pack_q4_1(codes, scale, least).numpy()
    values = expected(codes, scale) + least.float().repeat_interleave(32, 1).numpy()
    assert np.array_equal(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1), values)


def test_two_bits_lie_one_behind_the_other():
    """gguf-py 0.19.0 has no Q2_0: here is dequantize_row_q2_0 of ggml-quants.c (llama.cpp#24448) in loops, which gave
    the same as that of xllamacpp 2026.10.11549. A code that we have is 1 - q there, by the scale of the other sign."""
    codes, scale = drawn(Q2_0.least, Q2_0.most, Q2_0.size)
    packed = Q2_0.pack(codes, scale)
    assert packed.shape == (ROWS, Q2_0.row(COLUMNS))
    assert Q2_0.bytes * 8 / Q2_0.size == 2.25
    values = np.zeros((ROWS, COLUMNS), np.float32)
    for row in range(ROWS):
        for i, block in enumerate(packed[row].numpy().reshape(-1, Q2_0.bytes)):
            d = float(block[:2].view(np.float16)[0])
            for j in range(Q2_0.size):
                values[row, i * Q2_0.size + j] = (int(block[2 + j // 4] >> (2 * (j % 4)) & 3) - 1) * d
    assert np.array_equal(values, expected(codes, scale))


def test_signs_lie_bit_after_bit():
    """gguf-py has no reader of Q1_0: here is dequantize_row_q1_0 of ggml-quants.c in loops."""
    codes, scale = drawn(0, 1, Q1_0.size)
    codes = codes * 2 - 1
    packed = Q1_0.pack(codes, scale).numpy()
    assert packed.shape == (ROWS, Q1_0.row(COLUMNS))
    values = np.zeros((ROWS, COLUMNS), np.float32)
    for row in range(ROWS):
        for i, block in enumerate(packed[row].reshape(-1, Q1_0.bytes)):
            d = float(block[:2].view(np.float16)[0])
            for j in range(Q1_0.size):
                bit = block[2 + j // 8] >> (j % 8) & 1
                values[row, i * Q1_0.size + j] = (2 * int(bit) - 1) * d
    assert np.array_equal(values, expected(codes, scale))
