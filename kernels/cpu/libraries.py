"""The libraries of C++ for CPUs, and what each is made of.

`gemm` chooses among *parts*: products, and attention, each with some of its parameters settled, which are libraries of
their own (`cpu_products.h`). So a model waits for the loops that it runs and for no others.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class CompileUnit(NamedTuple):
    """A file to compile, and the macros defined for it."""

    source: Path
    defined: tuple[str, ...] = ()


class Library(NamedTuple):
    """A library: words about it, its file, the macros that make a part of it, and the approximate CPU seconds of a
    build. pairs: it is of bfloat16 in pairs, which few processors multiply."""

    about: str
    file: str
    macros: tuple[str, ...] = ()
    seconds: int = 2
    pairs: bool = False


INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)
KINDS = (("floats", False), ("pairs", True))
INPUTS = {False: "inputs as float32", True: "bfloat16 inputs"}
ZEROS = {"middle": "", "codes": " with zero points", "numbers": " in tiles"}


def _parts() -> Iterator[tuple[str, Library]]:
    for bits, words in ((4, "Nibbles"), (8, "Bytes")):
        for kind, pairs in KINDS:
            macros = (f"UNIT_BITS={bits}", f"UNIT_PAIRS={int(pairs)}")
            about = f"{bits}-bit weights, {INPUTS[pairs]}"
            yield from _both(f"planar_{kind}_{bits}", Library(about, "floats", macros, pairs=pairs))
        yield f"planar_ints_{bits}", Library(f"{bits}-bit weights, int8 inputs", "ints", (f"UNIT_WORDS={words}",))
        strips = Library(f"{bits}-bit strips", "strips", (f"UNIT_BITS={bits}", "UNIT_TABLE=0"))
        yield from _both(f"strip_floats_{bits}", strips)
        for zeros, words in ZEROS.items():
            macros = (f"UNIT_BITS={bits}", f"UNIT_ZEROS={zeros.upper()}")
            about = f"{bits}-bit strips{words}, bfloat16 inputs"
            yield from _both(f"strip_pairs_{bits}_{zeros}", Library(about, "strip_pairs", macros, pairs=True))
    macros = ("UNIT_BITS=4", "UNIT_ZEROS=TABLE")
    about = "4-bit floats, bfloat16 inputs"
    yield "strip_pairs_4_table", Library(about, "strip_pairs", macros, pairs=True)
    yield "strip_floats_table", Library("4-bit floats", "strips", ("UNIT_TABLE=1",))
    yield "strip_ints", Library("4-bit strips, int8 inputs", "strip_ints")
    yield "int8_rows", Library("int8 weights, int8 inputs", "ints", ("UNIT_WORDS=Plain",))
    for bits, weights in ((4, "4-bit 2:4 weights"), (8, "8-bit 2:4 weights"), (16, "2:4 weights")):
        for kind, pairs in KINDS:
            macros = (f"UNIT_BITS={bits}", f"UNIT_PAIRS={int(pairs)}")
            about = f"{weights}, {INPUTS[pairs]}"
            yield f"halved_{kind}_{bits}", Library(about, "sparse24", macros, pairs=pairs)
    yield "entries_alone", Library("sparse weights", "sparse", ("UNIT_ENTRIES=1",), seconds=1)
    for name, dtype in (("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")):
        made = Library(f"attention in {dtype}", "attention", (f"UNIT_TYPE={name.upper()}",))
        yield f"attention_{name}", made._replace(seconds=1)


def _both(name: str, made: Library) -> Iterator[tuple[str, Library]]:
    """A product, and the same with the entries of a sparse weight added."""
    yield name, made
    about = f"{made.about}, sparse weights beside them"
    yield f"{name}_entries", made._replace(about=about, macros=(*made.macros, "UNIT_ENTRIES=1"))


PARTS = {name: each._replace(macros=(f"UNIT={name}", *each.macros)) for name, each in _parts()}
LIBRARIES = {
    "gemm": Library("the choice among products", "gemm", seconds=1),
    **PARTS,
    "columns": Library("rounding column by column", "columns", seconds=1),
    "dense": Library("products of many tokens by dense blocks", "dense", seconds=3),
    "operators": Library("calls of layers", "operators"),
    "laying": Library("layouts of codes", "laying", seconds=1),
    "steps": Library("steps of generating", "steps"),
    "states": Library("rotations and key-value caches", "states", seconds=1),
    "spill": Library("tensors on disk", "spill", seconds=1),
    "trellis": Library("paths through a trellis", "trellis", seconds=1),
    "trellis_products": Library("products with trellis codes", "trellis_products", seconds=3),
}
OF_LINUX = ("spill",)
LINKED_TO_TORCH = {"dense": ("torch_cpu",), "operators": ("torch_cpu",), "spill": ("c10",)}


def units(name: str) -> list[CompileUnit]:
    """The compilations that make a library."""
    made = LIBRARIES[name]
    return [CompileUnit(HERE / f"cpu_{made.file}.cpp", tuple(f"-D{macro}" for macro in made.macros))]


def sources(name: str) -> list[Path]:
    """Every file that a library is made of: its units, and what they include, for any processor."""
    found = list(dict.fromkeys(unit.source for unit in units(name)))
    for source in found:  # which grows
        included = [source.with_name(header) for header in INCLUDED.findall(source.read_text(encoding="utf-8"))]
        found += [header for header in dict.fromkeys(included) if header not in found]
    return found
