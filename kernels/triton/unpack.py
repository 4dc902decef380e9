"""4-bit weights in registers: from planar words to operands of the matrix instruction.

A word of four nibbles (`layouts.words`) becomes four half-precision numbers without an integer conversion. A nibble n,
put into the mantissa of a power of two, is that power plus n times the weight of the bits it occupies:

    fp16  0x6400 | n        = 1024 + n          fp16  0x5400 | n << 4   = 64 + n        (no shift for planes 1 and 3)
    bf16  0x4300 | n        =  128 + n          7 bits of mantissa: every plane is shifted down first

One `lop3` (a & mask) | power does two weights at once, two words being neighbours in one 32-bit register. The GEMM
then subtracts power + zero point, which is exact, before it scales; folding both into one multiply-add is not exact:
1024 * scale is rounded to half a step.
"""

import triton
import triton.language as tl

LOP3_FP16 = """
{ .reg .b32 high;
  lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
  lop3.b32 $1, $4, 0x00f000f0, 0x54005400, 0xea;
  shr.u32 high, $4, 8;
  lop3.b32 $2, high, 0x000f000f, 0x64006400, 0xea;
  lop3.b32 $3, high, 0x00f000f0, 0x54005400, 0xea; }
"""
LOP3_BF16 = """
{ .reg .b32 a, b, c;
  shr.u32 a, $4, 4;
  shr.u32 b, $4, 8;
  shr.u32 c, $4, 12;
  lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
  lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
  lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
  lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea; }
"""
_LOP3_FP16 = tl.constexpr(LOP3_FP16)
_LOP3_BF16 = tl.constexpr(LOP3_BF16)


@triton.constexpr_function
def power4(plane: int, DT: tl.dtype) -> float:
    """The offset that `unpack4` adds to the nibbles of a plane."""
    if DT == tl.bfloat16:
        return 128.0
    return 1024.0 if plane % 2 == 0 else 64.0


@triton.jit
def unpack4(words, DT: tl.constexpr, ASM: tl.constexpr):
    """int16 tile -> four tiles of DT, nibble + power4(plane). Both paths give the same bits."""
    if ASM and DT == tl.float16:
        return tl.inline_asm_elementwise(
            _LOP3_FP16,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif ASM and DT == tl.bfloat16:  # noqa: RET505  a constexpr branch must be an else to stay uncompiled
        return tl.inline_asm_elementwise(
            _LOP3_BF16,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = words.to(tl.int32)
        return (
            ((wide & 15) + power4(0, DT)).to(DT),
            ((wide >> 4 & 15) + power4(1, DT)).to(DT),
            ((wide >> 8 & 15) + power4(2, DT)).to(DT),
            ((wide >> 12 & 15) + power4(3, DT)).to(DT),
        )


@triton.jit
def raise4(zero, PLANE: tl.constexpr, DT: tl.constexpr, ASM: tl.constexpr):
    """uint8 zero points -> zero + power4(PLANE) in DT: placed in a mantissa like the codes, without a conversion. The
    portable path converts and adds, to the same bits."""
    if ASM and DT == tl.float16:
        if PLANE % 2 == 0:
            return (zero.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        else:  # noqa: RET505
            return ((zero.to(tl.int16) << 4) | 0x5400).to(tl.float16, bitcast=True)
    elif ASM and DT == tl.bfloat16:
        return (zero.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        return zero.to(DT) + power4(PLANE, DT)
