"""Pictures (SVG) that need no other software: a frame with axes, and marks in it."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

SIZE, MARGIN = (720, 440), 56
POWERS_FROM = 100  # ratio of the ends of a logarithmic axis from which powers of ten mark it


@dataclass(frozen=True)
class Frame:
    """A linear axis to the right, from `left` to `right`, and a logarithmic one upwards, from `low` to `high` (> 0)."""

    left: float
    right: float
    low: float
    high: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The coordinates of a point in the picture."""
        width, height = SIZE
        across = (x - self.left) / ((self.right - self.left) or 1.0)
        up = math.log(y / self.low) / (math.log(self.high / self.low) or 1.0)
        return MARGIN + across * (width - 2 * MARGIN), height - MARGIN - up * (height - 2 * MARGIN)

    def axes(self, ticks: Sequence[float]) -> list[str]:
        """Marks of the axes: to the right at `ticks`, upwards at powers of ten, or at five places where the axis is too
        short for these."""
        width, height = SIZE
        marks = []
        for tick in ticks:
            x, _ = self.place(tick, self.low)
            marks.append(f'<text x="{x:.1f}" y="{height - MARGIN + 20}" text-anchor="middle">{tick:g}</text>')
        for value in self.levels():
            _, y = self.place(self.left, value)
            marks.append(f'<text x="{MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
            marks.append(f'<line x1="{MARGIN}" x2="{width - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ccc"/>')
        return marks

    def levels(self) -> list[float]:
        """The values marked on the axis upwards."""
        if self.high / self.low >= POWERS_FROM:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        return [self.low * (self.high / self.low) ** (i / 4) for i in range(5)]


def key(kinds: Sequence[tuple[str, str]]) -> list[str]:
    """A legend: marks for each (name, colour)."""
    marks = []
    for i, (kind, colour) in enumerate(kinds):
        x, y = SIZE[0] - 150, MARGIN + 18 * i
        marks.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>')
        marks.append(f'<text x="{x + 12}" y="{y + 4}">{html.escape(kind)}</text>')
    return marks


def picture(title: str, marks: Sequence[str]) -> str:
    """The whole SVG file. title is plain text, marks are SVG."""
    width, height = SIZE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            'font-size="13">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="{MARGIN}" y="28" font-size="15">{html.escape(title)}</text>',
            *marks,
            "</svg>",
            "",
        ]
    )
