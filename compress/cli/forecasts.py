"""Words for a plan, in full and in short."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from compress.base.terminal import say
from compress.evaluation.cost.size import SizeRow
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.terminal import show
from compress.evaluation.report.wording import data
from compress.jobs.forecast.forecast import (
    CheaperRun,
    Forecast,
    LayerForecast,
    Outline,
    count_reasons,
    working_bytes,
)

MIB = 2**20
Row = TypeVar("Row", LayerForecast, SizeRow)
rough = partial(data, digits=3)
UNCOMPILED = ("torch", "reference")  # kernels of `kernels.routes`
NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")


def show_plan(
    plan: Forecast, notes: Sequence[str] = (), command: Callable[[CheaperRun | None], str | None] | None = None
) -> None:
    """Show a plan: whether it fits in the memory that was asked for, layers by kind, what stays dense, and what the
    result takes and runs on. command: the command line of the planned run (None), or of a cheaper one."""
    for line in verdict_lines(plan, command):
        say(line)
    show(layer_table(plan))
    for line in plan_lines(plan):
        say(line)
    for note in [*notes, *plan.notes]:
        say(f"note: {note}")


def layer_table(plan: Forecast) -> ReportTable:
    """A row for each kind of layer that is compressed. What they all have is said once, above."""
    rows = [
        (name, str(len(same)), f"{same[0].shape[0]} x {same[0].shape[1]}", same[0].scheme, *_size(same))
        for name, same in alike(plan.layers)
    ]
    schemes = {row[3:5] for row in rows}
    columns = ("layers", "number", "shape", "scheme", "bits/weight", "MiB")
    if len(schemes) != 1:
        return ReportTable(columns, rows)
    ((scheme, bits),) = schemes
    title = f"{scheme}, {bits} bits per weight"
    return ReportTable((*columns[:3], columns[5]), [(*row[:3], row[5]) for row in rows], title)


def plan_lines(plan: Forecast) -> list[str]:
    """Lines about what stays dense, and what the result takes and runs on."""
    return [*outline_lines(plan)[1:], *_rank(plan), *_run_memory(plan), *_kernels(plan), *_engines(plan)]


def outline_lines(outline: Outline) -> list[str]:
    """Lines that tell what a run is about to do: layers, what stays as it is and why, bytes, disk, memory, time."""
    saving, disk = outline.saving, outline.disk
    unchanged = "; ".join(
        f"{count} {why} ({name}{' ...' if count > 1 else ''})" for why, count, name in count_reasons(outline.dense)
    )
    about = "" if outline.exact else "about "
    bits = "" if outline.bits_per_weight is None else f", {outline.bits_per_weight:.2f} bits per compressed weight"
    share = f"{abs(saving.share):.1%} {'smaller' if saving.share >= 0 else 'larger'}"
    lack = ", TOO LITTLE" if disk.free < disk.needed else ""
    of = " of the checkpoint" if disk.exported else ""
    return [
        f"{len(outline.layers)} layers are compressed",
        *([f"unchanged: {unchanged}"] if unchanged else []),
        f"size{of}: {data(saving.before)} -> {about}{data(saving.after)}, {share}{bits}",
        f"disk: {rough(disk.needed)} needed ({_parts(outline)}), {rough(disk.free)} free{lack}",
        memory_line(outline),
        time_line(outline),
    ]


def _rank(plan: Forecast) -> list[str]:
    """A line about each of several ranks."""
    rank = plan.rank
    if rank is None:
        return []
    takes = "" if rank.memory is None else f" takes {rough(rank.memory.working)} of {plan.device} at its peak,"
    return [
        f"each of {rank.ranks} ranks{takes} holds {rough(rank.held)} of weights at rest and {rough(rank.opened)} of an "
        f"open block, and sends about {rough(rank.sent)}; time: not measured"
    ]


def _parts(outline: Outline) -> str:
    exported = outline.disk.exported
    second = rough(outline.disk.needed - exported - outline.saving.after)
    if exported:
        return f"the checkpoint, about {rough(exported)} exported from it, and {second} while files are joined"
    return f"the output, and {second} of it twice while its files are joined"


def _run_memory(plan: Forecast) -> list[str]:
    """A line about the memory that the result takes as it runs."""
    run = plan.run
    if run is None:
        return []
    sizes = ", ".join(f"{rough(size)} with {tokens:,}" for tokens, size in run.contexts().items())
    return [f"memory to run it: {sizes} tokens of context, of which weights take {rough(run.weights)}"]


def verdict_lines(plan: Forecast, command: Callable[[CheaperRun | None], str | None] | None = None) -> list[str]:
    """Lines that tell whether run and result fit in the memory that was asked for, and the command of the first run
    that fits. None where no memory was asked for. command: as in `show_plan`."""
    lines: list[str] = []
    run, limit = plan.run, plan.device_memory
    if limit is None:
        return lines
    place = f"a device of {rough(limit)}"
    if run is not None:
        context = run.context_within(limit)
        lines.append(
            f"{place} runs it, with up to {context:,} tokens of context"
            if context
            else f"{place} is too small to run it"
        )
    if plan.memory is None:
        return lines
    needed = working_bytes(plan)
    first: list[CheaperRun | None] = [None] if needed <= limit else []
    enough = "large enough" if first else "too small"
    lines.append(f"{place} is {enough} to quantize it, which takes {rough(needed)}")
    for other in plan.cheaper:
        fits = other.memory <= limit
        first += [other] if fits else []
        lines.append(f"- with {other.options}: {rough(other.memory)}, {'fits' if fits else 'does not fit'}")
    if first and command is not None and (words := command(first[0])) is not None:
        lines.append(f"this fits: {words}")
    return lines


def brief_lines(outline: Outline) -> list[str]:
    """Lines of 80 columns, if names are not long, that tell what a run is about to do."""
    schemes = Counter(layer.scheme for layer in outline.layers)
    dense = Counter(outline.dense.values())
    parts = [f"{count} layers in {scheme}" for scheme, count in schemes.most_common()]
    rest = f"; unchanged: {', '.join(f'{count} {why}' for why, count in dense.most_common())}" if dense else ""
    about = "" if outline.exact else "about "
    saving, disk = outline.saving, outline.disk
    lack = ", TOO LITTLE" if disk.free < disk.needed else ""
    takes = [
        f"{data(saving.before)} -> {about}{data(saving.after)}",
        f"{rough(disk.needed)} of disk ({rough(disk.free)} free{lack})",
    ]
    if outline.memory is not None:
        takes.append(f"about {rough(working_bytes(outline))} of memory")
    if outline.seconds is not None:
        takes.append(f"about {round_time(outline.seconds)}")
    return [f"plan: {', '.join(parts) or 'no layer'}{rest}", f"plan: {', '.join(takes)}"]


def time_line(outline: Outline) -> str:
    """A line about the time."""
    if outline.device != "cpu":
        return f"time to quantize: not known for {outline.device}"
    if outline.seconds is None:
        return "time to quantize: not known for this recipe"
    threads = torch.get_num_threads()
    many = "1 thread" if threads == 1 else f"{threads} threads"
    return f"time to quantize: about {round_time(outline.seconds)} on this CPU with {many}"


def round_time(seconds: float) -> str:
    """Seconds in the unit that a person would use."""
    for size, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 1):.0f} seconds"


def memory_line(outline: Outline) -> str:
    """A line about the memory at the peak, and its largest parts."""
    memory, counts = outline.memory, outline.tokens
    if memory is None:
        return "memory to quantize: not known for recipes that train, or look at the whole model first"
    parts = {
        "weights of a block": memory.block,
        "activations": memory.activations,
        "statistics": memory.statistics,
        "the solver": memory.solving,
        "freed memory in pieces": memory.fragments,
    }
    if outline.device == "cpu":
        parts |= {"Python with its libraries": memory.program, "weights read ahead": memory.loaded}
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    words = " and ".join(f"{name} ({rough(parts[name])})" for name in largest if parts[name])
    of = (
        ""
        if counts is None or not memory.activations
        else f" with {counts.samples} x {counts.length} calibration tokens"
    )
    line = f"memory to quantize: about {rough(working_bytes(outline))} on {outline.device}{of}, most of it {words}"
    if memory.kept is not None:
        kept = rough(memory.kept)
        line += f"; to keep all forwards of a block would take {kept}: {memory.mode}"
    if outline.device != "cpu":
        line += f"; at least {rough(memory.program + memory.loaded)} of the host, beside the mapped weight files"
    return line


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
    """A line about the layers that `compress.load` runs with compiled kernels, and the reason against the others."""
    if not plan.layers:
        return []
    if not plan.kernels:
        return [f"kernels: not known for {plan.device}, which is not here"]
    slow = [each for each in plan.kernels if any(kernel.startswith(UNCOMPILED) for kernel in each.kernels.values())]
    count, layers = sum(each.layers for each in slow), sum(each.layers for each in plan.kernels)
    if not slow:
        return [f"kernels: compress.load runs all {layers} layers with compiled kernels on {plan.device}"]
    why = next((each.why_not[0] for each in slow if each.why_not), "there is none")
    return [
        f"kernels: compress.load runs {layers - count} of {layers} layers with compiled kernels on {plan.device}, the "
        f"others slower, in PyTorch: {why}"
    ]


def _engines(plan: Forecast) -> list[str]:
    runs = [name for name, why in plan.engines.items() if why is None]
    others = [name for name in plan.engines if name not in runs]
    but = f"; not in {', '.join(others)} (--for ENGINE tells why)" if others else ""
    return [f"runs in: compress.load{''.join(f', {name}' for name in runs)}{but}"]
