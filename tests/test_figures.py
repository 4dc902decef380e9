"""Tables of documents hold the numbers of the stored results that their section links to."""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"(?<![\w.^-])-?\d[\d,]*(\.\d+)?(e-?\d+)?%?(?![\w.])")
RESULT = re.compile(r"results/([\w.-]+\.json)\)")
RESULTS = {path.name: path for room in ("recipes", "kernels") for path in (ROOT / room / "results").glob("*.json")}
# A table shows a stored number itself, or in percent, millions, MiB or GiB.
UNITS = (1, 100, 1e-6, 1 / 2**20, 1 / 2**30)
# Heads of tables whose rows are sums, means or counts of stored numbers, or are compared with other rows.
COMPUTED = (
    "| model | 3 bits | 4 bits |",
    "| | prefill |",
    "| student |",
    "| | float | rounded |",
    "| | CPU s |",
    "| method | peak of anonymous memory |",
    "| tokens | sm_80",
    "| tokens | MXFP4 |",
    "| on 16 ranks |",
)


def pages() -> list[Path]:
    """The documents that link to stored results."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("compress/*/README.md"), ROOT / "README.md"]
    return [page for page in found if RESULT.search(page.read_text(encoding="utf-8"))]


def stored(value: Any) -> Iterator[float]:
    """Every number of a JSON value, those in its texts and keys included."""
    if isinstance(value, dict):
        for each in (*value, *value.values()):
            yield from stored(each)
    elif isinstance(value, list):
        for each in value:
            yield from stored(each)
    elif isinstance(value, str):
        yield from map(float, re.findall(r"\d+(?:\.\d+)?", value))
    elif isinstance(value, int | float):
        yield float(value)


def precision(shown: str) -> tuple[float, float]:
    """(The number, half of the unit of its last digit.)"""
    plain = shown.rstrip("%").replace(",", "")
    mantissa, _, exponent = plain.partition("e")
    return float(plain), 0.5001 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def is_stored(shown: str, numbers: list[float]) -> bool:
    """Whether one of the numbers, in ascending order, is shown as this text."""
    number, half = precision(shown)
    for unit in UNITS:
        at = bisect_left(numbers, (number - half) / unit)
        if at < len(numbers) and numbers[at] <= (number + half) / unit:
            return True
    return False


def is_derived(shown: str, row: list[str]) -> bool:
    """Whether a number of at most three digits is the quotient or the difference of two others of its row."""
    number, half = precision(shown)
    if sum(map(str.isdigit, shown.lstrip("-0."))) > 3:
        return False
    percent = 100 if shown.endswith("%") else 1
    for (a, da), (b, db) in permutations(map(precision, row), 2):
        if b and abs(percent * a / b - number) <= half + percent * abs(a / b) * (da / max(abs(a), da) + db / abs(b)):
            return True
        if abs(a - b - number) <= half + da + db:
            return True
    return False


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tables_hold_stored_numbers(page: Path) -> None:
    missing = []
    for section in re.split(r"(?m)^#+ ", page.read_text(encoding="utf-8")):
        files = set(RESULT.findall(section))
        if not files:
            continue
        numbers = sorted(n for f in files for n in stored(json.loads(RESULTS[f].read_text(encoding="utf-8"))))
        for table in re.findall(r"(?m)(?:^\|.*\n)+", section):
            head, _, *rows = table.splitlines()
            if head.startswith(COMPUTED):
                continue
            for row in rows:
                shown = [m[0].rstrip(",") for m in NUMBER.finditer(re.sub(r"`[^`]*`", "", row))]
                missing += [(s, row) for s in shown if not is_stored(s, numbers) and not is_derived(s, shown)]
    assert not missing, "\n".join(f"{shown} in {row}" for shown, row in missing)
