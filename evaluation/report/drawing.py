"""Pictures (SVG) inside a page: they take their colours from its style, light or dark, and its text size on a phone."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

LETTER, STRONG = 8.6, 9.2  # units, about the width of a letter and of a bold one in the widest of the usual fonts
WIDE = 480  # units of width; a phone shows about three quarters of a unit per pixel, a desk one
INK = (
    "svg.drawn{width:100%;height:auto;display:block;font:13px system-ui,sans-serif}svg.drawn text{fill:var(--soft)}"
    "svg.drawn .grid{stroke:var(--line)}svg.drawn .main{fill:var(--accent)}svg.drawn .other{fill:var(--faint)}"
    "svg.drawn .path{fill:none;stroke:var(--accent);stroke-width:1.5}svg.drawn .bar{stroke:var(--accent)}"
    "svg.drawn .bound{stroke:var(--warn);stroke-width:1.5}"
    "svg.drawn .otherbar{stroke:var(--faint)}svg.drawn text.strong{fill:var(--ink);font-weight:600}"
    "svg.drawn text.on{paint-order:stroke;stroke:var(--paper);stroke-width:4px;stroke-linejoin:round}"
)
COLOURS = (
    "--ink:#1c1f23;--soft:#5d6670;--line:#e4e6e9;--paper:#fff;--raised:#f6f7f8;--accent:#2a6db0;--faint:#b4bac1;"
    "--warn:#9a5b00"
)
DARK = (
    "--ink:#e6e8eb;--soft:#9aa4ae;--line:#2c3238;--paper:#14171a;--raised:#1c2024;--accent:#6aa9e8;--faint:#565f68;"
    "--warn:#e0a23c"
)


@dataclass(frozen=True)
class Axis:
    """Values from low to high (both > 0 where it is logarithmic), drawn between two places."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """The coordinate of a value; values beyond the ends are drawn at the ends."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)
        else:
            share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Three to eight round values inside: on a logarithmic axis 1, 2 and 5 times powers of ten, or powers alone."""
        if not self.logarithmic or self.high / self.low < 3:
            return round_values(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [f * 10.0**p for p in powers for f in factors if self.low <= f * 10.0**p <= self.high]
            if len(found) <= MOST_TICKS:
                return found
        return found[:: math.ceil(len(found) / MOST_TICKS)]


MOST_TICKS = 6


def round_values(low: float, high: float) -> list[float]:
    """At most six multiples of 1, 2 or 5 times a power of ten, between two values; none between infinite ones."""
    spread = (high - low) or abs(low) or 1.0
    if not math.isfinite(spread):
        return []
    power = 10.0 ** math.floor(math.log10(spread / MOST_TICKS))
    step = next(f * power for f in (1, 2, 5, 10) if spread / (f * power) <= MOST_TICKS)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def padded(values: Sequence[float], logarithmic: bool, share: float = 0.08) -> tuple[float, float]:
    """Ends of an axis that holds all values, with some space beside them."""
    low, high = min(values), max(values)
    if logarithmic:
        factor = (high / low) ** share if high > low else 2.0
        return low / factor, high * factor
    beside = share * (high - low) or abs(low) * share or 1.0
    return low - beside, high + beside


def label(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> str:
    """A line of text; words are plain text."""
    named = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{html.escape(words)}</text>'


def tick(x: float, y: float, words: str) -> str:
    """A mark of an axis to the right, centered below its place but never beyond the ends of the picture."""
    half = LETTER * len(words) / 2
    return label(min(max(x, half), WIDE - half), y, words, "middle")


def rule(x1: float, y1: float, x2: float, y2: float, style: str = "grid") -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def hover(words: str) -> str:
    """A tooltip with these words."""
    return f"<title>{html.escape(words)}</title>"


def inline(about: str, height: float, marks: Sequence[str]) -> str:
    """A picture for a page that has the style INK. about: a description for readers who cannot see it."""
    name = html.escape(about, quote=True)
    inside = "".join(marks)
    return f'<svg class="drawn" viewBox="0 0 {WIDE} {height:.0f}" role="img" aria-label="{name}">{inside}</svg>'


def alone(drawn: str) -> str:
    """An inline picture as a file of its own, light or dark as its viewer prefers."""
    style = f"svg{{{COLOURS};background:var(--paper)}}@media(prefers-color-scheme:dark){{svg{{{DARK}}}}}{INK}"
    head, tail = drawn.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{tail}\n'
