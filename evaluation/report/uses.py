"""The distance from the original by use: prose, long contexts, answers, facts to recall, tool calls.

A use is judged by its flips, the share of tokens with another first choice than the original's (Dutta et al. 2024,
"Accuracy is Not All You Need", arXiv 2407.09141, count the flips of answers):

    close     the 95 % interval ends below 3 %
    differs   between the two, or too little text to tell
    far       the interval begins above 10 %

Where a task has a right answer (a fact to recall, a tool call), the share of exact ones stands beside the original's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compress.evaluation.document import Agreed, Band, Evaluation, Figure, TextResult
from compress.evaluation.report import wording
from compress.evaluation.report.content import Block, Picture, ReportTable, Section, Words
from compress.evaluation.report.drawing import WIDE, Axis, hover, inline, label, rule, tick

CLOSE, FAR = 0.03, 0.1  # of flips
COLUMNS = ("use", "tokens", "KL", "flips", "exact", "95 % interval", "original", "")
TITLE = "By use (flips: tokens with another first choice)"
HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 200.0, 56.0, 8.0, 38.0, 12.0


@dataclass(frozen=True)
class Use:
    """A use, and its figures; exact, reference_exact: of items with a right answer, or of answers."""

    name: str
    tokens: int
    kl: Figure | None
    flips: Figure | None
    exact: Figure | None = None
    reference_exact: Figure | None = None

    @property
    def verdict(self) -> str:
        """close, differs or far; empty without a reference."""
        if self.flips is None:
            return ""
        found = wording.bounds(self.flips)
        return "differs" if found is None else "close" if found[1] < CLOSE else "far" if found[0] > FAR else "differs"

    def row(self) -> tuple[str, ...]:
        """The cells of `COLUMNS`."""
        own = wording.NONE if self.exact is None else wording.share(self.exact.value)
        return (
            self.name,
            wording.count(self.tokens),
            _cell(self.kl),
            _cell(self.flips, 100, " %"),
            own,
            wording.interval(self.exact, 100, " %"),
            wording.NONE if self.reference_exact is None else wording.share(self.reference_exact.value),
            self.verdict,
        )


def uses_of(evaluation: Evaluation) -> Iterator[Use]:
    """The uses that were measured."""
    for text in evaluation.texts:
        same, kl = text.figures.get("same_top"), text.figures.get("kl_mean")
        if text.role == "held-out":
            yield Use(wording.name(text.name), text.tokens, kl, None if same is None else _rest(same))
            if len(text.by_position) > 1:
                last = text.by_position[-1]
                yield Use(f"  beyond {last.low:,.0f}", last.tokens, last.kl_mean, last.flips)
        for part in text.by_part if text.role != "recall" else ():
            figures = part.figures
            exact = [figures.get(name) if part.name != "prose" else None for name in ("exact", "reference_exact")]
            name = part.name if text.role == "answers" else f"tools: {part.name}"
            yield Use(name, part.tokens, figures.get("kl_mean"), figures.get("flips"), *exact)
        if text.role == "recall":
            exact = [_share_with(text, name) for name in ("exact", "reference_exact")]
            yield Use("recall", text.tokens, kl, None if same is None else _rest(same), *exact)


def table(evaluation: Evaluation) -> ReportTable | None:
    """A row for each use; None where only one text was measured, which the other tables show."""
    uses = list(uses_of(evaluation))
    if len(uses) < 2:
        return None
    return ReportTable(COLUMNS, [use.row() for use in uses], TITLE, left=frozenset({len(COLUMNS) - 1}))


def section(evaluation: Evaluation) -> Section | None:
    """The table of uses, and behind it positions, answers and facts to recall."""
    shown = table(evaluation)
    if shown is None:
        return None
    note = (
        "close: fewer than 3 of 100 tokens have another first choice than the original's (95 % interval); far: more "
        "than 10 do. exact: answers, calls or facts of which each token is the first choice."
    )
    blocks: list[Block] = [shown, Words(note, "note")]
    for text in evaluation.texts:
        if len(text.by_position) > 1:
            blocks += [_by_position(text.by_position), _positions(text.by_position)]
        if text.agreement:
            blocks += [_agreement(text.agreement), _agreed(text.agreement)]
        if text.role == "recall":
            blocks.append(_recall(text))
    return Section("Distance from the original by use", blocks)


def _rest(share: Figure) -> Figure:
    """One less a share."""
    ends = None if share.interval is None else (1 - share.interval[1], 1 - share.interval[0])
    return Figure(1 - share.value, share.error, share.token_error, ends)


def _share_with(text: TextResult, share: str) -> Figure | None:
    """The share of all items that have a share of `by_part`; None where it was not measured."""
    found = text.items_with(share)
    return None if found is None else Figure(found[0] / found[1])


def _cell(figure: Figure | None, scale: float = 1.0, unit: str = "") -> str:
    """A figure with its error, or a dash."""
    return wording.NONE if figure is None else wording.with_error(figure, scale, unit)


def _by_position(bands: Sequence[Band]) -> ReportTable:
    rows = [
        (
            f"{band.low:,.0f} to {band.high:,.0f}",
            wording.count(band.tokens),
            _cell(band.kl_mean),
            _cell(band.flips, 100, " %"),
            _cell(band.flip_margin),
        )
        for band in bands
    ]
    columns = ("tokens before", "tokens", "KL, mean", "other first choice", "margin of these, nats")
    return ReportTable(columns, rows, "By position in the window")


def _agreed(shares: Sequence[Agreed]) -> ReportTable:
    rows = [
        (
            "to the end" if each.tokens is None else wording.count(each.tokens),
            wording.share(each.share.value),
            wording.interval(each.share, 100, " %"),
        )
        for each in shares
    ]
    return ReportTable(("tokens", "same answers", "95 % interval"), rows, "Answers in the same words", folded=True)


def _recall(text: TextResult) -> ReportTable:
    rows = []
    for part in text.by_part:
        shares = (_cell(part.figures.get(name), 100, " %") for name in ("exact", "reference_exact"))
        cells = (_cell(part.figures.get(name)) for name in ("kl_mean", "log_perplexity_ratio"))
        rows.append((part.name, wording.count(part.items), *shares, *cells))
    columns = (
        "kind and distance",
        "facts",
        "recalled",
        "by the original",
        "KL",
        wording.LABELS["log_perplexity_ratio"],
    )
    return ReportTable(columns, rows, "Facts to recall")


def _positions(bands: Sequence[Band]) -> Picture:
    """KL by position, on a logarithmic axis of positions."""
    points = [(band.high, band.kl_mean) for band in bands if band.kl_mean is not None]
    return _curve(
        "KL by position", "tokens before it in the window", points, "KL of tokens by their place; bars: 95 %."
    )


def _agreement(shares: Sequence[Agreed]) -> Picture:
    """The share of answers in the same words, by their length."""
    points = [(each.tokens, each.share) for each in shares if each.tokens is not None]
    caption = "Share of the original's answers that this model begins with the same words; bars: 95 %."
    return _curve("Answers in the same words", "tokens of the answer", points, caption, most=1.0)


def _curve(
    title: str, across: str, points: Sequence[tuple[float, Figure]], caption: str, most: float | None = None
) -> Picture:
    """Figures with their intervals, joined by a line; the axis to the right is logarithmic. most: the end of the axis
    upwards."""
    ends = [wording.bounds(figure) or (figure.value, figure.value) for _, figure in points]
    top = most or 1.05 * max(high for _, high in ends) or 1.0
    low, high = points[0][0], max(points[-1][0], points[0][0] + 1)
    x = Axis(low, high, LEFT + 8, WIDE - RIGHT - 8, logarithmic=True)
    y = Axis(0, top, HEIGHT - BOTTOM, TOP)
    marks = []
    for value in y.ticks():
        marks.append(rule(LEFT, y.place(value), WIDE - RIGHT, y.place(value)))
        marks.append(label(LEFT - 6, y.place(value) + 4, wording.number(value, 2), "end"))
    path = " ".join(f"{x.place(at):.1f},{y.place(figure.value):.1f}" for at, figure in points)
    marks.append(f'<polyline points="{path}" class="path"/>')
    for (at, figure), (least, largest) in zip(points, ends, strict=True):
        said = hover(f"{at:,.0f}: {wording.with_error(figure)}")
        marks.append(rule(x.place(at), y.place(least), x.place(at), y.place(largest), "bar"))
        marks.append(
            f'<circle cx="{x.place(at):.1f}" cy="{y.place(figure.value):.1f}" r="3" class="main">{said}</circle>'
        )
        marks.append(tick(x.place(at), HEIGHT - BOTTOM + 16, f"{at:,.0f}"))
    marks.append(label((LEFT + WIDE) / 2, HEIGHT - 6, across, "middle"))
    return Picture(title, inline(title, HEIGHT, marks), caption)
