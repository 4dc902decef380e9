"""Two runs side by side: the differences, second less first, and the layers whose figures moved most."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from compress.evaluation.document import Evaluation, Figure, SpeedResult
from compress.evaluation.report import facts, wording
from compress.evaluation.report.content import Block, Report, ReportTable, Section, Words
from compress.evaluation.report.layer_map import last_of_each, value_of
from compress.evaluation.report.runs import ReportedRun
from compress.evaluation.report.verdict import held_out

MOVED = 10  # layers
LEAST = 1e-12  # smaller losses count as this one


def differences(first: ReportedRun, second: ReportedRun) -> Report:
    """The report of two runs."""
    a, b = first.evaluation, second.evaluation
    names = wording.name(first.name), wording.name(second.name)
    parts = [
        _quality(a, b, names),
        _size(a, b, names),
        _tasks(a, b, names),
        _speed(a.speed, b.speed, names),
        _layers(a, b, names),
        _recipes(a, b, names),
    ]
    return Report(f"{names[0]} and {names[1]}", _said(a, b, names), [], [part for part in parts if part is not None])


def _said(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> str:
    """Changes from the first run to the second, in a sentence or two."""
    said = []
    if a.bytes is not None and b.bytes is not None:
        more = b.bytes - a.bytes
        size = f"{'larger' if more > 0 else 'smaller'} by {wording.data(abs(more))} ({_signed(100 * more / a.bytes)} %)"
        said.append(f"{names[1]} is {size if more else 'as large'}.")
    if alike(a, b):
        for key, called in (("perplexity", "Its perplexity"), ("kl_mean", "Its KL to the original")):
            pair = _pair(a, b, key)
            if pair is not None:
                said.append(f"{called} is {wording.number(pair[1].value)} instead of {wording.number(pair[0].value)}.")
    return " ".join(said) or "Nothing of these runs can be compared."


def alike(a: Evaluation, b: Evaluation) -> bool:
    """True where the first texts of two evaluations are the same tokens in the same windows."""
    texts = held_out(a), held_out(b)
    if texts[0] is None or texts[1] is None:
        return False
    protocols = [(text.sha256, text.length, text.stride) for text in texts if text is not None]
    return protocols[0] == protocols[1]


def _pair(a: Evaluation, b: Evaluation, key: str) -> tuple[Figure, Figure] | None:
    found = [None if text is None else text.figures.get(key) for text in (held_out(a), held_out(b))]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _signed(value: float, digits: int = 3) -> str:
    return ("+" if value > 0 else "") + wording.number(value, digits)


def _quality(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> Section:
    if held_out(a) is None or held_out(b) is None:
        missing = [name for name, each in zip(names, (a, b), strict=True) if held_out(each) is None]
        return Section("Quality", [Words(f"{wording.NOT_MEASURED}: {', '.join(missing)}", "warning")])
    blocks: list[Block] = []
    if not alike(a, b):
        blocks.append(Words("The two were measured on different texts: their figures do not compare.", "warning"))
    rows = []
    for key in [*wording.LABELS]:
        pair = _pair(a, b, key)
        if pair is not None:
            scale = wording.scale_of(key)[0]
            moved = _signed(scale * (pair[1].value - pair[0].value)) if alike(a, b) else wording.NONE
            rows.append((wording.label_of(key), *(wording.figure_words(key, each) for each in pair), moved))
    blocks.append(ReportTable(("figure", *names, "difference"), rows))
    blocks.append(Words("Errors are each run's own; of a difference on the same text they are smaller.", "note"))
    return Section("Quality", blocks)


def _size(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> Section:
    sizes = a.size, b.size
    if sizes[0] is None or sizes[1] is None:
        return Section("Size", [Words(wording.NOT_MEASURED, "warning")])
    rows = [("weight files", *(f"{s.bytes:,}" for s in sizes if s), f"{sizes[1].bytes - sizes[0].bytes:+,}")]
    held = [{part.name: part.bytes for part in s.components} for s in sizes if s]
    for name in dict.fromkeys([*held[0], *held[1]]):
        first, second = held[0].get(name, 0), held[1].get(name, 0)
        rows.append((wording.name(name), f"{first:,}", f"{second:,}", f"{second - first:+,}"))
    for field, called in (
        ("bits_per_weight", "bits per compressed weight"),
        ("bits_per_parameter", "bits per parameter"),
    ):
        first, second = (getattr(s, field) for s in sizes)
        rows.append((called, f"{first:.3f}", f"{second:.3f}", f"{second - first:+.3f}"))
    return Section("Size, bytes", [ReportTable(("", *names, "difference"), rows)])


def _tasks(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> Section | None:
    first, second = ({task.name: task for task in each.tasks} for each in (a, b))
    rows = [
        (
            wording.name(name),
            wording.with_error(first[name].accuracy, 100, " %"),
            wording.with_error(second[name].accuracy, 100, " %"),
            _signed(100 * (second[name].accuracy.value - first[name].accuracy.value)),
        )
        for name in first
        if name in second and first[name].sha256 == second[name].sha256
    ]
    return Section("Tasks", [ReportTable(("task", *names, "points"), rows)]) if rows else None


def _speed(a: SpeedResult | None, b: SpeedResult | None, names: tuple[str, str]) -> Section | None:
    if a is None or b is None:
        return None
    if (a.device, a.threads) != (b.device, b.threads):
        return Section("Speed", [Words("Measured on different machines: speeds do not compare.", "warning")])
    rows = []
    for field, called in (
        ("prefill", "prompt, tokens/s"),
        ("decode", "decoding, tokens/s"),
        ("first_token_ms", "first token, ms"),
    ):
        first, second = (getattr(each.model, field) for each in (a, b))
        rows.append(
            (called, wording.with_error(first), wording.with_error(second), _signed(second.value - first.value))
        )
    return Section("Speed", [ReportTable(("", *names, "difference"), rows)])


def _layers(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> Section | None:
    losses = []
    for each in (a, b):
        layers = {} if each.run is None else last_of_each(each.run.layers)
        losses.append({name: loss for name, layer in layers.items() if (loss := value_of(layer, "loss")) is not None})
    both = [name for name in losses[0] if name in losses[1]]
    if not both:
        return None
    ratios = {name: max(losses[1][name], LEAST) / max(losses[0][name], LEAST) for name in both}
    moved = [name for name in both if losses[0][name] != losses[1][name]]
    if not moved:
        return Section("Layers", [Words("The error of every layer that both have is the same.", "note")])
    first = sorted(moved, key=lambda name: -abs(math.log(ratios[name])))[:MOVED]
    rows = [
        (
            wording.name(name),
            wording.share(losses[0][name]),
            wording.share(losses[1][name]),
            f"{ratios[name]:.2f} times",
        )
        for name in first
    ]
    return Section("Layers whose error moved most", [ReportTable(("layer", *names, "by"), rows)])


def _recipes(a: Evaluation, b: Evaluation, names: tuple[str, str]) -> Section:
    if a.recipe is None or b.recipe is None:
        return Section("Recipes", [Words("Of a run without a record no recipe is known.", "note")])
    flat = dict(_flat(a.recipe)), dict(_flat(b.recipe))
    keys = [key for key in dict.fromkeys([*flat[0], *flat[1]]) if _at(flat[0], key) != _at(flat[1], key)]
    rows = [(wording.name(key), *(wording.name(_at(each, key)) for each in flat)) for key in keys]
    said = [facts.recipe_words(each) for each in (a, b)]
    blocks: list[Block] = [Words(f"{names[0]}: {said[0]}. {names[1]}: {said[1]}.")]
    blocks.append(
        ReportTable(("option", *names), rows, names=3) if rows else Words("They have the same options.", "note")
    )
    return Section("Recipes", blocks)


def _at(flat: Mapping[str, Any], key: str) -> str:
    return str(flat.get(key, wording.NONE))


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
