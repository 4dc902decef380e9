"""Output of `compress evaluate --task`: the share of questions that were answered rightly."""

from collections.abc import Iterator, Sequence

from compress.evaluation.document import Figure, TaskResult
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.terminal import show

TITLE = (
    "tasks: ± is the standard error over questions, that of a difference paired; 95 % by a bootstrap over questions, "
    "exact where few differ; p by McNemar's exact test, Holm over tasks"
)
HEADINGS = (
    *("task", "questions", "", "model", "original", "difference", "95 %"),
    *("gained / lost", "p", "p (Holm)"),
)


def answered(results: Sequence[TaskResult]) -> None:
    """A row for every figure of every task; nothing where there is none."""
    if not results:
        return
    rows = []
    for result in results:
        for i, row in enumerate(_rows(result)):
            cells = (*(_asked(result) if i == 0 else ("", "")), *row)
            rows.append((*cells, *("" for _ in HEADINGS[len(cells) :])))
    show(ReportTable(HEADINGS, rows, TITLE, left=frozenset({2})))


def _asked(result: TaskResult) -> tuple[str, str]:
    lost = f", {result.truncated} cut to the window" if result.truncated else ""
    some = "" if result.available in (None, result.questions) else f" of {result.available}"
    return result.name, f"{result.questions}{some}{lost}"


def _rows(result: TaskResult) -> Iterator[tuple[str, ...]]:
    compared: tuple[str, ...] = ()
    if result.interval is not None:
        compared = (_ends(result.interval),)
    if result.gained is not None:
        compared += (f"{result.gained} / {result.lost}", _p(result.p_value), _p(result.p_adjusted))
    shares = map(_percent, (result.accuracy, result.reference_accuracy))
    yield result.metric, *shares, _beside(result.difference), *compared
    if result.accuracy_norm is not None:
        shares = map(_percent, (result.accuracy_norm, result.reference_accuracy_norm))
        yield "accuracy_norm", *shares, _beside(result.difference_norm), _span(result.difference_norm)
    if result.perplexity is not None:
        ratio = _plain(result.log_perplexity_ratio)
        plain = (_plain(result.perplexity), _plain(result.reference_perplexity))
        yield "perplexity", *plain, ratio if ratio == "-" else f"ln ratio {ratio}"


def _percent(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    if figure.error is None and figure.interval is not None:
        return f"{100 * figure.value:.2f} % ({_ends(figure.interval)})"
    return _beside(figure)


def _beside(figure: Figure | None) -> str:
    """The same, of a figure whose interval has a column of its own."""
    if figure is None:
        return "-"
    return f"{100 * figure.value:.2f} %" + ("" if figure.error is None else f" ± {100 * figure.error:.2f}")


def _span(figure: Figure | None) -> str:
    return "" if figure is None or figure.interval is None else _ends(figure.interval)


def _ends(interval: tuple[float, float]) -> str:
    return " .. ".join(f"{100 * end:.2f}" for end in interval)


def _plain(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value:.4g}" + ("" if figure.error is None else f" ± {figure.error:.2g}")


def _p(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
