"""The verdict on a run in a few sentences: its cost, and its savings.

A difference is `within noise` where its 95 % interval holds zero; KL is, where it exceeds the reference's noise floor
(the reference rounded to its own dtype, against itself) by no more than its error. A sample too small to show a
difference is called so; the size of a small one is named beside its figure.
"""

import math
from collections.abc import Iterator

from compress.evaluation.document import Evaluation, Figure, TaskResult, TextResult
from compress.evaluation.quality.kl_and_perplexity import FEW_WINDOWS
from compress.evaluation.report import wording
from compress.evaluation.report.content import Tile

ALPHA = 0.05
FEW_QUESTIONS = 100  # below, a task is named with their number
UNCLEAR = 0.1  # width of a difference's interval, from which on the task has too few questions


def held_out(evaluation: Evaluation) -> TextResult | None:
    """The text behind the first figures: the first held-out one, or else the calibration text."""
    texts = sorted(evaluation.texts, key=lambda text: text.role != "held-out")
    return next((text for text in texts if not text.is_probe), None)


def change(evaluation: Evaluation) -> Figure | None:
    """The change of perplexity, as a share of the reference's, with its paired error."""
    text = held_out(evaluation)
    ratio = None if text is None else text.figures.get("log_perplexity_ratio")
    if ratio is None or not math.isfinite(ratio.value):
        return None
    factor = math.exp(ratio.value)
    ends = None if ratio.interval is None else (math.expm1(ratio.interval[0]), math.expm1(ratio.interval[1]))
    return Figure(factor - 1, None if ratio.error is None else factor * ratio.error, interval=ends)


def sample(text: TextResult) -> str:
    """The size of a small text in words; empty for one that is long enough."""
    if text.windows >= FEW_WINDOWS:
        return ""
    count = "one window" if text.windows == 1 else f"{text.windows} windows"
    return f" on {wording.count(text.tokens)} tokens ({count})"


def in_noise(figure: Figure) -> bool:
    """True where the 95 % interval holds zero."""
    found = wording.bounds(figure)
    return found is not None and found[0] <= 0 <= found[1]


def at_floor(text: TextResult) -> bool:
    """True where KL is no further above the noise floor than chance explains."""
    kl, floor = text.figures.get("kl_mean"), (text.noise or {}).get("kl_mean")
    if kl is None or floor is None or kl.error is None:
        return False
    error = math.hypot(kl.error or 0.0, floor.error or 0.0)
    return kl.value - floor.value <= wording.Z95 * error


def smaller(evaluation: Evaluation) -> float | None:
    """The reference's bytes over the model's; None where either is not known."""
    if evaluation.size is None or evaluation.reference_size is None or not evaluation.size.bytes:
        return None
    return evaluation.reference_size.bytes / evaluation.size.bytes


def verdict(evaluation: Evaluation) -> str:
    """Short sentences, one for each kind of measurement."""
    sentences = [
        *_size(evaluation),
        *_perplexity(evaluation),
        *_divergence(evaluation),
        *_probes(evaluation),
        *_tasks(evaluation.tasks),
        *_speed(evaluation),
    ]
    return " ".join(sentences) or "Nothing was measured."


def _size(evaluation: Evaluation) -> list[str]:
    if evaluation.size is None:
        return []
    times, bits = smaller(evaluation), f"{evaluation.size.bits_per_weight:.2f} bits per compressed weight"
    if times is None:
        bits = (
            bits
            if evaluation.size.compressed_parameters
            else f"{evaluation.size.bits_per_parameter:.2f} bits per parameter"
        )
        return [f"{wording.data(evaluation.size.bytes)} of weights, {bits}."]
    if times == 1:
        return [f"As large as the original ({wording.data(evaluation.size.bytes)})."]
    if times < 1:
        return [f"{1 / times:.2f} times as large as the original ({wording.data(evaluation.size.bytes)})."]
    assert evaluation.reference_size is not None
    bits = f", {bits}" if evaluation.size.compressed_parameters else ""
    before, after = (wording.data(size.bytes) for size in (evaluation.reference_size, evaluation.size))
    return [f"{times:.2f} times smaller: {after} instead of {before}{bits}."]


def _perplexity(evaluation: Evaluation) -> list[str]:
    text, moved = held_out(evaluation), change(evaluation)
    own = None if text is None else text.figures.get("perplexity")
    if text is None or own is None:
        others = [*encoder_sentences(evaluation), *classifier_sentences(evaluation)]
        return others if others or evaluation.tasks or evaluation.texts else ["Quality was not measured."]
    reference = text.figures.get("reference_perplexity")
    if reference is None or moved is None:
        return [f"Perplexity {wording.with_error(own)}{sample(text)}; there is no original to hold it against."]
    pair = f"{wording.number(own.value)} against {wording.number(reference.value)}"
    if moved.error is None:
        return [f"Too little text to tell what it cost: perplexity {pair}{sample(text)}."]
    if in_noise(moved):
        return [f"Perplexity is the original's within noise: {pair}, {_signed(moved)}{sample(text)}."]
    more = "higher" if moved.value > 0 else "lower"
    by = wording.with_error(Figure(abs(moved.value), moved.error), 100, " %")
    return [f"Perplexity is {by} {more}: {pair}{sample(text)}."]


def encoder_sentences(evaluation: Evaluation) -> Iterator[str]:
    """Sentences on an encoder's correlation with people's scores of pairs of sentences."""
    for pairs in evaluation.embeddings:
        own, moved = pairs.figures["spearman"], pairs.figures.get("spearman_difference")
        beside = "" if moved is None else f", the original's {wording.number(own.value - moved.value, 3)}"
        said = f"Spearman's correlation with people's scores of {wording.count(pairs.pairs)} pairs"
        yield f"{said} {wording.with_error(own)}{beside}."


def classifier_sentences(evaluation: Evaluation) -> Iterator[str]:
    """Sentences on a classifier's accuracy, and on its agreement with the original."""
    for inputs in evaluation.classifications:
        figures = inputs.figures
        parts = [
            f"Right on {wording.with_error(figures['accuracy'], 100, ' %')} of {wording.count(inputs.inputs)} inputs"
        ]
        if "accuracy_difference" in figures:
            parts.append(f"{points(figures['accuracy_difference'])} beside the original")
            parts.append(f"the same class for {wording.share(figures['agreement'].value)}")
        yield ", ".join(parts) + "."


def _divergence(evaluation: Evaluation) -> list[str]:
    text = held_out(evaluation)
    kl = None if text is None else text.figures.get("kl_mean")
    if text is None or kl is None:
        return []
    top = text.figures.get("same_top")
    same = "" if top is None else f", the same first choice for {wording.share(top.value)} of the tokens"
    floor = " (that is the noise floor)" if at_floor(text) else ""
    return [f"KL to the original {wording.with_error(kl)} nats per token{floor}{same}."]


def _probes(evaluation: Evaluation) -> Iterator[str]:
    """Sentences on the original's answers, facts to recall and tool calls."""
    for text in evaluation.texts:
        own, theirs = text.items_with("exact"), text.items_with("reference_exact")
        if own is None:
            continue
        exact, items = own
        beside = "" if theirs is None else f" (the original {theirs[0]:.0f})"
        if text.role == "answers":
            itself = (
                "" if theirs is None or round(theirs[0]) == items else f" (the original asked again: {theirs[0]:.0f})"
            )
            yield f"{exact:.0f} of {items} answers are the original's to the end{itself}."
        elif text.role == "recall":
            yield f"{exact:.0f} of {items} facts recalled{beside}."
        elif text.role == "tools":
            yield f"{exact:.0f} of {items} tool calls exact{beside}."


def _signed(figure: Figure) -> str:
    sign = "+" if figure.value >= 0 else ""
    return sign + wording.with_error(figure, 100, " %")


def _tasks(tasks: list[TaskResult]) -> list[str]:
    paired = [task for task in tasks if task.difference is not None]
    moved = [task for task in paired if significant(task)]
    unclear = [task for task in paired if task not in moved and too_few(task)]
    others = [task for task in paired if task not in moved and task not in unclear]
    sentences = []
    if moved:
        names = ", ".join(f"{task_name(task)} {points(task.difference)}" for task in moved)
        rest = f"; {f'{len(others)} others' if len(others) > 1 else 'the other'} within noise" if others else ""
        sentences.append(f"Tasks beyond noise: {names}{rest}.")
    elif others:
        one = f"{task_name(others[0])} does not differ from the original beyond noise."
        sentences.append(
            one if len(others) == 1 else f"No task of {len(others)} differs from the original beyond noise."
        )
    if unclear:
        names = ", ".join(f"{wording.name(task.name)} ({wording.count(task.questions)})" for task in unclear)
        sentences.append(f"Too few questions to tell: {names}.")
    return sentences


def task_name(task: TaskResult) -> str:
    """A task, with the number of its questions where they are few."""
    few = task.questions < FEW_QUESTIONS
    return f"{wording.name(task.name)} ({wording.count(task.questions)} questions)" if few else wording.name(task.name)


def too_few(task: TaskResult) -> bool:
    """True for a task whose interval is unknown, or too wide to rule out a difference that matters."""
    found = task.interval or wording.bounds(task.difference)
    return found is None or found[1] - found[0] > UNCLEAR


def outcome(task: TaskResult) -> str:
    """The outcome of a task in two or three words; empty without a reference."""
    if task.difference is None:
        return ""
    return "differs" if significant(task) else "too few to tell" if too_few(task) else "within noise"


def significant(task: TaskResult) -> bool:
    """True where a task's accuracy differs from the reference's: by the adjusted p, or by the interval without one."""
    p = task.p_adjusted if task.p_adjusted is not None else task.p_value
    if p is not None:
        return p < ALPHA
    return wording.bounds(task.difference) is not None and task.difference is not None and not in_noise(task.difference)


def points(difference: Figure | None) -> str:
    """A difference of shares, in percentage points."""
    if difference is None:
        return wording.NOT_MEASURED
    sign = "+" if difference.value >= 0 else ""
    return f"{sign}{wording.with_error(difference, 100)} points"


def _speed(evaluation: Evaluation) -> list[str]:
    speed = evaluation.speed
    if speed is None:
        return []
    own = f"Decodes {wording.number(speed.model.decode.value, 3)} tokens/s on {wording.name(speed.device)}"
    if speed.reference is None or not speed.reference.decode.value:
        return [own + "."]
    return [f"{own}, {speed.model.decode.value / speed.reference.decode.value:.2f} times the original's speed."]


def tiles(evaluation: Evaluation) -> list[Tile]:
    """The headline figures."""
    shown = []
    if evaluation.size is not None:
        times = smaller(evaluation)
        detail = (
            "" if times is None else f"{times:.2f} times smaller" if times >= 1 else f"{1 / times:.2f} times larger"
        )
        shown.append(
            Tile(
                "size", wording.data(evaluation.size.bytes), detail or f"{evaluation.size.bits_per_parameter:.2f} bits"
            )
        )
    text, moved = held_out(evaluation), change(evaluation)
    figures = {} if text is None else text.figures
    if "perplexity" in figures:
        noise = "" if moved is None or not in_noise(moved) else ", within noise"
        detail = "no original given" if moved is None else f"{_signed(moved)}{noise}"
        if text is not None and text.windows == 1:
            detail = "one window: too little text to tell"
        elif text is not None:
            detail += sample(text)
        shown.append(Tile("perplexity", wording.number(figures["perplexity"].value), detail))
    if "kl_mean" in figures:
        error = figures["kl_mean"].error
        detail = "nats per token" if error is None else f"± {error:.1g} nats per token"
        shown.append(Tile("KL to the original", wording.number(figures["kl_mean"].value, 3), detail))
    if "same_top" in figures:
        shown.append(Tile("same first choice", wording.share(figures["same_top"].value), "of the tokens"))
    if evaluation.speed is not None:
        own, other = evaluation.speed.model.decode, evaluation.speed.reference
        times = None if other is None or not other.decode.value else own.value / other.decode.value
        detail = "tokens/s, one sequence" if times is None else f"tokens/s, {times:.2f} times the original's"
        shown.append(Tile("decoding", wording.number(own.value, 3), detail))
    return shown
