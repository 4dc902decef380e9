"""Codes of a table of 16 levels, looked up in registers: from planar words to operands of the matrix instruction.

A byte permutation (`prmt`) picks four bytes out of eight by four nibbles, of which three bits count. So a table of
eight numbers of 16 bits is two pairs of registers, one of low and one of high bytes, and a word of four codes is a
selector. Two words, neighbours in one 32-bit register, are first mixed so that a selector has the codes of two planes:

    codes of words v, w in planes 0 to 3:   v0 v1 v2 v3 w0 w1 w2 w3   ->   v0 w0 v2 w2   and   v1 w1 v3 w3

and the two bytes of each number are then joined, two numbers a register. Where the second half of a table is the first,
negated (E2M1), the highest bit of a code is the sign; else both halves are looked up, and that bit chooses.
"""

import triton
import triton.language as tl

from compress.kernels.layouts.words import LevelTable

SIGNED, FULL = 1, 2  # kinds of tables


def _look_up_ptx(full: bool) -> str:
    """The assembly: planes 0 and 2, then 1 and 3. full: both halves of the table are looked up.

    $0 to $3: planes; $4: the words; $5, $7 low and $9, $11 high bytes of eight levels (each is given twice, for two
    words); $13, $15 and $17, $19: of the other eight."""
    registers = ", ".join("mstuhl" + "pq" * full)
    lines = ["", f"{{ .reg .b32 {registers};", "  and.b32 m, $4, 0x77777777;"]
    for plane, mixed, signs in (
        (0, ("shr.u32 t, m, 12;", "lop3.b32 t, m, t, 0x0f0f0f0f, 0xe4;", "shl.b32 s, $4, 4;"), "s, s"),
        (1, ("shr.u32 t, m, 4;", "shr.u32 u, m, 16;", "lop3.b32 t, t, u, 0x0f0f0f0f, 0xe4;"), "$4, $4"),
    ):
        found = [*mixed, f"prmt.b32 s, {signs}, {'0xb9a8' if full else '0x3120'};"]
        found += ["prmt.b32 l, $5, $7, t;", "prmt.b32 h, $9, $11, t;"]
        if full:  # a byte of ones where the highest bit is set chooses the other half
            found += ["prmt.b32 p, $13, $15, t;", "prmt.b32 q, $17, $19, t;"]
            found += ["lop3.b32 l, p, l, s, 0xe4;", "lop3.b32 h, q, h, s, 0xe4;"]
        else:
            found += ["lop3.b32 h, s, 0x80808080, h, 0xea;"]
        found += [f"prmt.b32 ${plane}, l, h, 0x5140;", f"prmt.b32 ${plane + 2}, l, h, 0x7362;"]
        lines += [f"  {line}" for line in found]
    return "\n".join(lines) + " }\n"


SIGNED_LOOK_UP, FULL_LOOK_UP = _look_up_ptx(False), _look_up_ptx(True)
_SIGNED_LOOK_UP = tl.constexpr(SIGNED_LOOK_UP)
_FULL_LOOK_UP = tl.constexpr(FULL_LOOK_UP)
_SIGNED_OPERANDS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 9))
_FULL_OPERANDS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 17))


def kind_of_table(table: LevelTable | None) -> int:
    """The kind of a table as kernels take it; 0 where there is none."""
    if table is None:
        return 0
    return SIGNED if table.signed else FULL


@triton.jit
def _four_bytes(table_ptr, FIRST: tl.constexpr, DT: tl.constexpr):
    """(Low bytes, high bytes) of four levels in DT, int32."""
    low = 0
    high = 0
    for i in tl.static_range(4):
        bits = tl.load(table_ptr + FIRST + i).to(DT).to(tl.int16, bitcast=True).to(tl.int32)
        low |= (bits & 255) << (8 * i)
        high |= (bits >> 8 & 255) << (8 * i)
    return low, high


@triton.jit
def byte_planes(table_ptr, TABLE: tl.constexpr, DT: tl.constexpr, ASM: tl.constexpr):
    """The table fp32 [17] as registers of the assembly: low bytes of eight levels, high bytes, then of the others."""
    if ASM:
        la, ha = _four_bytes(table_ptr, 0, DT)
        lb, hb = _four_bytes(table_ptr, 4, DT)
        if TABLE == 1:
            return la, lb, ha, hb
        else:  # noqa: RET505
            lc, hc = _four_bytes(table_ptr, 8, DT)
            ld, hd = _four_bytes(table_ptr, 12, DT)
            return la, lb, ha, hb, lc, ld, hc, hd
    else:
        return (table_ptr,)


@triton.jit
def look_up(words, planes, TABLE: tl.constexpr, DT: tl.constexpr, ASM: tl.constexpr):
    """int16 tile -> four tiles of DT, the levels of the codes of each plane. planes: of `byte_planes`. Both paths give
    the same bits."""
    if ASM:
        found = tl.inline_asm_elementwise(
            _SIGNED_LOOK_UP if TABLE == 1 else _FULL_LOOK_UP,
            _SIGNED_OPERANDS if TABLE == 1 else _FULL_OPERANDS,
            (words,) + planes,  # noqa: RUF005  the compiler takes no star
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
        return (
            found[0].to(DT, bitcast=True),
            found[1].to(DT, bitcast=True),
            found[2].to(DT, bitcast=True),
            found[3].to(DT, bitcast=True),
        )
    else:  # noqa: RET505  a constexpr branch must be an else to stay uncompiled
        wide = words.to(tl.int32)
        table_ptr = planes[0]
        return (
            tl.load(table_ptr + (wide & 15)).to(DT),
            tl.load(table_ptr + (wide >> 4 & 15)).to(DT),
            tl.load(table_ptr + (wide >> 8 & 15)).to(DT),
            tl.load(table_ptr + (wide >> 12 & 15)).to(DT),
        )
