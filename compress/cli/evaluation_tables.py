"""The results of `compress evaluate` on a terminal: a row for each model and text, and details below it."""

from collections.abc import Iterator, Mapping, Sequence

from compress.evaluation.document import (
    Band,
    ClassificationResult,
    EmbeddingResult,
    Evaluation,
    Figure,
    TaskResult,
    TextResult,
)
from compress.evaluation.quality.kl_and_perplexity import PERCENTILES
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.terminal import show

MIB = 2**20

ERRORS = "± is the standard error over windows, paired but for perplexity"
ONE_WINDOW = "no standard error, too little text to tell models apart"
ROWS = {"kl": ("KL, nats", ".5f"), "delta_p": ("delta p", "+.4f")}
COLUMNS = {"mean": "mean", "max": "max", **{name: name.replace("p999", "p99.9") for name in PERCENTILES}, "min": "min"}
NOISE = {"kl_mean": ".2e", "log_perplexity_ratio": ".2e", "delta_p_rms": ".2e", "same_top": ".2%"}
GAP = {"perplexity": "+.4f", "log_perplexity_ratio": "+.4f", "kl_mean": "+.5f", "same_top": "+.2%"}


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    """A figure, or a dash for one that there is not."""
    return "-" if value is None else format(value / scale, form)


def value_with_error(figure: Figure | None, form: str) -> str:
    """A figure and its standard error over windows, where there is one."""
    if figure is None or figure.error is None:
        return number(None if figure is None else figure.value, form)
    return f"{figure.value:{form}} ± {figure.error:{form}}"


def show_evaluations(rows: Sequence[tuple[str, Evaluation]], reference: str | None) -> None:
    """For every text one row per model; the original first where there is one.

    Errors are over windows; those of KL and of the ratio are paired (`compress.evaluation.quality.kl_and_perplexity`).
    """
    show(*(text_table(rows, reference, i) for i in range(len(rows[-1][1].texts))))


def text_table(rows: Sequence[tuple[str, Evaluation]], reference: str | None, i: int) -> ReportTable:
    """A row per model, for the text of number i."""
    last = rows[-1][1]
    text = last.texts[i]
    errors = ONE_WINDOW if text.windows == 1 else ERRORS
    columns = ("model", "perplexity", "ln ratio", "KL mean", "KL median", "KL p99", "same top", "MiB", "bits/weight")
    shown: list[tuple[str, ...]] = []
    if reference is not None:
        size = None if last.reference_size is None else last.reference_size.bytes
        original = value_with_error(text.figures.get("reference_perplexity"), ".4f")
        shown.append((reference, original, *"-----", number(size, ".2f", MIB), "-"))
    for name, e in rows:
        figures = e.texts[i].figures
        plain = (("kl_median", ".5f"), ("kl_p99", ".4f"), ("same_top", ".2%"))
        shown.append(
            (
                name,
                value_with_error(figures.get("perplexity"), ".4f"),
                value_with_error(figures.get("log_perplexity_ratio"), ".4f"),
                value_with_error(figures.get("kl_mean"), ".5f"),
                *(number(figures[key].value if key in figures else None, form) for key, form in plain),
                number(e.bytes, ".2f", MIB),
                number(e.bits_per_weight, ".2f"),
            )
        )
    return ReportTable(columns, shown, f"{about(text)}, {last.model.dtype}; {errors}")


def about(text: TextResult) -> str:
    """A text and its protocol: windows overlap where one begins every so many tokens."""
    role = "" if text.role == "held-out" else " (calibration text)"
    every = "" if text.stride == text.length else f", one every {text.stride}"
    windows = "one window" if text.windows == 1 else f"{text.windows} windows"
    return f"{text.name}{role}: {text.tokens} tokens, {windows} of {text.length}{every}"


def show_details(evaluation: Evaluation, model: str) -> None:
    """Show the spread over tokens for every text, then the gap, and figures that were asked for but not measured. An
    encoder or a classifier has a row instead."""
    blocks: list[ReportTable | str] = [encoder_table(evaluation, pairs, model) for pairs in evaluation.embeddings]
    blocks += [classifier_table(evaluation, inputs, model) for inputs in evaluation.classifications]
    for text in evaluation.texts:
        if "kl_mean" in text.figures:
            blocks += [_spread(text), *_lines(text)]
    if evaluation.gap:
        blocks.append(f"gap, held-out less calibration text: {list_figures(evaluation.gap, GAP)}")
    if "noise" in evaluation.missing:
        blocks.append(f"no noise floor: {evaluation.missing['noise']}")
    show(*blocks)


def encoder_table(evaluation: Evaluation, pairs: EmbeddingResult, model: str) -> ReportTable:
    """An encoder beside its original: Spearman's correlation, cosine of embeddings."""
    title = f"{pairs.name}: {pairs.pairs} pairs, {pairs.sentences} sentences, {evaluation.model.dtype}"
    columns = {
        "Spearman": ("spearman", ".4f"),
        "less the original": ("spearman_difference", ".4f"),
        "cosine mean": ("cosine_mean", ".4f"),
        "cosine p01": ("cosine_p01", ".4f"),
        "cosine min": ("cosine_min", ".4f"),
    }
    return _beside(evaluation, pairs.figures, title, columns, model)


def classifier_table(evaluation: Evaluation, inputs: ClassificationResult, model: str) -> ReportTable:
    """A classifier beside its original: how often it is right, and says the same."""
    title = f"{inputs.name}: {inputs.inputs} inputs, {inputs.classes} classes, {evaluation.model.dtype}"
    columns = {
        "accuracy": ("accuracy", ".2%"),
        "less the original's": ("accuracy_difference", ".2%"),
        "agreement": ("agreement", ".2%"),
        "KL mean": ("kl_mean", ".5f"),
    }
    return _beside(evaluation, inputs.figures, title, columns, model)


def _beside(
    evaluation: Evaluation,
    figures: Mapping[str, Figure],
    title: str,
    columns: Mapping[str, tuple[str, str]],
    model: str,
) -> ReportTable:
    """A row for the original, which has the first figure alone, and one for the model. columns: {heading: (figure, its
    form)}."""
    rows: list[tuple[str, ...]] = []
    if evaluation.reference is not None:
        size = None if evaluation.reference_size is None else evaluation.reference_size.bytes
        (name, form), *others = columns.values()
        score = value_with_error(figures.get(f"reference_{name}"), form)
        rows.append((evaluation.reference.name, score, *("-" for _ in others), number(size, ".2f", MIB)))
    forms = (value_with_error(figures.get(name), form) for name, form in columns.values())
    rows.append((model, *forms, number(evaluation.bytes, ".2f", MIB)))
    return ReportTable(("model", *columns, "MiB"), rows, title)


def _spread(text: TextResult) -> ReportTable:
    """Percentiles of KL and delta p per token. delta p: the probability of the text's token less the reference's."""
    rows = []
    for name, (title, form) in ROWS.items():
        figures = (text.figures.get(f"{name}_{column}") for column in COLUMNS)
        rows.append((title, *("-" if figure is None else f"{figure.value:{form}}" for figure in figures)))
    return ReportTable(("", *COLUMNS.values()), rows, f"{text.name}, per token")


def _lines(text: TextResult) -> Iterator[str]:
    figures = text.figures
    yield (
        f"correlation of log-likelihoods {value_with_error(figures.get('correlation'), '.5f')}; "
        f"perplexity ratio {value_with_error(figures.get('perplexity_ratio'), '.5f')}; "
        f"RMS delta p {value_with_error(figures.get('delta_p_rms'), '.4f')}"
    )
    bands = ", ".join(_band(band) for band in text.by_confidence if band.tokens)
    yield f"KL by the probability of the original's first choice: {bands}"
    if text.noise is not None:
        yield f"noise floor, the original in its own dtype: {list_figures(text.noise, NOISE)}"


def _band(band: Band) -> str:
    mean = "-" if band.kl_mean is None else f"{band.kl_mean.value:.5f}"
    return f"{band.low:g}-{band.high:g}: {mean} ({band.tokens} tokens)"


def list_figures(figures: Mapping[str, Figure], forms: Mapping[str, str]) -> str:
    words = ((name, form) for name, form in forms.items() if name in figures)
    return ", ".join(f"{name.replace('_', ' ')} {_signed(figures[name], form)}" for name, form in words)


def _signed(figure: Figure, form: str) -> str:
    """A figure, and its error without a sign."""
    error = "" if figure.error is None else f" ± {figure.error:{form.removeprefix('+')}}"
    return f"{figure.value:{form}}{error}"


TITLE = (
    "tasks: ± is the standard error over questions, that of a difference paired; 95 % by a bootstrap over questions, "
    "exact where few differ; p by McNemar's exact test, Holm over tasks"
)
HEADINGS = (
    *("task", "questions", "", "model", "original", "difference", "95 %"),
    *("gained / lost", "p", "p (Holm)"),
)


def show_tasks(results: Sequence[TaskResult]) -> None:
    """A row for every figure of every task; nothing where there is none."""
    if results:
        show(task_table(results))


def task_table(results: Sequence[TaskResult]) -> ReportTable:
    """A row for every figure of every task."""
    rows = []
    for result in results:
        for i, row in enumerate(_rows(result)):
            cells = (*(_asked(result) if i == 0 else ("", "")), *row)
            rows.append((*cells, *("" for _ in HEADINGS[len(cells) :])))
    return ReportTable(HEADINGS, rows, TITLE, left=frozenset({2}))


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
    yield result.metric, *shares, _percent_with_error(result.difference), *compared
    if result.accuracy_norm is not None:
        shares = map(_percent, (result.accuracy_norm, result.reference_accuracy_norm))
        yield "accuracy_norm", *shares, _percent_with_error(result.difference_norm), _span(result.difference_norm)
    if result.perplexity is not None:
        ratio = _plain(result.log_perplexity_ratio)
        plain = (_plain(result.perplexity), _plain(result.reference_perplexity))
        yield "perplexity", *plain, ratio if ratio == "-" else f"ln ratio {ratio}"


def _percent(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    if figure.error is None and figure.interval is not None:
        return f"{100 * figure.value:.2f} % ({_ends(figure.interval)})"
    return _percent_with_error(figure)


def _percent_with_error(figure: Figure | None) -> str:
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
