"""The results of `compress evaluate` on a terminal: the verdict of the report, a table, and its other figures on
request."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from compress.evaluation.document import Evaluation, Figure, TaskResult, TextResult
from compress.evaluation.report import quality, uses, wording
from compress.evaluation.report.content import Block, Picture, ReportTable, Words
from compress.evaluation.report.terminal import show
from compress.evaluation.report.verdict import verdict

MIB = 2**20
ERRORS = "± is one standard error"
ONE_WINDOW = "no standard error, too little text to tell models apart"
COLUMNS = ("model", "perplexity", "KL mean", "same top", "MiB", "bits/weight")
TASKS = ("questions", "accuracy", "original", "difference, points", "")  # of `quality.TASK_COLUMNS`
NOISE = ("kl_mean", "log_perplexity_ratio", "same_top")
GAP = ("perplexity", "log_perplexity_ratio", "kl_mean", "same_top")


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    """A figure, or a dash for one that there is not."""
    return "-" if value is None else format(value / scale, form)


def show_evaluation(evaluation: Evaluation, model: str, reference: str | None, details: bool) -> None:
    """Show an evaluation. model, reference: as a person named them. details: with every figure of the report."""
    tables = tables_of([(model, evaluation)], reference)
    sections = [quality.section(evaluation), quality.tasks(evaluation.tasks)] if details else []
    blocks = [block for section in sections if section is not None for block in section.blocks]
    figures = [
        each.text if isinstance(each, Words) else narrowed(each) for each in blocks if not isinstance(each, Picture)
    ]
    show(verdict(evaluation), *tables, *figures, *_lines(evaluation, floor=not details))


def tables_of(rows: Sequence[tuple[str, Evaluation]], reference: str | None) -> list[ReportTable]:
    """Tables of all that was measured: a row for each model, the original first where there is one, and for each
    task."""
    _, last = rows[-1]
    tables = [_of_texts(rows, reference)] if _written(last) else []
    if not last.texts:
        blocks = quality.section(last).blocks
        tables += [narrowed(block) for block in blocks if isinstance(block, ReportTable)]
    used = uses.table(last) if len(rows) == 1 else None
    return [*tables, *([] if used is None else [narrowed(used)]), *([_of_tasks(last.tasks)] if last.tasks else [])]


def _written(evaluation: Evaluation) -> list[TextResult]:
    """Texts that somebody wrote; probes have a table of their own."""
    return [text for text in evaluation.texts if not text.is_probe]


def narrowed(table: Block) -> ReportTable:
    """A table of the report without its intervals, to fit a terminal of 80 columns."""
    assert isinstance(table, ReportTable)
    wanted = [i for i, heading in enumerate(table.columns) if heading != "95 % interval"]
    headings = (table.columns[i].removeprefix("value ") for i in wanted)
    left = frozenset(i for i, column in enumerate(wanted) if column in table.left)
    return replace(table, columns=(*headings,), rows=[tuple(row[i] for i in wanted) for row in table.rows], left=left)


def _of_texts(rows: Sequence[tuple[str, Evaluation]], reference: str | None) -> ReportTable:
    """A row for each model on each text."""
    _, last = rows[-1]
    texts = _written(last)
    several, shown = len(texts) > 1, []
    for i, text in enumerate(texts):
        cells = [_row(name, _written(e)[i].figures, "perplexity", e.bytes, e.bits_per_weight) for name, e in rows]
        if reference is not None:
            size = None if last.reference_size is None else last.reference_size.bytes
            cells.insert(0, _row(reference, text.figures, "reference_perplexity", size, None))
        shown += [(text.name if j == 0 else "", *row) if several else row for j, row in enumerate(cells)]
    title = "; ".join(about(text, last.model.dtype) for text in texts)
    errors = ONE_WINDOW if all(text.windows == 1 for text in texts) else ERRORS
    return ReportTable(
        ("text", *COLUMNS) if several else COLUMNS, shown, f"{title}; {errors}", names=2 if several else 1
    )


def _row(
    name: str, figures: Mapping[str, Figure], perplexity: str, size: int | None, bits: float | None
) -> tuple[str, ...]:
    """The cells of a model. perplexity: the name of its figure; KL and top choices are those of a compressed model."""
    compared = figures if perplexity == "perplexity" else {}
    top = compared.get("same_top")
    return (
        name,
        _words(figures.get(perplexity)),
        _words(compared.get("kl_mean")),
        "-" if top is None else wording.share(top.value),
        number(size, ".2f", MIB),
        number(bits, ".2f"),
    )


def _words(figure: Figure | None) -> str:
    return "-" if figure is None else wording.with_error(figure)


def about(text: TextResult, dtype: str) -> str:
    """A text and its protocol: windows overlap where one begins every so many tokens. dtype: of the arithmetic."""
    role = "" if text.role == "held-out" else " (calibration text)"
    every = "" if text.stride == text.length else f", one every {text.stride}"
    windows = "one window" if text.windows == 1 else f"{text.windows} windows"
    return f"{text.name}{role}: {text.tokens} tokens, {windows} of {text.length}{every}, {dtype}"


def _of_tasks(results: Sequence[TaskResult]) -> ReportTable:
    wanted = [quality.TASK_COLUMNS.index(column) for column in TASKS]
    rows = [(wording.name(task.name), *(quality.task_cells(task)[i] for i in wanted)) for task in results]
    return ReportTable(("task", *TASKS), rows, f"tasks: {ERRORS}")


def _lines(evaluation: Evaluation, floor: bool) -> Iterator[str]:
    """Measurements that an option asked for, and why they are missing. floor: also the noise floor."""
    for task in evaluation.tasks:
        for name, own, original in (
            ("accuracy_norm", task.accuracy_norm, task.reference_accuracy_norm),
            ("perplexity", task.perplexity, task.reference_perplexity),
        ):
            scale, unit = (100.0, " %") if name == "accuracy_norm" else (1.0, "")
            beside = "" if original is None else f", the original's {wording.with_error(original, scale, unit)}"
            if own is not None:
                yield f"{task.name}: {name} {wording.with_error(own, scale, unit)}{beside}"
    if evaluation.gap:
        yield f"held-out less calibration text: {list_figures(evaluation.gap, GAP)}"
    for text in evaluation.texts:
        if text.noise is not None and floor:
            yield f"noise floor (the original in its own dtype) on {text.name}: {list_figures(text.noise, NOISE)}"
    if "noise" in evaluation.missing:
        yield f"no noise floor: {evaluation.missing['noise']}"


def list_figures(figures: Mapping[str, Figure], names: Sequence[str]) -> str:
    """Those of the figures that there are, in words."""
    return ", ".join(
        f"{wording.label_of(key)} {wording.figure_words(key, figures[key])}" for key in names if key in figures
    )
