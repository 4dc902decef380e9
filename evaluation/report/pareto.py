"""Quality against bytes, over runs: which of them nothing beats in both, and a picture of it.

Compared are runs that were measured alike: on the same tokens, against the same reference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from compress.evaluation.document import Figure
from compress.evaluation.report import wording
from compress.evaluation.report.drawing import LETTER, STRONG, WIDE, Axis, hover, inline, label, padded, rule, tick
from compress.evaluation.report.runs import ReportedRun
from compress.evaluation.report.verdict import held_out

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 330.0, 66.0, 14.0, 16.0, 44.0
RADIUS = 5.0
LOGARITHMIC_FROM = 4.0  # times between the ends of an axis
LINE = 13.0  # about the height of a letter
MEASURES = (("kl_mean", "KL to the original, nats per token"), ("perplexity", "perplexity"))


@dataclass(frozen=True)
class Point:
    """A run on the plane: bytes, and a figure of which less is better."""

    name: str
    recipe: str
    bytes: int
    figure: Figure


def undominated(places: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the pairs that no other is at most as large as in both figures and smaller in one; of equals all."""

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a != b and a[0] <= b[0] and a[1] <= b[1]

    return {i for i, place in enumerate(places) if not any(beats(other, place) for other in places)}


def front(points: Sequence[Point]) -> set[int]:
    """Indices of the points that are not dominated, of equals all."""
    return undominated([(point.bytes, point.figure.value) for point in points])


def comparable(runs: Sequence[ReportedRun]) -> tuple[str, list[ReportedRun], list[str]]:
    """(figure, runs that can be compared by it, why the others are not): the largest set that was measured alike."""
    groups: dict[tuple[object, ...], list[ReportedRun]] = {}
    left = []
    for run in runs:
        text, size, reference = held_out(run.evaluation), run.evaluation.size, run.evaluation.reference
        figure = None if text is None else next((key for key, _ in MEASURES if _finite(text.figures.get(key))), None)
        if text is None or size is None or figure is None:
            left.append(f"{run.name}: {'quality' if size is not None else 'size'} was not measured")
            continue
        original = None if reference is None else reference.identity
        groups.setdefault((figure, text.sha256, text.length, text.stride, original), []).append(run)
    if not groups:
        return MEASURES[0][0], [], left
    chosen = max(groups, key=lambda key: len(groups[key]))
    others = [run for key, group in groups.items() if key != chosen for run in group]
    left += [f"{run.name}: measured on other tokens, or against another original" for run in others]
    return str(chosen[0]), groups[chosen], left


def _finite(figure: Figure | None) -> bool:
    return figure is not None and math.isfinite(figure.value)


def points_of(runs: Sequence[ReportedRun], key: str, recipes: Sequence[str]) -> list[Point]:
    """The runs of `comparable` as points."""
    points = []
    for run, recipe in zip(runs, recipes, strict=True):
        text, size = held_out(run.evaluation), run.evaluation.size
        assert text is not None
        assert size is not None
        points.append(Point(run.name, recipe, size.bytes, text.figures[key]))
    return points


def draw_front(points: Sequence[Point], key: str) -> str:
    """The picture: bytes to the right, the figure upwards, each logarithmic where it spans much."""
    unit = 1 << (10 * min(3, int(math.log2(max(p.bytes for p in points)) // 10)))
    sizes = [point.bytes / unit for point in points]
    values = [point.figure.value for point in points]
    across, up = (_axis(found, i) for i, found in enumerate((sizes, values)))
    best = front(points)
    marks = _grid(across, up, f"weight files, {wording.UNITS[int(math.log2(unit)) // 10]}", dict(MEASURES)[key])
    spots = [(across.place(x), up.place(y)) for x, y in zip(sizes, values, strict=True)]
    steps = sorted(spots[i] for i in best)
    path = " ".join(f"{'L' if i else 'M'}{x:.1f},{y:.1f}" for i, (x, y) in enumerate(_stairs(steps)))
    marks.append(f'<path d="{path}" class="path" stroke-opacity=".45"/>')
    taken = [(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in spots]
    labels, circles = [], []
    for i in sorted(range(len(points)), key=lambda i: (i not in best, i)):
        (x, y), point, style = spots[i], points[i], "main" if i in best else "other"
        ends = wording.bounds(point.figure)
        bar, kind = "", "bar" if i in best else "otherbar"
        if ends is not None:
            bar = rule(x, up.place(max(ends[0], up.low)), x, up.place(ends[1]), kind)
        figures = f"{wording.data(point.bytes)}, {wording.with_error(point.figure)}"
        said = f"{wording.name(point.name)}\n{point.recipe}\n{figures}"
        circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" class="{style}"/>'
        circles.append(f"<g>{hover(said)}{bar}{circle}</g>")
        labels += place_label(point.name, x, y, taken, "on strong" if i in best else "on")
    about = f"{len(points)} runs by bytes and {dict(MEASURES)[key]}; {len(best)} of them on the front"
    return inline(about, HEIGHT, [*marks, *reversed(circles), *labels])  # the front over the others


def _axis(values: Sequence[float], which: int) -> Axis:
    least = min(values)
    logarithmic = least > 0 and max(values) / least >= LOGARITHMIC_FROM
    low, high = padded(values, logarithmic)
    if which == 0:
        return Axis(low, high, LEFT, WIDE - RIGHT, logarithmic)
    return Axis(low if least <= 0 or logarithmic else max(low, 0.0), high, HEIGHT - BOTTOM, TOP, logarithmic)


def _grid(across: Axis, up: Axis, below: str, beside: str) -> list[str]:
    marks = []
    for value in up.ticks():
        y = up.place(value)
        marks += [rule(LEFT, y, WIDE - RIGHT, y), label(LEFT - 6, y + 4, f"{value:.4g}", "end")]
    for value in across.ticks():
        x = across.place(value)
        marks += [rule(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 4)]
        marks += [tick(x, HEIGHT - BOTTOM + 18, f"{value:.4g}")]
    marks.append(label((LEFT + WIDE - RIGHT) / 2, HEIGHT - 6, below, "middle"))
    turned = f"rotate(-90 15 {(HEIGHT - BOTTOM) / 2:.0f})"
    marks.append(
        f'<text x="15" y="{(HEIGHT - BOTTOM) / 2:.0f}" text-anchor="middle" transform="{turned}">{beside}</text>'
    )
    return marks


def _stairs(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The edge of the front: to the right at one height, then down to the next point."""
    made: list[tuple[float, float]] = []
    for x, y in corners:
        if made:
            made.append((x, made[-1][1]))
        made.append((x, y))
    return made


def place_label(name: str, x: float, y: float, taken: list[tuple[float, float, float, float]], style: str) -> list[str]:
    """A label beside a point where there is room for it; none where there is not (the table has all names)."""
    text = wording.name(name)
    width = (STRONG if "strong" in style else LETTER) * len(text)
    places = [
        (x + 7, y - 7, "start", x + 7),
        (x + 9, y + 14, "start", x + 9),
        (x - 9, y + 4, "end", x - 9 - width),
        (x - 7, y - 7, "end", x - 7 - width),
        (x - 7, y + 14, "end", x - 7 - width),
        (x, y + 18, "middle", x - width / 2),
    ]
    for at, base, anchor, start in places:
        box = (start, base - LINE + 2, start + width, base + 3)
        inside = box[0] >= LEFT and box[2] <= WIDE - 2 and box[1] >= 0 and box[3] <= HEIGHT - BOTTOM
        if inside and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
            taken.append(box)
            return [label(at, base, text, anchor, style)]
    return []
