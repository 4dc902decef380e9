"""Pictures of what `uses.py` has stored: KL by position, and the share of answers in the same words.

    python recipes/studies/models/draw_uses.py recipes/results/smollm2-135m-uses.json OUT.svg

A line for each way, named at its end, with bars of 95 %. Both axes of KL are logarithmic.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.evaluation.report.drawing import WIDE, Axis, alone, inline, label, rule, tick
from compress.evaluation.report.wording import Z95

LEFT, NAMES, HEIGHT, BOTTOM = 56.0, 96.0, 300.0, 40.0
Point = tuple[float, float, float, float]  # place to the right, value, and the ends of its interval
Line = tuple[str, Sequence[Point]]


def by_position(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """KL of the held-out text by the end of each band of positions."""
    lines: list[Line] = []
    for row in rows:
        text = next(text for text in row["texts"] if text["role"] == "held-out")
        bands = [(band["high"], band["kl_mean"]["value"], band["kl_mean"]["error"]) for band in text["by_position"]]
        lines.append((row["way"], [(at, v, max(v - Z95 * e, v / 10), v + Z95 * e) for at, v, e in bands]))
    return lines


def same_answers(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """The share of the original's answers that are the same after so many tokens."""
    lines: list[Line] = []
    for row in rows:
        text = next(text for text in row["texts"] if text["role"] == "answers")
        shares = [(each["tokens"], each["share"]) for each in text["agreement"] if each["tokens"] is not None]
        lines.append((row["way"], [(at, s["value"], *ends(s)) for at, s in shares]))
    return lines


def ends(figure: dict[str, Any]) -> tuple[float, float]:
    """The 95 % interval of a stored figure."""
    if figure["interval"] is not None:
        return figure["interval"][0], figure["interval"][1]
    return figure["value"] - Z95 * figure["error"], figure["value"] + Z95 * figure["error"]


def chart(lines: Sequence[Line], top: float, across: str, up: str, logarithmic: bool) -> list[str]:
    """The marks of a picture, from `top` downwards."""
    points = [point for _, line in lines for point in line]
    x = Axis(min(p[0] for p in points), max(p[0] for p in points), LEFT + 6, WIDE - NAMES, logarithmic=True)
    low, high = (min(p[2] for p in points), max(p[3] for p in points)) if logarithmic else (0.0, 1.0)
    y = Axis(low, high, top + HEIGHT - BOTTOM, top + 24, logarithmic)
    marks = [label(LEFT, top + 12, up)]
    for value in y.ticks():
        marks += [rule(LEFT, y.place(value), WIDE - NAMES, y.place(value))]
        marks += [label(LEFT - 6, y.place(value) + 4, f"{value:g}", "end")]
    marks += [tick(x.place(at), top + HEIGHT - BOTTOM + 16, f"{at:,.0f}") for at in sorted({p[0] for p in points})]
    marks.append(label((LEFT + WIDE - NAMES) / 2, top + HEIGHT - 6, across, "middle"))
    taken: list[float] = []
    for name, line in sorted(lines, key=lambda each: each[1][-1][1]):
        path = " ".join(f"{x.place(at):.1f},{y.place(value):.1f}" for at, value, *_ in line)
        marks.append(f'<polyline points="{path}" class="path"/>')
        marks += [rule(x.place(at), y.place(a), x.place(at), y.place(b), "bar") for at, _, a, b in line]
        place = min([y.place(line[-1][1]) + 4, *(each - 14 for each in taken[-1:])])
        taken.append(place)
        marks.append(label(WIDE - NAMES + 8, place, name))
    return marks


def main(stored: str, target: str) -> None:
    record = json.loads(Path(stored).read_text(encoding="utf-8"))
    rows = record["rows"]
    marks = chart(by_position(rows), 0, "tokens before it in the window, up to", "KL to the original", True)
    marks += chart(same_answers(rows), HEIGHT + 10, "tokens of the answer", "share of answers in the same words", False)
    about = f"{record['model']}: KL by position, and answers in the same words"
    Path(target).write_text(alone(inline(about, 2 * HEIGHT + 10, marks)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
