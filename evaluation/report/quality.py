"""The quality of a run: figures with their intervals, KL by confidence, tasks, and continuations side by side."""

from collections.abc import Mapping, Sequence

from compress.evaluation.document import Band, Evaluation, Figure, Generation, Histogram, TaskResult, TextResult
from compress.evaluation.quality.kl_and_perplexity import FEW_WINDOWS
from compress.evaluation.report import wording
from compress.evaluation.report.content import Block, Continuation, Picture, ReportTable, Section, Words
from compress.evaluation.report.drawing import WIDE, Axis, hover, inline, label, rule, tick
from compress.evaluation.report.verdict import outcome, points

HEIGHT, LEFT, BOTTOM, TOP = 200.0, 56.0, 38.0, 12.0


def section(evaluation: Evaluation) -> Section:
    """Figures on every text; missing measurements are named."""
    blocks: list[Block] = []
    if not evaluation.texts and not evaluation.embeddings and not evaluation.classifications:
        why = evaluation.missing.get("quality", evaluation.missing.get("texts", "no text was given"))
        blocks.append(Words(f"{wording.NOT_MEASURED}: {why}", "warning"))
    for text in evaluation.texts:
        blocks += of_text(text)
    for pairs in evaluation.embeddings:
        said = f"{wording.count(pairs.pairs)} pairs of {wording.count(pairs.sentences)} sentences"
        blocks.append(_figures(pairs.figures, f"{wording.name(pairs.name)}: {said}"))
    for inputs in evaluation.classifications:
        said = f"{wording.count(inputs.inputs)} inputs of {wording.count(inputs.classes)} classes"
        blocks.append(_figures(inputs.figures, f"{wording.name(inputs.name)}: {said}"))
    gap = calibration_gap(evaluation.texts)
    if gap is not None:
        blocks.append(gap)
    return Section("Quality", blocks)


def _figures(found: Mapping[str, Figure], title: str) -> ReportTable:
    """Figures of encoders and classifiers."""
    rows = [
        (wording.label_of(key), wording.figure_words(key, f), wording.figure_interval(key, f))
        for key, f in found.items()
    ]
    return ReportTable(("figure", "value ± standard error", "95 % interval"), rows, title)


def of_text(text: TextResult) -> list[Block]:
    """The table of a text, and its pictures."""
    main = [key for key in wording.LABELS if key in text.figures]
    others = [key for key in text.figures if key not in wording.LABELS]
    columns: tuple[str, ...] = ("figure", "value ± standard error", "95 % interval")
    columns = (*columns, "noise floor") if text.noise is not None else columns
    title = f"{wording.name(text.name)} ({text.role.replace('-', ' ')})"
    sentence = (
        f"{wording.count(text.tokens)} tokens predicted in {wording.count(text.windows)} windows of {text.length}"
        f"{'' if text.stride == text.length else f', {text.stride} apart'}: {wording.clean(text.protocol)}."
    )
    if text.windows == 1:
        sentence += " Of a single window no standard error is known: too little text to tell models apart."
    elif text.windows < FEW_WINDOWS:
        sentence += f" Intervals are Student's t of {text.windows} windows."
    if text.noise is not None:
        sentence += " The noise floor is the original against itself, rounded to its own dtype."
    blocks: list[Block] = [ReportTable(columns, [_row(text, key) for key in main], title), Words(sentence, "note")]
    if others:
        blocks.append(
            ReportTable(columns, [_row(text, key) for key in others], "More figures of this text", folded=True)
        )
    if text.kl_histogram is not None and any(text.kl_histogram.counts):
        blocks.append(_histogram(text.kl_histogram))
    if text.by_confidence:
        blocks.append(_confidence(text.by_confidence))
    return blocks


def _row(text: TextResult, key: str) -> tuple[str, ...]:
    """A figure, its interval, and its noise floor where any was measured."""
    figure = text.figures[key]
    row = (wording.label_of(key), wording.figure_words(key, figure), wording.figure_interval(key, figure))
    if text.noise is None:
        return row
    floor = text.noise.get(key)
    return (*row, wording.NONE if floor is None else wording.figure_words(key, floor))


def _histogram(histogram: Histogram) -> Picture:
    """A histogram of the tokens' KL; the axis to the right has powers of ten."""
    across = Axis(histogram.edges[0], histogram.edges[-1], LEFT, WIDE - 8)
    up = Axis(0, max(histogram.counts), HEIGHT - BOTTOM, TOP)
    total, marks = sum(histogram.counts), []
    for value in up.ticks()[1:]:
        y = up.place(value)
        marks += [rule(LEFT, y, WIDE - 8, y), label(LEFT - 6, y + 4, f"{value:,.0f}", "end")]
    for i, count in enumerate(histogram.counts):
        x, y = across.place(histogram.edges[i]), up.place(count)
        width = max(0.8, across.place(histogram.edges[i + 1]) - x - 1)
        ends = f"{10 ** histogram.edges[i]:.1e} to {10 ** histogram.edges[i + 1]:.1e}"
        said = hover(f"{count:,} tokens ({wording.share(count / total)}) with KL {ends}")
        box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
        marks.append(f'<rect {box} class="main">{said}</rect>')
    marks.append(rule(LEFT, HEIGHT - BOTTOM, WIDE - 8, HEIGHT - BOTTOM))
    for power in across.ticks():
        if power == round(power):
            marks.append(tick(across.place(power), HEIGHT - BOTTOM + 16, f"{10.0**power:g}"))
    marks.append(label((LEFT + WIDE) / 2, HEIGHT - 6, "KL of a token, nats", "middle"))
    return Picture(
        "KL by token", inline(f"histogram of the KL of {total} tokens", HEIGHT, marks), "Tokens by their KL."
    )


def _confidence(bands: Sequence[Band]) -> ReportTable:
    """Mean KL where the original was sure, and where it was not."""
    rows = [
        (
            f"{wording.share(band.low)} to {wording.share(band.high)}",
            wording.count(band.tokens),
            wording.with_error(band.kl_mean),
        )
        for band in bands
    ]
    return ReportTable(
        ("probability of the first choice", "tokens", "KL, mean"), rows, "KL by the original's confidence"
    )


def calibration_gap(texts: Sequence[TextResult]) -> ReportTable | None:
    """Figures on the calibration text beside those on the others; None unless there are both."""
    if not any(text.role == "calibration" for text in texts) or len(texts) < 2:
        return None
    rows = []
    for text in texts:
        moved, kl = text.figures.get("log_perplexity_ratio"), text.figures.get("kl_mean")
        rows.append((wording.name(text.name), text.role, wording.with_error(moved), wording.with_error(kl)))
    return ReportTable(
        ("text", "role", wording.LABELS["log_perplexity_ratio"], "KL, mean"), rows, "Calibration against held-out", 2
    )


TASK_COLUMNS = ("questions", "accuracy", "original", "difference, points", "95 % of it", "gained / lost", "p", "")


def task_cells(task: TaskResult) -> tuple[str, ...]:
    """Accuracy beside the original's on the same questions, in words, for `TASK_COLUMNS`."""
    p = task.p_adjusted if task.p_adjusted is not None else task.p_value
    low, high = (100 * end for end in task.interval or (0.0, 0.0))
    return (
        wording.count(task.questions),
        wording.with_error(task.accuracy, 100, " %"),
        wording.with_error(task.reference_accuracy, 100, " %"),
        points(task.difference).removesuffix(" points"),
        wording.NONE if task.interval is None else f"{low:+.2f} to {high:+.2f}",
        wording.NONE if task.gained is None or task.lost is None else f"+{task.gained} / -{task.lost}",
        wording.NONE if p is None else f"{p:.2g}",
        outcome(task),
    )


def tasks(results: Sequence[TaskResult]) -> Section | None:
    """Accuracy beside the original's, on the same questions."""
    if not results:
        return None
    rows = [(wording.name(task.name), *task_cells(task)) for task in results]
    note = (
        "Both models answer the same questions. Gained and lost are questions that only one of them got right; p is "
        "McNemar's exact test, after Holm over all tasks where there are several. Intervals of few questions are exact "
        "(Clopper-Pearson, and of a difference from the questions that only one of the two got right)."
    )
    return Section("Tasks", [ReportTable(("task", *TASK_COLUMNS), rows), Words(note, "note")])


def generations(continuations: Sequence[Generation]) -> Section | None:
    """Answers of both models to the same prompts, marked from the place where they diverge."""
    if not continuations:
        return None
    blocks: list[Block] = [
        Words("Greedy decoding. Text in which the two agree is plain; text of one alone is marked.", "note")
    ]
    for each in continuations:
        cut = _cut(each)
        rest = None if each.reference is None else wording.clean(each.reference[cut:])
        blocks.append(
            Continuation(
                wording.clean(each.prompt), wording.clean(each.model[:cut]), rest, wording.clean(each.model[cut:])
            )
        )
    return Section("Answers side by side", blocks)


def _cut(each: Generation) -> int:
    """The length of the text that two continuations share; the whole length where there is only one."""
    if each.reference is None or each.diverges_at is None:
        return len(each.model)
    return min(each.diverges_at, len(each.model), len(each.reference))
