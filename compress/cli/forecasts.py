"""Words for a plan, in full and in short."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import torch

from compress.base.terminal import say
from compress.evaluation.cost.size import SizeRow
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.terminal import show
from compress.jobs.forecast.forecast import Forecast, LayerForecast, Outline, count_reasons, working_bytes

MIB = 2**20
Row = TypeVar("Row", LayerForecast, SizeRow)
NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")


def show_plan(plan: Forecast, notes: Sequence[str] = ()) -> None:
    """Show a plan: layers by kind, what stays dense, and what the result takes and runs on."""
    show(layer_table(plan))
    for line in plan_lines(plan):
        say(line)
    for note in [*notes, *plan.notes]:
        say(f"note: {note}")


def layer_table(plan: Forecast) -> ReportTable:
    """A row for each kind of layer that is compressed."""
    rows = [
        (name, str(len(same)), f"{same[0].shape[0]} x {same[0].shape[1]}", same[0].scheme, *_size(same))
        for name, same in alike(plan.layers)
    ]
    return ReportTable(("layers", "number", "shape", "scheme", "bits/weight", "MiB"), rows, names=0)


def plan_lines(plan: Forecast) -> list[str]:
    """Lines about what stays dense, and what the result takes and runs on."""
    return [*outline_lines(plan)[1:], *fit_lines(plan), *_kernels(plan), *_engines(plan)]


def outline_lines(outline: Outline) -> list[str]:
    """Lines that tell what a run is about to do: layers, what stays dense and why, bytes, disk, memory."""
    lines = [f"{len(outline.layers)} layers are compressed"]
    lines += [f"dense: {count} like {name}: {why}" for why, count, name in count_reasons(outline.dense)]
    about = "" if outline.exact else "about "
    bits = "" if outline.bits_per_weight is None else f", {outline.bits_per_weight:.2f} bits per compressed weight"
    before, after = outline.saving.before, outline.saving.after
    lines.append(f"bytes: {before:,} before, {about}{after:,} after ({outline.saving.share:.1%} saved){bits}")
    lack = " TOO LITTLE" if outline.disk.free < outline.disk.needed else ""
    lines.append(f"disk: {outline.disk.needed / MIB:,.0f} MiB needed, {outline.disk.free / MIB:,.0f} MiB free{lack}")
    return [*lines, memory_line(outline), time_line(outline)]


def fit_lines(plan: Forecast) -> list[str]:
    """Lines about the memory that the result takes as it runs, and whether run and result fit in a device's memory."""
    lines, run, limit = [], plan.run, plan.device_memory
    if run is not None:
        sizes = ", ".join(f"{size / MIB:,.0f} MiB at {tokens:,}" for tokens, size in run.contexts().items())
        lines.append(f"to run it, by tokens of context: {sizes} (weights {run.weights / MIB:,.0f})")
    if limit is None:
        return lines
    place = f"on a device of {limit / MIB:,.0f} MiB"
    if run is not None:
        context = run.context_within(limit)
        runs = f"runs, with up to {context:,} tokens of context" if context else "does not fit"
        lines.append(f"{place} the result {runs}")
    if plan.memory is not None:
        needed = working_bytes(plan)
        lines.append(f"{place} quantizing {'fits' if needed <= limit else f'does not fit: {needed / MIB:,.0f} MiB'}")
    for other in plan.cheaper:
        fits = "fits" if other.memory <= limit else "does not fit"
        lines.append(f"  {other.options}: {other.memory / MIB:,.0f} MiB, {fits}")
    return lines


def brief_lines(outline: Outline) -> list[str]:
    """Lines of 80 columns, if names are not long, that tell what a run is about to do."""
    schemes = Counter(layer.scheme for layer in outline.layers)
    dense = Counter(outline.dense.values())
    parts = [f"{count} layers in {scheme}" for scheme, count in schemes.most_common()]
    rest = f"; dense: {', '.join(f'{count} {why}' for why, count in dense.most_common())}" if dense else ""
    about = "" if outline.exact else "about "
    before, after = (size / MIB for size in (outline.saving.before, outline.saving.after))
    lack = ", TOO LITTLE" if outline.disk.free < outline.disk.needed else ""
    takes = [
        f"{before:,.2f} -> {about}{after:,.2f} MiB",
        f"disk {outline.disk.needed / MIB:,.0f} of {outline.disk.free / MIB:,.0f} MiB free{lack}",
    ]
    if outline.memory is not None:
        takes.append(f"memory about {working_bytes(outline) / MIB:,.0f} MiB")
    if outline.seconds is not None:
        takes.append(f"about {round_time(outline.seconds)}")
    return [f"plan: {', '.join(parts) or 'no layer'}{rest}", f"plan: {', '.join(takes)}"]


def time_line(outline: Outline) -> str:
    """A line about the time."""
    if outline.device != "cpu":
        return f"time: not known for {outline.device}"
    if outline.seconds is None:
        return "time: not told for this recipe"
    return f"time: about {round_time(outline.seconds)} on this CPU, threads: {torch.get_num_threads()}"


def round_time(seconds: float) -> str:
    """Seconds in the unit that a person would use."""
    for size, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 1):.0f} seconds"


def memory_line(outline: Outline) -> str:
    """A line about the memory at the peak, and its parts."""
    memory = outline.memory
    if memory is None:
        return "memory: not told for recipes that train, or look at the whole model first"
    parts = {
        "weights of a block": memory.block,
        "activations": memory.activations,
        "statistics": memory.statistics,
        "solving": memory.solving,
        "fragments": memory.fragments,
    }
    if outline.device == "cpu":
        parts = {"program": memory.program, "experts": memory.loaded, **parts}
    sizes = ", ".join(f"{words} {size / MIB:,.0f}" for words, size in parts.items() if size)
    counts = outline.tokens
    of = (
        ""
        if counts is None or not memory.activations
        else f", with {counts.samples} x {counts.length} calibration tokens"
    )
    line = f"memory: about {working_bytes(outline) / MIB:,.0f} MiB on {outline.device} at {memory.site}{of} ({sizes})"
    if memory.kept is None:
        return line
    return f"{line}; forwards are repeated, for to keep them would take {memory.kept / MIB:,.0f} MiB"


def alike(layers: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """(Name with * for numbers, layers of one such name, shape and scheme), in the order of the first of each."""
    groups: dict[tuple[str, tuple[int, ...], str], list[Row]] = {}
    for layer in layers:
        groups.setdefault((NUMBER.sub("*", layer.name), layer.shape, layer.scheme), []).append(layer)
    return [(name, same) for (name, _, _), same in groups.items()]


def _size(same: Sequence[LayerForecast]) -> tuple[str, str]:
    total = sum(layer.bytes for layer in same)
    about = "" if all(layer.exact for layer in same) else "~"
    return f"{about}{same[0].bits_per_weight:.2f}", f"{about}{total / MIB:.2f}"


def _kernels(plan: Forecast) -> list[str]:
    """Kernels of `compress.load`, by what they are, with the reasons against faster ones."""
    if plan.layers and not plan.kernels:
        return [f"kernels on {plan.device}: not told, for it is not here"]
    lines: dict[tuple[str, str], int] = {}
    for each in plan.kernels:
        names = ", ".join(f"{kernel} at {tokens}" for tokens, kernel in each.kernels.items())
        key = names, "; ".join(each.why_not)
        lines[key] = lines.get(key, 0) + each.layers
    return [
        f"kernels on {plan.device} (tokens): {names}, {count} layers{f'; no faster one: {why}' if why else ''}"
        for (names, why), count in lines.items()
    ]


def _engines(plan: Forecast) -> list[str]:
    runs = [name for name, why in plan.engines.items() if why is None]
    lines = [f"engines: compress.load{''.join(f', {name}' for name in runs)}"]
    return lines + [f"not {name}: {why}" for name, why in plan.engines.items() if why is not None]
