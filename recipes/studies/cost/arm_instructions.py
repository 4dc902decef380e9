"""Instructions per weight of the compiled loops for ARM, from what a cross-compiler makes of them. Nothing is run.

    python recipes/studies/cost/arm_instructions.py --json FILE

It needs aarch64-linux-gnu-g++ (Debian: apt-get install g++-aarch64-linux-gnu). Counted is the loop of a function that
holds most of its products; `products` multiply and add, `stack` reach for what found no register.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from compress.evaluation.provenance import origin
from compress.kernels.cpu import build, processor
from compress.kernels.cpu.libraries import units

PREFIX = "aarch64-linux-gnu-"
PRODUCTS = ("fmla", "sdot", "smmla", "bfdot", "smull", "smull2", "smlal", "smlal2")
FLAGS = (*build.FLAGS, "-fno-inline-functions-called-once")  # so that loops stay under their own names
LINE_WEIGHTS, BLOCK_WEIGHTS = 128, 512  # of 4 bits in 64 bytes; in as many as are summed at once


class Loop(NamedTuple):
    """A loop over a strip: its part (`libraries.PARTS`), the function for so many tokens, and the weights of a turn."""

    part: str
    function: str
    weights: int


LOOPS = {
    "float32, zero points in the middle": Loop("strip_floats_4", r"strip_floats<.*CentredValues, {}[,>]", LINE_WEIGHTS),
    "float32, zero points": Loop("strip_floats_4", r"strip_floats<.*CodeValues<4>, {}[,>]", LINE_WEIGHTS),
    "float32, a table": Loop("strip_floats_table", r"strip_floats<.*TableValues, {}[,>]", LINE_WEIGHTS),
    "bfloat16, zero points in the middle": Loop("strip_pairs_4_middle", r"strip_pairs<4, {}[,>]", LINE_WEIGHTS),
    "bfloat16, zero points": Loop("strip_pairs_4_codes", r"strip_pairs<4, {}[,>]", LINE_WEIGHTS),
    "int8 inputs": Loop("strip_ints", r"strip_ints<{}>", BLOCK_WEIGHTS),
}
TOKENS = (1, 2, 4)


def functions(part: str, target: str, folder: Path) -> dict[str, list[str]]:
    """{name: instructions} of a part that is compiled for a target."""
    (unit,) = units(part)
    made = folder / "unit.o"
    words = [
        f"{PREFIX}g++",
        *FLAGS,
        *processor.flags_of(target),
        *unit.defined,
        "-c",
        str(unit.source),
        "-o",
        str(made),
    ]
    subprocess.run(words, check=True)
    dump = subprocess.run(
        [f"{PREFIX}objdump", "-dC", "--no-show-raw-insn", str(made)], check=True, capture_output=True, text=True
    ).stdout
    found = {}
    for block in dump.split("\n\n"):
        head, _, body = block.partition("\n")
        if named := re.match(r"[0-9a-f]+ <(.*)>:", head):
            found[named[1]] = [line for line in body.splitlines() if re.match(r"\s*[0-9a-f]+:\t", line)]
    return found


def innermost(lines: list[str]) -> list[list[str]]:
    """The loops of a function that hold no other loop."""
    place = {int(line.split(":")[0], 16): at for at, line in enumerate(lines)}
    loops = []
    for at, line in enumerate(lines):
        jump = re.search(r"\t(?:b|b\.\w+|cbn?z|tbn?z)\s.*?([0-9a-f]+) <", line)
        if jump and place.get(int(jump[1], 16), at + 1) <= at:
            loops.append((place[int(jump[1], 16)], at))
    holds = [any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops) for loop in loops]
    return [lines[a : b + 1] for (a, b), outer in zip(loops, holds, strict=True) if not outer]


def counted(lines: list[str], weights: int) -> dict[str, float | int]:
    """Figures of the loop that multiplies most."""

    def products(loop: list[str]) -> int:
        return sum(Counter(line.split("\t")[1].split()[0] for line in loop)[name] for name in PRODUCTS)

    loop = max(innermost(lines), key=products)
    return {
        "instructions": len(loop),
        "products": products(loop),
        "stack": sum("[sp" in line for line in loop),
        "per_weight": round(len(loop) / weights, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for target in processor.ARM:
            parts = sorted({loop.part for loop in LOOPS.values()})
            compiled = {part: functions(part, target, Path(folder)) for part in parts}
            for name, loop in LOOPS.items():
                for tokens in TOKENS:
                    wanted = re.compile(loop.function.format(tokens))
                    bodies = [body for of, body in compiled[loop.part].items() if wanted.search(of)]
                    if bodies:
                        figures = counted(max(bodies, key=len), loop.weights)
                        rows.append({"target": target, "loop": name, "tokens": tokens, **figures})
                        print(rows[-1], file=sys.stderr)
    version = subprocess.run([f"{PREFIX}g++", "--version"], check=True, capture_output=True, text=True).stdout
    told = {**origin(torch.device("cpu")), "compiler": version.splitlines()[0], "rows": rows}
    told["command"] = "python recipes/studies/cost/arm_instructions.py"
    asked.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
