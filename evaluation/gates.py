"""Gates: `kl_mean > 0.05` fails an evaluation of which that is true.

    gate     FIGURE (> | >= | < | <=) NUMBER
    FIGURE   a figure of `statistics`, on whichever held-out text meets the condition; gap.FIGURE (`Evaluation.gap`);
             a figure of `encoders`; bytes, bits_per_weight, bits_per_parameter

A figure that was not measured, or is no number, fails its gate: nothing that was asked for is let through unseen.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from compress.errors import InputError, one_of
from compress.evaluation.document import Evaluation
from compress.evaluation.encoders import NAMES as EMBEDDINGS
from compress.evaluation.statistics import NAMES
from compress.evaluation.texts import COMPARED

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
SIZES = ("bytes", "bits_per_weight", "bits_per_parameter")
GAPS = tuple(f"gap.{name}" for name in COMPARED)
WRITTEN = re.compile(r"\s*([\w.]+)\s*([<>]=?)\s*(\S+)\s*")


@dataclass(frozen=True)
class Gate:
    """text: as it was written, which is its name."""

    text: str
    figure: str
    comparison: str
    limit: float

    def broken(self, found: Evaluation) -> str | None:
        """Why an evaluation fails it, in a few words; None where it does not."""
        seen = False
        for value, where in _values(found, self.figure):
            seen = True
            if math.isnan(value):
                return f"{self.figure} is not a number{where}"
            if COMPARISONS[self.comparison](value, self.limit):
                return f"{self.figure} is {value:.6g}{where}"
        return None if seen else f"{self.figure} was not measured: {_why_not(found, self.figure)}"


def parse_gate(text: str) -> Gate:
    """A gate as it is written. Raises InputError for one that is none, or of a figure that nobody knows."""
    match = WRITTEN.fullmatch(text)
    limit = _number(match[3]) if match else None
    if match is None or limit is None:
        raise InputError(
            f"gate {text!r}; write a figure, one of {', '.join(COMPARISONS)} and a number, like 'kl_mean > 0.05'"
        )
    figure = one_of("figure", match[1], (*NAMES, *EMBEDDINGS, *SIZES, *GAPS))
    return Gate(text.strip(), figure, match[2], limit)


def broken_gates(found: Evaluation, gates: Sequence[Gate]) -> list[str]:
    """What to say about the gates that an evaluation fails."""
    reasons = ((gate, gate.broken(found)) for gate in gates)
    return [f"gate {gate.text!r} failed: {reason}" for gate, reason in reasons if reason is not None]


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _values(found: Evaluation, figure: str) -> Iterator[tuple[float, str]]:
    """What was measured of a figure, and on what."""
    if figure in SIZES:
        if found.size is not None:
            yield float(getattr(found.size, figure)), ""
        return
    if figure in GAPS:
        measured = found.gap.get(figure.removeprefix("gap."))
        if measured is not None:
            yield measured.value, ""
        return
    for text in found.texts:
        if text.role == "held-out" and figure in text.figures:
            yield text.figures[figure].value, f" on {text.name}"
    for pairs in found.embeddings:
        if figure in pairs.figures:
            yield pairs.figures[figure].value, f" on {pairs.name}"


def _why_not(found: Evaluation, figure: str) -> str:
    if figure in SIZES:
        return found.missing.get("size", "there is no size")
    if figure in GAPS and all(text.role == "held-out" for text in found.texts):
        return "no calibration text was given"
    if figure in EMBEDDINGS and not found.embeddings:
        return "no pairs of sentences were given"
    if figure in NAMES and not found.texts:
        return "no text was given"
    return found.missing.get("reference", "it is not defined on this text")
