"""The table of number formats: the numbers that weights and inputs of a layer are rounded to, by the word of a scheme.

Options, grids, plans, exports, layers, messages and help ask it; it imports no torch, so that none of them waits. A new
format of levels is an entry of `LEVELS`, its levels in `weights.levels`, and its storage in `weights.formats.levels`.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

Granularity = Literal["tensor", "channel", "group", "token", "block"]
NumberType = Literal["int", "float", "e3m2", "sign", "normal", "nonlinear"]
StoredNumbers = Literal["stored", "float16"]
ScaleNumbers = Literal[StoredNumbers, "e8m0", "e4m3"]
FLOATS = ("float", "e3m2")  # types of numbers with a sign, an exponent and a significand

MIN_BITS, NARROW, WIDE, UNROUNDED = 2, 4, 8, 16


@dataclass(frozen=True)
class NumberFormat:
    """The numbers of a scheme.

    bits, type, scales: of weights (`weights.grid`). input_bits: of inputs, numbers of the same type; 16: they stay as
    they are. per: the weights that share a scale; those of a group, where options may choose others. group_size: the
    only one that the format has; None: an option. blocks: inputs of a row that a block of GGUF holds; None where GGUF
    has none. vllm: it has kernels for them.
    """

    bits: int
    input_bits: int = UNROUNDED
    type: NumberType = "int"
    per: Granularity = "group"
    group_size: int | None = None
    scales: ScaleNumbers = "stored"
    blocks: int | None = None
    vllm: bool = False

    @property
    def rounds_inputs(self) -> bool:
        return self.input_bits < UNROUNDED

    @property
    def of_levels(self) -> bool:
        """True for levels, or float8, in groups of the format's own size."""
        return self.group_size is not None

    @property
    def floating(self) -> bool:
        """True for floating-point numbers."""
        return self.type in FLOATS

    @property
    def has_groups(self) -> bool:
        """True where options choose the size of groups."""
        return self.per == "group" and self.group_size is None


# {name: numbers}; "a16" after the name says that inputs stay as they are.
LEVELS = {
    "mxfp4": NumberFormat(NARROW, type="float", group_size=32, scales="e8m0", blocks=32, vllm=True),
    "nvfp4": NumberFormat(NARROW, type="float", group_size=16, scales="e4m3", blocks=64, vllm=True),
    "mxfp6": NumberFormat(6, type="float", group_size=32, scales="e8m0"),
    "mxfp6e3m2": NumberFormat(6, type="e3m2", group_size=32, scales="e8m0"),
    "mxfp8": NumberFormat(WIDE, type="float", group_size=32, scales="e8m0"),
    "nf4": NumberFormat(NARROW, type="normal", group_size=64),
    "iq4_nl": NumberFormat(NARROW, type="nonlinear", group_size=32, scales="float16", blocks=32),
}
ALONE = ("iq4_nl",)  # without "a16": other inputs than those that stay as they are are unheard of
WITH_INPUTS = {
    name: replace(LEVELS[name], input_bits=LEVELS[name].bits, blocks=None, vllm=True)
    for name in ("mxfp4", "nvfp4", "mxfp8")
}
SCHEMES: dict[str, NumberFormat] = {
    **{f"w{bits}a16": NumberFormat(bits, vllm=True) for bits in range(MIN_BITS, WIDE + 1)},
    "w2a2": NumberFormat(2, 2),
    "w3a3": NumberFormat(3, 3),
    "w4a4": NumberFormat(NARROW, NARROW),
    "w4a8": NumberFormat(NARROW, WIDE, vllm=True),
    "w8a8": NumberFormat(WIDE, WIDE, per="channel", vllm=True),
    "fp8": NumberFormat(WIDE, WIDE, "float", per="channel", vllm=True),
    # A scale per 128 x 128 weights, and per 128 inputs of a token.
    "fp8-block": NumberFormat(WIDE, WIDE, "float", per="block", vllm=True),
    **{name if name in ALONE else f"{name}a16": numbers for name, numbers in LEVELS.items()},
    **WITH_INPUTS,
}
WITHOUT_GROUPS = [name for name, numbers in SCHEMES.items() if numbers.per != "group"]
BY_NAME = ", ".join([f"w{MIN_BITS}a16 ... w{WIDE}a16", *[*SCHEMES][WIDE - MIN_BITS + 1 :]])

FLOAT8 = re.compile(r"fp8|float8|f8|e4m3|e5m2")
WEIGHTS_AND_INPUTS = re.compile(r"w([2-8])a(\d+)")
BITS = re.compile(r"(?:w|q|nf|u?int|[iu])?([2-8])(?:-?bits?)?")
INPUTS = ("2", "3", "4", "8", "16")


def likely_scheme(given: str) -> str | None:
    """The scheme that `W4A16`, `int4`, `4bit`, `w4a16_asym` or `float8` probably stands for; None for other words."""
    word = given.lower().replace("_", "-")
    longest_first = sorted(LEVELS, key=len, reverse=True)
    flat = word.replace("-", "")
    if level := next((name for name in longest_first if flat.startswith(name.replace("_", ""))), None):
        return level if level in ALONE or (level in WITH_INPUTS and "a16" not in word) else f"{level}a16"
    if FLOAT8.search(word):
        return "fp8-block" if "block" in word else "fp8"
    if (both := WEIGHTS_AND_INPUTS.search(word)) and both[2] in INPUTS:
        return both[0]
    bits = BITS.fullmatch(word)
    return None if bits is None else f"w{bits[1]}a16"
