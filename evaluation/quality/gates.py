"""Gates: `kl_mean > 0.05` fails an evaluation whose mean KL is above 0.05.

    gate     FIGURE (> | >= | < | <=) LIMIT
    FIGURE   a figure of `statistics`, on whichever held-out text meets the condition; gap.FIGURE (`Evaluation.gap`);
             a figure of `encoders` or `classifiers`; bytes, bits_per_weight, bits_per_parameter;
             tasks.NAME.FIGURE, of `OF_TASKS`: a number of that task, or with * for NAME of whichever task
    LIMIT    NUMBER, noise or NUMBER * noise: the noise floor of the same figure on the same text

`tasks.*.interval_high < 0` fails a model that is worse than the original beyond chance, `kl_mean > 10 * noise` one that
is further from it than ten times its own rounding. A figure that was not measured, or is not a number, fails its gate:
no requested gate passes unchecked.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from compress.base.errors import InputError, one_of
from compress.evaluation.document import Evaluation, Figure
from compress.evaluation.quality.breakdowns import NEAR
from compress.evaluation.quality.classifiers import NAMES as CLASSES
from compress.evaluation.quality.encoders import NAMES as EMBEDDINGS
from compress.evaluation.quality.kl_and_perplexity import NAMES
from compress.evaluation.quality.texts import COMPARED

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
SIZES = ("bytes", "bits_per_weight", "bits_per_parameter")
GAPS = tuple(f"gap.{name}" for name in COMPARED)
WRITTEN = re.compile(r"\s*(.*?)\s*([<>]=?)\s*(.*?)\s*")
OF_NOISE = re.compile(r"(?:(\S+)\s*\*\s*)?noise")
OF_A_TASK = re.compile(r"tasks\.(.+)\.(\w+)")
OF_ITEMS = ("kl_mean", "flips", "flip_margin", "log_perplexity_ratio", "exact", "reference_exact", "unflipped")
PROBED = tuple(f"{role}.{name}" for role in ("answers", "recall", "tools") for name in OF_ITEMS)
FAR = ("far.kl_mean", "far.flips", "far.flip_margin")
ANY = "*"
OF_TASKS = (
    *("accuracy", "difference", "interval_low", "interval_high", "gained", "lost", "p_value", "p_adjusted"),
    *("accuracy_norm", "difference_norm", "perplexity", "log_perplexity_ratio"),
)


@dataclass(frozen=True)
class GateResult:
    """A gate held against an evaluation. expression: the condition that fails it. value: the figure; limit: what it was
    compared with, a multiple of the noise floor multiplied out; both None where they were not measured. reason: why it
    failed."""

    expression: str
    value: float | None
    limit: float | None
    passed: bool
    reason: str | None = None


@dataclass(frozen=True)
class Gate:
    """text: the gate as written, which is its name. of_noise: True where the limit is a multiple of the noise floor."""

    text: str
    figure: str
    comparison: str
    limit: float
    of_noise: bool = False

    def check(self, evaluation: Evaluation) -> GateResult:
        """Hold an evaluation against the gate: the first text or task that fails it, or the one nearest to failing."""
        nearest: tuple[float, GateResult] | None = None
        for value, floor, where in _values(evaluation, self.figure):
            result = self._against(value, floor, where, evaluation)
            if not result.passed:
                return result
            assert result.value is not None
            assert result.limit is not None
            beyond = result.value - result.limit
            if nearest is None or COMPARISONS[self.comparison](beyond, nearest[0]):
                nearest = beyond, result
        if nearest is not None:
            return nearest[1]
        reason = f"{self.figure} was not measured: {_why_not(evaluation, self.figure)}"
        return GateResult(self.text, None, None if self.of_noise else self.limit, False, reason)

    def _against(self, value: float | None, floor: float | None, where: str, evaluation: Evaluation) -> GateResult:
        """One value against its limit. where: the text or task, for the reason."""
        limit = self.limit if not self.of_noise else None if floor is None else self.limit * floor
        reason = None
        if value is None:
            reason = f"{self.figure} was not measured{where}: {_why_not(evaluation, self.figure)}"
        elif limit is None:
            why = evaluation.missing.get("noise", "it was not asked for (--noise-floor)")
            reason = f"the noise floor of {self.figure} was not measured{where}: {why}"
        elif math.isnan(value) or math.isnan(limit):
            reason = f"{self.figure} is not a number{where}"
        elif COMPARISONS[self.comparison](value, limit):
            beside = f", the noise floor {floor:.6g}" if self.of_noise else ""
            reason = f"{self.figure} is {in_words(value)}{where}{beside}"
        return GateResult(self.text, value, limit, reason is None, reason)


def parse_gate(text: str) -> Gate:
    """Parse a gate. Raises InputError for text that is not a gate, and for an unknown figure."""
    match = WRITTEN.fullmatch(text)
    noise = OF_NOISE.fullmatch(match[3]) if match else None
    limit = _number((noise[1] or "1") if noise else match[3]) if match else None
    if match is None or limit is None or not match[1]:
        raise InputError(
            f"gate {text!r}; write a figure, one of {', '.join(COMPARISONS)} and a number, like 'kl_mean > 0.05', or a "
            "number of noise floors, like 'kl_mean > 10 * noise'"
        )
    task = OF_A_TASK.fullmatch(match[1])
    if task is None:
        one_of("figure", match[1], (*NAMES, *EMBEDDINGS, *CLASSES, *SIZES, *GAPS, *PROBED, *FAR))
    else:
        one_of("figure of a task", task[2], OF_TASKS)
    if noise and match[1] not in NAMES:
        raise InputError(f"gate {text!r}; the noise floor has the figures of a text, {match[1]} is none of them")
    return Gate(text.strip(), match[1], match[2], limit, noise is not None)


def in_words(value: float) -> str:
    """A figure: whole numbers, like bytes, in full."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.6g}"


def broken_gates(results: Sequence[GateResult]) -> list[str]:
    """A line for each gate that failed."""
    return [f"gate {each.expression!r} failed: {each.reason}" for each in results if not each.passed]


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _values(evaluation: Evaluation, figure: str) -> Iterator[tuple[float | None, float | None, str]]:
    """(value, noise floor, text or task) of a figure, wherever it was measured. A value or floor of None was not
    measured."""
    if figure in SIZES:
        if evaluation.size is not None:
            yield float(getattr(evaluation.size, figure)), None, ""
        return
    if figure in GAPS:
        measured = evaluation.gap.get(figure.removeprefix("gap."))
        if measured is not None:
            yield measured.value, None, ""
        return
    if match := OF_A_TASK.fullmatch(figure):
        yield from _of_tasks(evaluation, match[1], match[2])
        return
    kind, _, own = figure.partition(".")
    for text in evaluation.texts:
        if figure in FAR and text.role == "held-out" and text.by_position:
            last = getattr(text.by_position[-1], own)
            yield None if last is None else last.value, None, f" at the end of windows of {text.name}"
        for part in text.by_part if figure in PROBED and text.role == kind else ():
            if own in part.figures:
                yield part.figures[own].value, None, f" on {part.name}"
        if text.role == "held-out" and figure in text.figures:
            floor = (text.noise or {}).get(figure)
            yield text.figures[figure].value, None if floor is None else floor.value, f" on {text.name}"
    others = [(each.figures, each.name) for each in evaluation.embeddings]
    others += [(each.figures, each.name) for each in evaluation.classifications]
    for figures, name in others:
        if figure in figures:
            yield figures[figure].value, None, f" on {name}"


def _of_tasks(evaluation: Evaluation, name: str, figure: str) -> Iterator[tuple[float | None, float | None, str]]:
    """As `_values`, for a number of the task with a name, or of all tasks."""
    for task in evaluation.tasks:
        if name in (ANY, task.name):
            end = ("interval_low", "interval_high").index(figure) if figure.startswith("interval") else None
            value = getattr(task, figure) if end is None else None if task.interval is None else task.interval[end]
            yield value.value if isinstance(value, Figure) else value, None, f" on {task.name}" if name == ANY else ""


def _why_not(evaluation: Evaluation, figure: str) -> str:
    if figure in SIZES:
        return evaluation.missing.get("size", "there is no size")
    if match := OF_A_TASK.fullmatch(figure):
        names = [task.name for task in evaluation.tasks]
        if match[1] not in (ANY, *names):
            return f"no task is called {match[1]!r}; there are {', '.join(names)}" if names else "no task was given"
        return evaluation.missing.get("reference", f"the task has no {match[2]}") if names else "no task was given"
    if figure in GAPS and all(text.role == "held-out" for text in evaluation.texts):
        return "no calibration text was given"
    if figure in PROBED and not any(text.role == figure.partition(".")[0] for text in evaluation.texts):
        return f"it was not asked for (--{figure.partition('.')[0]})"
    if figure in FAR:
        return f"windows of text are not longer than {NEAR} tokens (--length)"
    if figure in EMBEDDINGS and not evaluation.embeddings:
        return "no pairs of sentences were given"
    if figure in CLASSES and not evaluation.classifications:
        return "no labelled inputs were given"
    if figure in NAMES and not evaluation.texts:
        return "no text was given"
    return evaluation.missing.get("reference", "it is not defined on this text")
