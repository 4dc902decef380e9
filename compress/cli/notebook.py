"""Results as a notebook shows them: the sentences and tables of their commands, as HTML and as text."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from compress.base.terminal import visible
from compress.checkpoint.write.record import LayerRecord, RunRecord
from compress.cli.byte_savings import change
from compress.cli.commands.fit import fit_lines
from compress.cli.commands.sweep import sweep_table
from compress.cli.evaluation_tables import tables_of
from compress.cli.forecasts import brief_lines, layer_table, plan_lines, verdict_lines
from compress.cli.run_results import BASELINES, lines_of, time_words, verification_line
from compress.evaluation.document import Evaluation
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.terminal import as_lines
from compress.evaluation.report.verdict import verdict
from compress.jobs.forecast.forecast import Forecast
from compress.jobs.job import Result
from compress.search.fit import FitResult
from compress.search.sweep_rows import Sweep

SHORT = 300  # characters of a `repr`


@dataclass(frozen=True)
class InWords:
    """A result. headline: one line or a few sentences. lines: what comes below the tables, folded in a notebook."""

    headline: str
    tables: list[ReportTable] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def headline(value: Any) -> str:
    """The most important of a result, in at most `SHORT` characters."""
    said = visible(_in_words(value).headline)
    return said if len(said) <= SHORT else said[: SHORT - 3] + "..."


def as_text(value: Any) -> str:
    """A result as its command prints it."""
    found = _in_words(value)
    return "\n".join(as_lines(found.headline, *found.tables, *found.lines))


def as_html(value: Any) -> str:
    """A result as a paragraph and small tables; the rest is folded. All words are escaped."""
    found = _in_words(value)
    parts = [Markup("<p>{}</p>").format(visible(found.headline)), *map(_table, found.tables)]
    if found.lines:
        lines = Markup("<br>").join(map(visible, found.lines))
        parts.append(Markup("<details><summary>more</summary><p>{}</p></details>").format(lines))
    return str(Markup("").join(parts))


def _table(block: ReportTable) -> Markup:
    def row(cells: tuple[str, ...], kind: str) -> Markup:
        sides = ["left" if block.is_words(i) else "right" for i in range(len(cells))]
        cell = Markup(f'<{kind} style="text-align:{{}}">{{}}</{kind}>')
        return Markup("<tr>{}</tr>").format(
            Markup("").join(cell.format(side, visible(each)) for side, each in zip(sides, cells, strict=True))
        )

    title = Markup("<caption>{}</caption>").format(visible(block.title)) if block.title else Markup("")
    rows = Markup("").join(row(cells, "td") for cells in block.rows)
    return Markup("<table>{}<thead>{}</thead><tbody>{}</tbody></table>").format(title, row(block.columns, "th"), rows)


def _in_words(value: Any) -> InWords:
    return next(words(value) for kind, words in KINDS.items() if isinstance(value, kind))


def _evaluation(found: Evaluation) -> InWords:
    name, reference = found.model.name, None if found.reference is None else found.reference.name
    return InWords(f"{name}: {verdict(found)}", tables_of([(name, found)], reference))


def _forecast(plan: Forecast) -> InWords:
    brief = "; ".join(line.removeprefix("plan: ") for line in brief_lines(plan))
    return InWords(
        f"{plan.model}: {brief}", [layer_table(plan)], [*verdict_lines(plan), *plan_lines(plan), *plan.notes]
    )


def _result(result: Result) -> InWords:
    record = result.record
    saved = "" if record.saving is None else f"{change(record.saving)}; "
    names = {layer.name for layer in record.layers}
    where = "the model in memory" if result.output is None else result.output.name
    headline = f"{where}: {saved}{len(names)} layers compressed in {time_words(record)}"
    lines = list(lines_of(record)) + ([] if result.output is None else [verification_line(result.verification)])
    return InWords(headline, [_schemes(record)] if record.layers else [], lines)


def _schemes(record: RunRecord) -> ReportTable:
    """A row for each method and scheme, with mean losses of their layers."""
    alike: dict[tuple[str, str], list[LayerRecord]] = {}
    for layer in record.layers:
        alike.setdefault((layer.method, layer.scheme), []).append(layer)
    figures = ["loss", *BASELINES]
    rows = [(*key, str(len(same)), *(_mean(same, figure) for figure in figures)) for key, same in alike.items()]
    kept = [i for i in range(3 + len(figures)) if i < 3 or any(row[i] != "-" for row in rows)]
    columns = ("method", "scheme", "layers", "mean output error", *BASELINES.values())
    return ReportTable(tuple(columns[i] for i in kept), [tuple(row[i] for i in kept) for row in rows], names=2)


def _mean(layers: list[LayerRecord], figure: str) -> str:
    values = [float(layer.figures[figure]) for layer in layers if figure in layer.figures]
    return f"{sum(values) / len(values):.3e}" if values else "-"


def _sweep(swept: Sweep) -> InWords:
    front = ", ".join(row.name for row in swept.rows if row.front)
    failed = [f"{row.name} failed: {row.problem}" for row in swept.failed]
    said = f"{len(swept.rows)} recipes on {swept.model}; no other beats in both bytes and KL: {front or 'none'}"
    return InWords(said, [sweep_table(swept)], failed)


def _fit(fitted: FitResult) -> InWords:
    words, where = fit_lines(fitted)
    return InWords(words, [], [where])


KINDS: dict[type, Callable[[Any], InWords]] = {
    Evaluation: _evaluation,
    FitResult: _fit,
    Forecast: _forecast,
    Result: _result,
    Sweep: _sweep,
}
