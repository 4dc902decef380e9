"""Reading of disassembled kernels: registers that are written while a matrix product may still read them."""

import pytest

pytest.importorskip("triton")

from machine_code import _written, instructions, overwritten_in_flight

LOOP = """
        /*0010*/                   DEPBAR.LE SB0, 0x6 ;
        /*0020*/                   IMAD.MOV.U32 {written}, RZ, RZ, 0x4b000000 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R56, R88, gdesc[UR16], R56, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R56, R104, gdesc[UR16], R56, gsb0 ;
        {wait}
        /*0070*/               @P6 BRA 0x10 ;
"""
WAIT = "/*0060*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;"


@pytest.mark.parametrize(
    ("opcode", "count"),
    [
        ("LDSM.16.M88", 1),
        ("LDSM.16.MT88.2", 2),
        ("LDSM.16.M88.4", 4),
        ("LDG.E.128", 4),
        ("IMAD.WIDE", 2),
        ("STS.128", 0),
    ],
)
def test_an_instruction_writes_as_many_registers_as_its_name_says(opcode, count):
    assert len(_written(opcode, "R8, [R4]")) == count


@pytest.mark.parametrize(
    ("written", "wait", "found"),
    [
        ("R104", "", 1),
        ("R107", "", 1),
        ("R103", "", 0),
        ("R108", "", 0),
        ("R88", "", 0),  # waited for within the step
        ("R104", WAIT.format(left="0x0"), 0),
        ("R104", WAIT.format(left="0x1"), 1),
    ],
)
def test_operands_of_the_last_product_of_a_step(written, wait, found):
    said = overwritten_in_flight(instructions(LOOP.format(written=written, wait=" " * 8 + wait)))
    assert len(said) == found
    assert all(written in line and "0x50" in line for line in said)
