"""What a person reads on standard output: tables of results, evaluations and layers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.table import Table

from compress.api.job import Result
from compress.checkpoint.export.write import Offer
from compress.checkpoint.read.source import find_source
from compress.checkpoint.write.record import LayerRecord, RangeRecord, RunRecord
from compress.cli.saving import headline
from compress.evaluation.cost.routes import KernelRow, LibraryRow
from compress.evaluation.cost.size import Row, Size, measure_size
from compress.evaluation.document import Evaluation, Figure, TextResult
from compress.evaluation.report.calibration import clipped, interval, most_clipped, percent, title_of
from compress.system.terminal import console
from compress.train.loop.metrics import ends

MIB = 2**20
# What a method holds its loss against, by the figure of the record.
BASELINES = {"rtn_loss": "plain rounding", "wanda_loss": "wanda, which leaves survivors as they are"}

ERRORS = "± is the standard error over windows, paired but for perplexity"
ONE_WINDOW = "no standard error, too little text to tell models apart"


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    """A figure, or a dash for one that there is not."""
    return "-" if value is None else format(value / scale, form)


def result(made: Result, model: str, output: str) -> None:
    """The bytes before and after, then what was compressed, and at what loss. model, output: as a person named them."""
    assert made.output is not None
    out = console()
    out.print(headline(made.record, model, output), soft_wrap=True)
    if made.record.structure is not None:
        out.print(removed(made.record.structure))
    if made.record.coverage is not None:
        out.print(f"compressed: {made.record.coverage}")
        before, after = measure_size(find_source(model)), measure_size(find_source(str(made.output)))
        if after.compressed_weights:
            out.print(f"bits per compressed weight: {before.bits_per_parameter:.2f} -> {after.bits_per_weight:.2f}")
    for key, baseline in BASELINES.items():
        losses = [(r.figures["loss"], r.figures[key]) for r in made.record.layers if key in r.figures]
        if losses:
            own, plain = (sum(float(pair[i]) for pair in losses) / len(losses) for i in (0, 1))
            out.print(f"mean relative output error of a layer: {own:.3e}, against {plain:.3e} by {baseline}")
    for line in trained(made.record.training):
        out.print(line)
    if zeros := pruned(made.record.layers):
        out.print(zeros)
    if made.record.ranges:
        out.print(clipped(made.record.ranges))
    if made.record.caches:
        out.print(f"keys and values of {len(made.record.caches)} attentions: {next(iter(made.record.caches.values()))}")
    kinds: dict[str, int] = {}
    for reason in made.record.left_alone.values():
        kinds[reason] = kinds.get(reason, 0) + 1
    alone = ", ".join(f"{count} {reason}" for reason, count in sorted(kinds.items()))
    layers = len({layer.name for layer in made.record.layers})  # several passes may have had a part in one
    if layers or made.record.coverage is not None:
        done = "trained" if made.record.coverage is None else "compressed"
        out.print(f"{layers} layers {done} in {spent(made.record)}; left alone: {alone or 'none'}")
    seen = made.verification
    if seen is None:
        out.print("not verified: run `compress verify` on the output")
    elif seen["transformers"] == "compared" and seen.get("cache", "compared") != "compared":
        out.print(
            f"verified in a fresh process: {seen['layers']} layers bit for bit, logits in transformers equal; "
            f"key-value cache {seen['cache']}"
        )
    elif seen["transformers"] == "compared":
        how = "" if seen["loader"] == "default" else f" (load it with CompressedTensorsConfig({seen['loader']}))"
        out.print(
            f"verified in a fresh process: {seen['layers']} layers bit for bit, logits in transformers equal{how}"
        )
    else:
        out.print(
            f"verified in a fresh process: {seen['layers']} layers bit for bit; transformers {seen['transformers']}"
        )


def trained(histories: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each training has changed of its losses on samples that were held out, in a line."""
    for history in histories:
        before, after = ends(history) or ({}, {})
        losses = ", ".join(f"{name} {before[name]:.4g} -> {after[name]:.4g}" for name in before)
        steps = history["resumed"] + len(history["steps"])
        kept = "" if history["kept"] == steps else f" (as it was after step {history['kept']}, the best)"
        told = f"on held-out samples: {losses or 'not measured'}{kept}"
        yield f"trained {steps} steps in {history['seconds']:.0f} s; {told}"


def curves(rows: Sequence[Sequence[str]]) -> None:
    """What each training of a run has measured."""
    table = Table()
    for heading in ("steps", "loss", "held out", "tokens (samples)/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def removed(structure: Mapping[str, Any]) -> str:
    """What is left of a model's structure, and at what loss, in a line."""
    before, after = structure["before"], structure["after"]
    text = f"structure: {after['parameters']} of {before['parameters']} parameters left, as foreseen"
    if structure["dropped"]:
        text += f"; without {', '.join(structure['dropped'])}"
    figures = [cut["figures"] for cut in structure["cut"] if cut["figures"]]
    if figures:
        own, zeroed = (sum(each[key] for each in figures) / len(figures) for key in ("loss", "zeroed_loss"))
        text += f"; mean relative output error of a layer that reads what went: {own:.3e} (zeros instead: {zeroed:.3e})"
    return text


def spent(record: RunRecord) -> str:
    """How long a run took, and what for."""
    shares = [f"{activity} {seconds / record.seconds:.0%}" for activity, seconds in record.spent.items()]
    return f"{record.seconds:.1f} s" + (f" ({', '.join(shares)})" if len(shares) > 1 and record.seconds > 0 else "")


def pruned(layers: Sequence[LayerRecord]) -> str | None:
    """How much of the layers that were pruned is zero, in a line; None where none was."""
    masks = {layer.name: layer for layer in layers if "sparsity" in layer.figures}  # the last mask of each
    weights = sum(math.prod(layer.shape) for layer in masks.values())
    if not weights:
        return None
    zero = sum(float(layer.figures["sparsity"]) * math.prod(layer.shape) for layer in masks.values())
    patterns = {str(layer.figures.get("pattern", "")) for layer in masks.values()}
    each = f", {', '.join(sorted(patterns))} in every layer" if len(patterns) == 1 and "" not in patterns else ""
    return f"zero for good: {zero / weights:.1%} of {weights} weights in {len(masks)} layers{each}"


def measured(figure: Figure | None, form: str) -> str:
    """A figure and its standard error over windows, where there is one."""
    if figure is None or figure.error is None:
        return number(None if figure is None else figure.value, form)
    return f"{figure.value:{form}} ± {figure.error:{form}}"


def evaluations(rows: Sequence[tuple[str, Evaluation]], reference: str | None) -> None:
    """For every text one row per model; the original first where there is one.

    Errors are over windows; those of KL and of the ratio are paired (`compress.evaluation.quality.statistics`).
    """
    for i in range(len(rows[-1][1].texts)):
        console().print(_on_text(rows, reference, i))


def _on_text(rows: Sequence[tuple[str, Evaluation]], reference: str | None, i: int) -> Table:
    last = rows[-1][1]
    text = last.texts[i]
    errors = ONE_WINDOW if text.windows == 1 else ERRORS
    table = Table(title=f"{about(text)}, {last.model.dtype}; {errors}", title_justify="left")
    headings = ("model", "perplexity", "ln ratio", "KL mean", "KL median", "KL p99", "same top", "MiB", "bits/weight")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    if reference is not None:
        size = None if last.reference_size is None else last.reference_size.bytes
        original = measured(text.figures.get("reference_perplexity"), ".4f")
        table.add_row(reference, original, *"-----", number(size, ".2f", MIB), "-")
    for name, e in rows:
        figures = e.texts[i].figures
        plain = (("kl_median", ".5f"), ("kl_p99", ".4f"), ("same_top", ".2%"))
        table.add_row(
            name,
            measured(figures.get("perplexity"), ".4f"),
            measured(figures.get("log_perplexity_ratio"), ".4f"),
            measured(figures.get("kl_mean"), ".5f"),
            *(number(figures[key].value if key in figures else None, form) for key, form in plain),
            number(e.bytes, ".2f", MIB),
            number(e.bits_per_weight, ".2f"),
        )
    return table


def about(text: TextResult) -> str:
    """A text and its protocol: windows overlap where one begins every so many tokens."""
    role = "" if text.role == "held-out" else " (calibration text)"
    every = "" if text.stride == text.length else f", one every {text.stride}"
    windows = "one window" if text.windows == 1 else f"{text.windows} windows"
    return f"{text.name}{role}: {text.tokens} tokens, {windows} of {text.length}{every}"


def kernels(rows: Sequence[KernelRow], device: str, libraries: Sequence[LibraryRow]) -> None:
    """One row per compressed layer: its kernel for few, some and many tokens, and why not a faster one. One line per
    library of compiled loops."""
    table = Table(title=f"kernels on {device}, by tokens", title_justify="left")
    for heading in ("layer", "shape", "scheme", *(f"{M}" for M in rows[0].kernels), "why not a faster one"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        shape = " x ".join(map(str, row.shape))
        table.add_row(row.name, shape, row.scheme, *row.kernels.values(), "; ".join(row.why_not))
    console().print(table)
    for library in libraries:
        state = f"compiled ({library.instructions})" if library.instructions else "; ".join(library.why_not)
        console().print(f"{library.about}: {state}")
    refused = [row for row in rows if row.why_not_batch_invariant]
    said = "every layer can be batch-invariant (compress.load(..., batch_invariant=True))"
    if refused:
        why = "; ".join(refused[0].why_not_batch_invariant)
        said = f"{len(refused)} of {len(rows)} layers cannot be batch-invariant: {refused[0].name}, {why}"
    console().print(said)


def calibration(ranges: Sequence[RangeRecord]) -> None:
    """One row per range that calibration fixed, the one that clips most in bold, and a sentence about all."""
    table = Table()
    for heading in ("tensor", "calibrator", "observed", "range", "clipped", "tokens"):
        side: Literal["left", "right"] = "left" if heading in ("tensor", "calibrator") else "right"
        table.add_column(heading, justify=side, overflow="fold")
    worst = most_clipped(ranges)
    for each in ranges:
        several = f" ({each.ranges} ranges)" if each.ranges > 1 else ""
        table.add_row(
            title_of(each),
            each.calibrator,
            interval(each.lowest, each.highest),
            interval(each.low, each.high) + several,
            percent(each.clipped),
            f"{each.tokens}",
            style="bold" if each is worst and each.clipped else None,
        )
    out = console()
    out.print(table)
    out.print(clipped(ranges))


def exports(offers: Sequence[Offer]) -> None:
    """One row per way to write a checkpoint: its word, what it writes, and whether that fits."""
    table = Table()
    table.add_column("--to", no_wrap=True)
    for heading in ("writes", "fits"):
        table.add_column(heading, overflow="fold")
    for offer in offers:
        table.add_row(offer.name, offer.about, f"no: {'; '.join(offer.why_not)}" if offer.why_not else "yes")
    console().print(table)


def inspection(rows: Sequence[Row], size: Size) -> None:
    """One row per layer, and a sentence about the whole."""
    table = Table()
    for heading in ("layer", "shape", "scheme", "bits/weight", "bytes", "remark"):
        side: Literal["left", "right"] = "right" if heading in ("bits/weight", "bytes") else "left"
        table.add_column(heading, justify=side, overflow="fold" if heading in ("layer", "remark") else "ellipsis")
    for row in rows:
        shape = " x ".join(map(str, row.shape))
        table.add_row(row.name, shape, row.scheme, f"{row.bits:.2f}", f"{row.bytes}", row.remark)
    out = console()
    out.print(table)
    whole = f"{size.parameters} parameters, {size.bytes / MIB:.2f} MiB of weight files"
    if size.compressed_weights:
        out.print(
            f"{whole}, {size.bits_per_parameter:.2f} bits per parameter; {size.compressed_weights} of them compressed "
            f"to {size.bits_per_weight:.2f} bits each"
        )
    else:
        out.print(f"{whole}, not compressed")
    if size.cache is not None:
        out.print(f"keys and values: {size.cache}")
