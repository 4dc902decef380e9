"""Compile a kernel for a GPU that is not there, and read its registers, spills, shared memory and instructions.

The compiler, the assembler and the disassembler all ship with Triton. Needs a process in which Triton does not
interpret: the decorator decides at import.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

# Registers of a thread that hold its part of the left operand of a wgmma instruction.
OPERAND_REGISTERS = 4
# Compute capabilities: A100; L4 and GeForce 40; H100 and H200; B200; GeForce 50.
AMPERE, ADA, HOPPER, BLACKWELL, GEFORCE = 80, 89, 90, 100, 120


@dataclass(frozen=True)
class CompiledCost:
    """Resources of one compiled kernel. Bytes, except the counts of PTX instructions and the instructions per weight.
    overwritten: see `overwritten_in_flight`."""

    registers: int
    stack: int
    local: int
    shared: int
    wgmma: int
    mma: int
    tcgen05: int
    float_adds: int
    loop_instructions: int
    loop_opcodes: dict[str, int]
    overwritten: tuple[str, ...] = ()

    def per_element(self, num_warps: int, elements: int) -> float:
        """Thread instructions of one main loop iteration, per element of the tile that it consumes."""
        return self.loop_instructions * num_warps * 32 / elements


def compile_for(
    kernel: triton.runtime.JITFunction,
    arch: int,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    aligned: Sequence[str] = (),
    num_warps: int = 4,
    num_stages: int = 3,
) -> CompiledKernel:
    """Compile `kernel` for compute capability `arch` (90 for 9.0).

    types: argument -> "*fp16", "i32" ...; constants: argument -> value (None for a pointer that is absent); aligned:
    integer arguments that are multiples of 16, which decides the width of memory accesses.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    pointers = [name for name, kind in signature.items() if kind.startswith("*")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in [*pointers, *aligned]}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _disassemble(compiled: CompiledKernel, flag: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, flag, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> Iterator[tuple[int, str, str]]:
    """(address, opcode, operands) of a disassembly."""
    for line in sass.splitlines():
        match = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line)
        if match:
            yield int(match[1], 16), match[3], match[4]


def main_loop(code: Iterable[tuple[int, str, str]]) -> list[str]:
    """Opcodes between the target of a backward branch and the branch: the longest such stretch with a matrix product,
    or the longest at all. Everything where nothing loops."""
    code = list(code)
    position = {address: i for i, (address, _, _) in enumerate(code)}
    loops = []
    for i, (address, opcode, operands) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else None
        if target and int(target[1], 16) < address and int(target[1], 16) in position:
            loops.append([name for _, name, _ in code[position[int(target[1], 16)] : i + 1]])
    products = [loop for loop in loops if any("MMA" in name for name in loop)]
    return max(products or loops, key=len, default=[name for _, name, _ in code])


def overwritten_in_flight(code: Iterable[tuple[int, str, str]]) -> list[str]:
    """Instructions that write a register which an asynchronous matrix product (wgmma) before them may still read: none
    where the program waits for products before it uses their registers for something else.

    The code is followed in order, each loop twice. Products go in groups, which "gsb0" closes and `WARPGROUP.DEPBAR`
    waits for (PTX ISA, "Asynchronous warpgroup-level matrix operations").
    """
    code = list(code)
    position = {address: i for i, (address, _, _) in enumerate(code)}
    groups: list[dict[int, int]] = [{}]  # {register that a product reads: address of the product}, the open one last
    taken, found, i = set(), dict[str, None](), 0
    while i < len(code):
        address, opcode, operands = code[i]
        i += 1
        if opcode.startswith("BRA"):
            place = re.search(r"0x([0-9a-f]+)", operands)
            target = int(place[1], 16) if place else address
            if target < address and address not in taken and target in position:
                taken.add(address)
                i = position[target]
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            kept = int(operands.rsplit(",", 1)[1], 16)
            groups = [*groups[:-1][max(0, len(groups) - 1 - kept) :], groups[-1]]
        elif "GMMA" in opcode:
            given = [part.strip() for part in operands.split(",")]
            left = re.fullmatch(r"R(\d+)(\.reuse)?", given[1])
            if left:
                groups[-1] |= dict.fromkeys(range(int(left[1]), int(left[1]) + OPERAND_REGISTERS), address)
            if given[-1].startswith("gsb"):
                groups.append({})
        else:
            for register in _written(opcode, operands):
                said = f"{opcode} {operands} at {address:#x} writes R{register}, read by the product at"
                found |= {f"{said} {group[register]:#x}": None for group in groups if register in group}
    return list(found)


def _written(opcode: str, operands: str) -> range:
    """The registers that an instruction writes."""
    first = re.match(r"R(\d+)\b", operands)
    if first is None or opcode.startswith(("ST", "RED", "BAR")):
        return range(0)
    matrices = re.search(r"M(T?)88\.([24])$", opcode)  # of a load from shared memory
    wide = re.search(r"\.(64|128)\b", opcode)
    count = int(matrices[2]) if matrices else int(wide[1]) // 32 if wide else 2 if ".WIDE" in opcode else 1
    return range(int(first[1]), int(first[1]) + count)


def cost(compiled: CompiledKernel) -> CompiledCost:
    """Read a compiled kernel. Raises RuntimeError where the resource report cannot be parsed."""
    report = _disassemble(compiled, "-res-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if match is None:
        raise RuntimeError(f"no resource usage in the report of cuobjdump: {report[:200]!r}")
    code = list(instructions(_disassemble(compiled, "-sass")))
    loop = main_loop(code)
    ptx = compiled.asm["ptx"]
    return CompiledCost(
        registers=int(match[1]),
        stack=int(match[2]),
        local=int(match[3]),
        shared=compiled.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
        tcgen05=ptx.count("tcgen05.mma"),
        float_adds=len(re.findall(r"\badd(\.rn)?\.f32\b", ptx)),
        loop_instructions=len(loop),
        loop_opcodes=dict(Counter(name.split(".")[0] for name in loop).most_common()),
        overwritten=tuple(overwritten_in_flight(code)),
    )
