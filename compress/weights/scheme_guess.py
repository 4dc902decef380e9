"""Guesses the scheme behind other tools' names, for error messages. Imports no torch, so that errors come at once."""

import re

FLOAT8 = re.compile(r"fp8|float8|f8|e4m3|e5m2")
WITH_INPUTS = ("mxfp4", "nvfp4", "mxfp8")
LEVELS = re.compile(r"mxfp[468]|nvfp4|nf4")
WEIGHTS_AND_INPUTS = re.compile(r"w([2-8])a(\d+)")
BITS = re.compile(r"(?:w|q|nf|u?int|[iu])?([2-8])(?:-?bits?)?")
INPUTS = ("2", "3", "4", "8", "16")


def likely_scheme(given: str) -> str | None:
    """The scheme that `W4A16`, `int4`, `4bit`, `w4a16_asym` or `float8` probably stands for; None for other words."""
    word = given.lower().replace("_", "-")
    if word in ("iq4-nl", "iq4nl"):
        return "iq4_nl"
    if level := LEVELS.match(word):
        return level[0] if level[0] in WITH_INPUTS and "a16" not in word else f"{level[0]}a16"
    if FLOAT8.search(word):
        return "fp8-block" if "block" in word else "fp8"
    if (both := WEIGHTS_AND_INPUTS.search(word)) and both[2] in INPUTS:
        return both[0]
    bits = BITS.fullmatch(word)
    return None if bits is None else f"w{bits[1]}a16"
