"""`compress inspect` and `verify`: what a checkpoint holds, and whether it is right."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import compress
from compress.base.errors import InputError
from compress.base.terminal import say
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import answer_options, plugin_option, reading_options, trust_option
from compress.cli.options import begin, write_report

if TYPE_CHECKING:
    from compress.evaluation.cost.routes import KernelRow, LibraryRow
    from compress.evaluation.cost.size import Size, SizeRow
    from compress.evaluation.report.content import ReportTable

    Line = ReportTable | str

MIB = 2**20


@click.command(short_help="Show the layers: scheme, bits, bytes, why some were left alone.")
@click.argument("model")
@click.option("--all", "every", is_flag=True, help="Show every layer.  [default: layers that are alike in one row]")
@click.option("--kernels", is_flag=True, help="Show which kernel each compressed layer gets, and why not a faster one.")
@click.option("--calibration", is_flag=True, help="Show the ranges that calibration fixed, and what they clip.")
@click.option("--training", is_flag=True, help="Show how the model was trained: steps, losses, speed.")
@reading_options
@exits_cleanly
def inspect(
    model: str,
    every: bool,
    kernels: bool,
    calibration: bool,
    training: bool,
    trust_remote_code: bool,
    device: str | None,
    json_file: str | None,
    quiet: bool,
) -> None:
    """Show the layers of a checkpoint: shape, scheme, bits, bytes, and what was left alone and why. Of a directory that
    an engine opens, those of its checkpoint beside it."""
    wanted = {"--all": every, "--kernels": kernels, "--calibration": calibration, "--training": training}
    reports = [name for name, asked in wanted.items() if asked]
    if len(reports) > 1:
        raise InputError(f"{reports[0]} and {reports[1]} are two reports; ask for one")
    if device is not None and not kernels:
        raise InputError("--device is for --kernels: without it nothing depends on a device")
    if trust_remote_code and not kernels:
        raise InputError("--trust-remote-code is for --kernels: without it nothing of the model is run")
    begin()
    from compress.evaluation.report.terminal import show

    if kernels:
        content, blocks = of_kernels(model, device, trust_remote_code)
    elif calibration or training:
        content, blocks = (of_calibration if calibration else of_training)(model)
    else:
        content, blocks = of_layers(model, every)
    write_report(json_file, content)
    if not quiet and json_file != "-":
        show(*blocks)
        for remark in content.get("remarks", ()):
            say(remark)


def of_kernels(model: str, device: str | None, trust_remote_code: bool) -> tuple[dict[str, Any], list["Line"]]:
    """(JSON, a row for each compressed layer: its kernel for few, some and many tokens, and why not a faster one; and
    lines on the libraries of compiled loops)."""
    from compress.base.device import find_device
    from compress.evaluation.cost.routes import kernel_rows, library_rows

    target = find_device(device)
    rows, libraries = kernel_rows(model, target, trust_remote_code=trust_remote_code), library_rows(target)
    report = {"libraries": [asdict(row) for row in libraries], "layers": [asdict(row) for row in rows]}
    return {"device": str(target), **report}, kernel_lines(rows, str(target), libraries)


def kernel_lines(rows: Sequence["KernelRow"], device: str, libraries: Sequence["LibraryRow"]) -> list["Line"]:
    """The table of kernels, and lines below it."""
    from compress.evaluation.report.content import ReportTable

    columns = ("layer", "shape", "scheme", *(f"{M}" for M in rows[0].kernels), "why not a faster one")
    cells = [(row.name, by(row.shape), row.scheme, *row.kernels.values(), "; ".join(row.why_not)) for row in rows]
    lines = [
        f"{each.about}: {f'compiled ({each.instructions})' if each.instructions else '; '.join(each.why_not)}"
        for each in libraries
    ]
    lines.append("every layer can be batch-invariant (compress.load(..., batch_invariant=True))")
    if refused := [row for row in rows if row.why_not_batch_invariant]:
        why = "; ".join(refused[0].why_not_batch_invariant)
        lines[-1] = f"{len(refused)} of {len(rows)} layers cannot be batch-invariant: {refused[0].name}, {why}"
    return [ReportTable(columns, cells, f"kernels on {device}, by tokens", names=len(columns)), *lines]


def by(shape: Sequence[int]) -> str:
    """A shape in words."""
    return " x ".join(map(str, shape))


def of_calibration(model: str) -> tuple[dict[str, Any], list["Line"]]:
    """(JSON, tables and lines) of the ranges that calibration fixed."""
    from compress.evaluation.report.calibration import calibrated_ranges, clipping_line, content, table

    ranges = calibrated_ranges(model)
    return {"model": model, "ranges": content(ranges)}, [table(ranges), clipping_line(ranges)]


def of_training(model: str) -> tuple[dict[str, Any], list["Line"]]:
    """(JSON, tables) of the losses of the model's training."""
    from compress.evaluation.report.training import content, curves, table

    trainings = curves(model)
    return {"model": model, "trainings": content(trainings)}, [table(trainings)]


def of_layers(model: str, every: bool) -> tuple[dict[str, Any], list["Line"]]:
    """(JSON of each layer; a row for each layer, or for those that are alike, and lines about the whole)."""
    from compress.checkpoint.read.fused import unlike_numbers
    from compress.checkpoint.read.source import checkpoint_of, find_source
    from compress.evaluation.cost.size import inspect_checkpoint

    held = checkpoint_of(Path(model))
    followed = [] if held == Path(model) else [f"{model} is an export of {held}, whose layers these are"]
    rows, size = inspect_checkpoint(model)
    content = {"layers": [asdict(row) for row in rows], "size": asdict(size)}
    table = (layer_table if every else table_of_groups)(rows)
    return content | {"remarks": unlike_numbers(find_source(model))}, [*followed, table, *size_lines(size)]


def layer_table(rows: Sequence["SizeRow"]) -> "ReportTable":
    """A row for each layer."""
    from compress.evaluation.report.content import ReportTable

    columns = ("layer", "shape", "scheme", "bits/weight", "bytes", "remark")
    cells = [(row.name, by(row.shape), row.scheme, f"{row.bits:.2f}", f"{row.bytes}", row.remark) for row in rows]
    return ReportTable(columns, cells, names=3, left=frozenset({5}))


def table_of_groups(rows: Sequence["SizeRow"]) -> "ReportTable":
    """A row for layers of one kind, shape and scheme; of remarks that differ, what is before their figures."""
    from compress.cli.forecasts import alike
    from compress.evaluation.report.content import ReportTable

    cells = []
    for name, same in alike(rows):
        remarks = {row.remark for row in same}
        if len(remarks) > 1:
            remarks = {remark.partition(": ")[0] for remark in remarks}
        size, weights = sum(row.bytes for row in same), sum(math.prod(row.shape) for row in same)
        figures = f"{8 * size / max(1, weights):.2f}", f"{size / MIB:.2f}"
        cells.append((name, str(len(same)), by(same[0].shape), same[0].scheme, *figures, "; ".join(sorted(remarks))))
    columns = ("layers", "number", "shape", "scheme", "bits/weight", "MiB", "remark")
    return ReportTable(columns, cells, left=frozenset({3, 6}))


def size_lines(size: "Size") -> list["Line"]:
    """A sentence about the whole, and one about a rounded cache."""
    whole = f"{size.parameters} parameters, {size.bytes / MIB:.2f} MiB of weight files"
    if size.compressed_weights:
        whole += (
            f", {size.bits_per_parameter:.2f} bits per parameter; {size.compressed_weights} of them compressed to "
            f"{size.bits_per_weight:.2f} bits each"
        )
    else:
        whole += ", not compressed"
    cache = [] if size.cache is None else [f"keys and values: {size.cache}"]
    return [whole, *cache]


@click.command(short_help="Check that a checkpoint holds what its run decided.")
@click.argument("model")
@trust_option
@plugin_option
@answer_options
@exits_cleanly
def verify(model: str, trust_remote_code: bool, json_file: str | None, quiet: bool) -> None:
    """Check that a written checkpoint holds what its run decided and loads in transformers as exactly that; or that an
    export does, as the package of its readers reads it."""
    begin()
    found = compress.verify(model, trust_remote_code)
    write_report(json_file, found)
    if not quiet and json_file != "-":
        compared = f"transformers {found['transformers']}" if "transformers" in found else f"read by {found['reader']}"
        say(f"{found['layers']} layers bit for bit; {compared}")
        for remark in found.get("remarks", ()):
            say(remark)
