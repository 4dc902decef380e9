"""The inline assembly, run by a small emulator, against what the portable path computes: every word, bit for bit."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl

from compress.kernels.triton.int8_gemm import PRMT_BF16, PRMT_FP16, power8
from compress.kernels.triton.int8_planar_gemm import BYTES_4, BYTES_4_ZERO, BYTES_8, RAISED
from compress.kernels.triton.level_lookup import FULL_LOOK_UP, SIGNED_LOOK_UP
from compress.kernels.triton.unpack import LOP3_BF16, LOP3_FP16, power4
from compress.weights.levels import E2M1, NF4


def lop3(a, b, c, table):
    out = np.zeros_like(a)
    for row in range(8):
        if int(table) >> row & 1:
            out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return out


def prmt(a, b, selector):
    """Bytes 0 to 3 come from a, 4 to 7 from b; with bit 3 of a selector, eight copies of the top bit of that byte."""
    source = np.stack([word >> np.uint32(8 * i) & np.uint32(255) for word in (a, b) for i in range(4)])
    out = np.zeros_like(a)
    for i in range(4):
        pick = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = np.take_along_axis(source, (pick & np.uint32(7)).astype(np.int64)[None], 0)[0]
        byte = np.where(pick & np.uint32(8), (byte >> np.uint32(7)) * np.uint32(255), byte)
        out |= byte << np.uint32(8 * i)
    return out


OPERATIONS = {
    "lop3.b32": lambda a, b, c, table: lop3(a, b, c, table.flat[0]),
    "prmt.b32": prmt,
    "shr.u32": lambda a, count: a >> count,
    "shl.b32": lambda a, count: a << count,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "sub.u32": lambda a, b: a - b,
    "mov.b32": lambda a: a,
    "add.f32": lambda a, b: (a.view(np.float32) + b.view(np.float32)).view(np.uint32),
}


def emulate(ptx, outputs, word, *more):
    """Values of registers $0 ... after running `ptx` on $<outputs> = word (uint32 array), and more after it."""
    registers = {f"${outputs + i}": given for i, given in enumerate((word, *more))}

    def value(operand):
        if operand in registers:
            return registers[operand]
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full_like(word, number)

    for statement in re.split(r"[;{}\n]+", ptx):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        operation, operands = statement.split(None, 1)
        target, *sources = [part.strip() for part in operands.split(",")]
        registers[target] = OPERATIONS[operation](*map(value, sources))
    return [registers[f"${i}"] for i in range(outputs)]


def halves(registers):
    """The two 16-bit patterns of each 32-bit register: [2, count]."""
    return np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)]).astype(np.uint16)


@pytest.mark.parametrize(
    ("ptx", "bits", "dtype"),
    [
        (LOP3_FP16, 4, torch.float16),
        (LOP3_BF16, 4, torch.bfloat16),
        (PRMT_FP16, 8, torch.float16),
        (PRMT_BF16, 8, torch.bfloat16),
    ],
)
def test_unpacking_matches_the_portable_path(ptx, bits, dtype):
    low = np.arange(2**16, dtype=np.uint32)
    high = np.random.default_rng(0).permutation(low)
    language = tl.float16 if dtype == torch.float16 else tl.bfloat16
    for plane, register in enumerate(emulate(ptx, 16 // bits, low | high << np.uint32(16))):
        power = power4(plane, language) if bits == 4 else power8(language)
        for pattern, word in zip(halves(register), (low, high), strict=True):
            codes = torch.from_numpy((word >> np.uint32(bits * plane) & np.uint32(2**bits - 1)).astype(np.int32))
            portable = (codes + power).to(dtype)
            assert torch.equal(torch.from_numpy(pattern.astype(np.int32)), portable.view(torch.int16).int() & 0xFFFF)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_subtracting_power_and_zero_point_is_exact(bits, dtype):
    """In half precision, code + power minus zero + power is the integer code - zero, for every pair."""
    language = tl.float16 if dtype == torch.float16 else tl.bfloat16
    powers = {power4(plane, language) for plane in range(4)} if bits == 4 else {power8(language)}
    codes = torch.arange(2**bits)
    for power in powers:
        stored = (codes + power).to(dtype)
        zero = codes.to(dtype) + torch.tensor(power, dtype=dtype)
        assert torch.equal((stored[:, None] - zero[None, :]).double(), (codes[:, None] - codes[None, :]).double())


@pytest.mark.parametrize(("ptx", "bits", "zero"), [(BYTES_4, 4, False), (BYTES_4_ZERO, 4, True), (BYTES_8, 8, False)])
def test_words_become_bytes_of_planes(ptx, bits, zero):
    """Four words that follow each other, in two registers, give four bytes of every plane: every word in every place,
    with every zero point."""
    rng, planes = np.random.default_rng(0), 16 // bits
    words = np.stack([rng.permutation(2**16).astype(np.uint32) for _ in range(4)])
    zeros = rng.integers(0, 16, (planes, 2**16), dtype=np.uint32)
    given = [words[0] | words[1] << np.uint32(16), words[2] | words[3] << np.uint32(16)]
    given += [z * np.uint32(0x01010101) for z in zeros] if zero else []
    for plane, register in enumerate(emulate(ptx, planes, *given)):
        for place, word in enumerate(words):
            byte = (register >> np.uint32(8 * place) & np.uint32(255)).astype(np.uint8).view(np.int8)
            code = (word >> np.uint32(bits * plane) & np.uint32(2**bits - 1)).astype(np.int64)
            centred = code - zeros[plane] if zero else (code - 2 ** (bits - 1)) * (RAISED if bits == 4 else 1)
            assert np.array_equal(byte, centred)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("ptx", "levels"), [(SIGNED_LOOK_UP, E2M1), (FULL_LOOK_UP, E2M1), (FULL_LOOK_UP, NF4)])
def test_codes_become_the_levels_of_a_table(ptx, levels, dtype):
    """Every word in either half, beside words in another order."""
    low = np.arange(2**16, dtype=np.uint32)
    high = np.random.default_rng(0).permutation(low)
    patterns = torch.tensor(levels.values).to(dtype).view(torch.int16).numpy().view(np.uint16)
    registers = []
    for first in (0, 8)[: 1 if ptx is SIGNED_LOOK_UP else 2]:
        for shift in (0, 8):
            parts = (patterns[first : first + 8].astype(np.uint32) >> shift & 255).reshape(2, 4)
            words = (parts << np.arange(0, 32, 8)).sum(1).astype(np.uint32)
            registers += [np.full_like(low, word) for word in words for _ in range(2)]
    for plane, register in enumerate(emulate(ptx, 4, low | high << np.uint32(16), *registers)):
        for pattern, word in zip(halves(register), (low, high), strict=True):
            assert np.array_equal(pattern, patterns[word >> np.uint32(4 * plane) & np.uint32(15)])
