"""Two runs side by side: the differences, second less first, and the layers whose figures moved most."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from compress.evaluation.document import Evaluation, Figure, SpeedResult
from compress.evaluation.report import facts, wording
from compress.evaluation.report.content import Report, ReportTable, Section, Words
from compress.evaluation.report.layer_map import last_of_each, value_of
from compress.evaluation.report.runs import ReportedRun
from compress.evaluation.report.verdict import held_out

MOVED = 10  # layers
OWN = "perplexity"  # the figure that no original has a part in
LEAST = 1e-12  # smaller losses count as this one


def differences(first: ReportedRun, second: ReportedRun) -> Report:
    """The report of two runs."""
    a, b = first.evaluation, second.evaluation
    names = wording.name(first.name), wording.name(second.name)
    sections = [
        _quality(a, b, names),
        _size(a, b, names),
        _tasks(a, b, names),
        _speed(a.speed, b.speed, names),
        _layers(a, b, names),
        _recipes(a, b, names),
    ]
    return Report(f"{names[0]} and {names[1]}", _verdict(a, b, names), [], [each for each in sections if each])


def _verdict(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> str:
    """Changes from the first run to the second, in a sentence or two."""
    sentences = []
    if a.bytes is not None and b.bytes is not None:
        more = b.bytes - a.bytes
        size = f"{'larger' if more > 0 else 'smaller'} by {wording.data(abs(more))} ({_signed(100 * more / a.bytes)} %)"
        sentences.append(f"{names[1]} is {size if more else 'as large'}.")
    figures = {key: pair for key, pair in _shared_figures(a, b).items() if _compares(key, a, b)}
    for key, subject in (("perplexity", "Its perplexity"), ("kl_mean", "Its KL to the original")):
        if key in figures:
            one, other = (wording.number(each.value) for each in figures[key])
            sentences.append(f"{subject} is {other} instead of {one}.")
    return " ".join(sentences) or "Nothing of these runs can be compared."


def alike(a: Evaluation, b: Evaluation) -> bool:
    """True where the first texts of two evaluations are the same tokens in the same windows."""
    one, other = held_out(a), held_out(b)
    if one is None or other is None:
        return False
    return (one.sha256, one.length, one.stride) == (other.sha256, other.length, other.stride)


def _compares(key: str, a: Evaluation, b: Evaluation) -> bool:
    """True for a figure measured on the same text and, unless it is the model's own, against the same original."""
    originals = {None if each.reference is None else each.reference.identity for each in (a, b)}
    return alike(a, b) and (key == OWN or len(originals) == 1)


def _shared_figures(a: Evaluation, b: Evaluation) -> dict[str, tuple[Figure, Figure]]:
    """{name: its value in both} of the figures of two texts, in the order in which they are shown."""
    one, other = held_out(a), held_out(b)
    if one is None or other is None:
        return {}
    shared = (key for key in wording.LABELS if key in one.figures and key in other.figures)
    return {key: (one.figures[key], other.figures[key]) for key in shared}


def _signed(value: float, digits: int = 3) -> str:
    return ("+" if value > 0 else "") + wording.number(value, digits)


def _quality(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> Section:
    missing = [name for name, each in zip(names, (a, b), strict=True) if held_out(each) is None]
    if missing:
        return Section("Quality", [Words(f"{wording.NOT_MEASURED}: {', '.join(missing)}", "warning")])
    rows, warnings = [], []
    for key, pair in (figures := _shared_figures(a, b)).items():
        compares = _compares(key, a, b)
        moved = _signed(wording.scale_of(key)[0] * (pair[1].value - pair[0].value)) if compares else wording.NONE
        rows.append((wording.label_of(key), *(wording.figure_words(key, each) for each in pair), moved))
    if not alike(a, b):
        warnings = [Words("The two were measured on different texts: their figures do not compare.", "warning")]
    elif not all(_compares(key, a, b) for key in figures):
        warnings = [Words("The two were measured against different originals: only perplexities compare.", "warning")]
    note = Words("Errors are each run's own; of a difference on the same text they are smaller.", "note")
    return Section("Quality", [*warnings, _table("figure", names, rows), note])


def _table(head: str, names: tuple[str, str], rows: list[tuple[str, ...]], moved: str = "difference") -> ReportTable:
    return ReportTable((head, *names, moved), rows)


def _size(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> Section:
    one, other = a.size, b.size
    if one is None or other is None:
        return Section("Size", [Words(wording.NOT_MEASURED, "warning")])
    first, second = (
        {"weight files": s.bytes} | {wording.name(p.name): p.bytes for p in s.components} for s in (one, other)
    )
    pairs = {name: (first.get(name, 0), second.get(name, 0)) for name in dict.fromkeys([*first, *second])}
    rows: list[tuple[str, ...]] = [(name, f"{x:,}", f"{y:,}", f"{y - x:+,}") for name, (x, y) in pairs.items()]
    for label, per in (("compressed weight", "weight"), ("parameter", "parameter")):
        x, y = getattr(one, f"bits_per_{per}"), getattr(other, f"bits_per_{per}")
        rows.append((f"bits per {label}", f"{x:.3f}", f"{y:.3f}", f"{y - x:+.3f}"))
    return Section("Size, bytes", [_table("", names, rows)])


def _compared(label: str, one: Figure, other: Figure, scale: float = 1.0, unit: str = "") -> tuple[str, ...]:
    figures = (wording.with_error(each, scale, unit) for each in (one, other))
    return (label, *figures, _signed(scale * (other.value - one.value)))


def _tasks(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> Section | None:
    second = {(task.name, task.sha256): task.accuracy for task in b.tasks}
    shared = [task for task in a.tasks if (task.name, task.sha256) in second]
    rows = [
        _compared(wording.name(task.name), task.accuracy, second[task.name, task.sha256], 100, " %") for task in shared
    ]
    return Section("Tasks", [_table("task", names, rows, "points")]) if rows else None


def _speed(a: SpeedResult | None, b: SpeedResult | None, names: tuple[str, str]) -> Section | None:
    if a is None or b is None:
        return None
    if (a.device, a.threads) != (b.device, b.threads):
        return Section("Speed", [Words("Measured on different machines: speeds do not compare.", "warning")])
    rows = [
        _compared("prompt, tokens/s", a.model.prefill, b.model.prefill),
        _compared("decoding, tokens/s", a.model.decode, b.model.decode),
        _compared("first token, ms", a.model.first_token_ms, b.model.first_token_ms),
    ]
    return Section("Speed", [_table("", names, rows)])


def _layers(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> Section | None:
    first, second = (_losses(each) for each in (a, b))
    if first.keys().isdisjoint(second):
        return None
    ratios = {
        name: max(second[name], LEAST) / max(first[name], LEAST)
        for name in first
        if name in second and first[name] != second[name]
    }
    if not ratios:
        return Section("Layers", [Words("The error of every layer that both have is the same.", "note")])
    most = sorted(ratios, key=lambda name: -abs(math.log(ratios[name])))[:MOVED]
    rows: list[tuple[str, ...]] = [
        (wording.name(name), wording.share(first[name]), wording.share(second[name]), f"{ratios[name]:.2f} times")
        for name in most
    ]
    return Section("Layers whose error moved most", [_table("layer", names, rows, "by")])


def _losses(run: Evaluation) -> dict[str, float]:
    """{layer: its error} of a run."""
    layers = {} if run.run is None else last_of_each(run.run.layers)
    return {name: loss for name, layer in layers.items() if (loss := value_of(layer, "loss")) is not None}


def _recipes(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> Section:
    if a.recipe is None or b.recipe is None:
        return Section("Recipes", [Words("Of a run without a record no recipe is known.", "note")])
    flat = [{key: str(value) for key, value in _flat(recipe)} for recipe in (a.recipe, b.recipe)]
    values = {key: [each.get(key, wording.NONE) for each in flat] for key in dict.fromkeys([*flat[0], *flat[1]])}
    rows = [(wording.name(key), *map(wording.name, pair)) for key, pair in values.items() if pair[0] != pair[1]]
    words = [facts.recipe_words(each) for each in (a, b)]
    options = ReportTable(("option", *names), rows, names=3) if rows else Words("They have the same options.", "note")
    return Section("Recipes", [Words(f"{names[0]}: {words[0]}. {names[1]}: {words[1]}."), options])


def _flat(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every entry in a recipe."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _flat(each, f"{where}[{i}]")
    else:
        yield where, value
