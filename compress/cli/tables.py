"""Tables of results, evaluations and layers, on standard output."""

from collections.abc import Sequence

from compress.checkpoint.export.write import Offer
from compress.checkpoint.write.record import RangeRecord
from compress.evaluation.cost.routes import KernelRow, LibraryRow
from compress.evaluation.cost.size import Size, SizeRow
from compress.evaluation.document import Evaluation, Figure, TextResult
from compress.evaluation.report.calibration import clipped, table
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.terminal import show

MIB = 2**20

ERRORS = "± is the standard error over windows, paired but for perplexity"
ONE_WINDOW = "no standard error, too little text to tell models apart"


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    """A figure, or a dash for one that there is not."""
    return "-" if value is None else format(value / scale, form)


def curves(rows: Sequence[Sequence[str]]) -> None:
    """Show the losses that each training of a run has measured, step by step."""
    show(ReportTable(("steps", "loss", "held out", "tokens (samples)/s"), [tuple(row) for row in rows], names=0))


def measured(figure: Figure | None, form: str) -> str:
    """A figure and its standard error over windows, where there is one."""
    if figure is None or figure.error is None:
        return number(None if figure is None else figure.value, form)
    return f"{figure.value:{form}} ± {figure.error:{form}}"


def evaluations(rows: Sequence[tuple[str, Evaluation]], reference: str | None) -> None:
    """For every text one row per model; the original first where there is one.

    Errors are over windows; those of KL and of the ratio are paired (`compress.evaluation.quality.statistics`).
    """
    show(*(_on_text(rows, reference, i) for i in range(len(rows[-1][1].texts))))


def _on_text(rows: Sequence[tuple[str, Evaluation]], reference: str | None, i: int) -> ReportTable:
    last = rows[-1][1]
    text = last.texts[i]
    errors = ONE_WINDOW if text.windows == 1 else ERRORS
    columns = ("model", "perplexity", "ln ratio", "KL mean", "KL median", "KL p99", "same top", "MiB", "bits/weight")
    shown: list[tuple[str, ...]] = []
    if reference is not None:
        size = None if last.reference_size is None else last.reference_size.bytes
        original = measured(text.figures.get("reference_perplexity"), ".4f")
        shown.append((reference, original, *"-----", number(size, ".2f", MIB), "-"))
    for name, e in rows:
        figures = e.texts[i].figures
        plain = (("kl_median", ".5f"), ("kl_p99", ".4f"), ("same_top", ".2%"))
        shown.append(
            (
                name,
                measured(figures.get("perplexity"), ".4f"),
                measured(figures.get("log_perplexity_ratio"), ".4f"),
                measured(figures.get("kl_mean"), ".5f"),
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


def kernels(rows: Sequence[KernelRow], device: str, libraries: Sequence[LibraryRow]) -> None:
    """One row per compressed layer: its kernel for few, some and many tokens, and why not a faster one. One line per
    library of compiled loops."""
    columns = ("layer", "shape", "scheme", *(f"{M}" for M in rows[0].kernels), "why not a faster one")
    shown = [(row.name, by(row.shape), row.scheme, *row.kernels.values(), "; ".join(row.why_not)) for row in rows]
    lines = [
        f"{each.about}: {f'compiled ({each.instructions})' if each.instructions else '; '.join(each.why_not)}"
        for each in libraries
    ]
    refused = [row for row in rows if row.why_not_batch_invariant]
    said = "every layer can be batch-invariant (compress.load(..., batch_invariant=True))"
    if refused:
        why = "; ".join(refused[0].why_not_batch_invariant)
        said = f"{len(refused)} of {len(rows)} layers cannot be batch-invariant: {refused[0].name}, {why}"
    show(ReportTable(columns, shown, f"kernels on {device}, by tokens", names=len(columns)), *lines, said)


def by(shape: Sequence[int]) -> str:
    """A shape in words."""
    return " x ".join(map(str, shape))


def calibration(ranges: Sequence[RangeRecord]) -> None:
    """Show the ranges that calibration fixed, and a sentence about all."""
    show(table(ranges), clipped(ranges))


def exports(offers: Sequence[Offer]) -> None:
    """One row per way to write a checkpoint: its word, what it writes, and whether that fits."""
    rows = [
        (offer.name, offer.about, f"no: {'; '.join(offer.why_not)}" if offer.why_not else "yes") for offer in offers
    ]
    show(ReportTable(("--to", "writes", "fits"), rows, names=3))


def inspection(rows: Sequence[SizeRow], size: Size) -> None:
    """One row per layer, and a sentence about the whole."""
    columns = ("layer", "shape", "scheme", "bits/weight", "bytes", "remark")
    shown = [(row.name, by(row.shape), row.scheme, f"{row.bits:.2f}", f"{row.bytes}", row.remark) for row in rows]
    whole = f"{size.parameters} parameters, {size.bytes / MIB:.2f} MiB of weight files"
    if size.compressed_weights:
        whole += (
            f", {size.bits_per_parameter:.2f} bits per parameter; {size.compressed_weights} of them compressed to "
            f"{size.bits_per_weight:.2f} bits each"
        )
    else:
        whole += ", not compressed"
    cache = [] if size.cache is None else [f"keys and values: {size.cache}"]
    show(ReportTable(columns, shown, names=3, left=frozenset({5})), whole, *cache)
