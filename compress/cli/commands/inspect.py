"""`compress inspect` and `verify`: what a checkpoint holds, and whether it is right."""

from dataclasses import asdict
from pathlib import Path

import click

import compress
from compress.base.errors import InputError
from compress.base.terminal import visible
from compress.cli.exit_codes import exits_cleanly
from compress.cli.options import (
    begin,
    check_page,
    device_option,
    files_overwrite_option,
    html_option,
    json_option,
    plugin_option,
    quiet_option,
    trust_option,
    writable,
    write_report,
)


@click.command(short_help="Show every layer: scheme, bits, bytes, why it was left alone.")
@click.argument("model")
@click.option("--kernels", is_flag=True, help="Show which kernel each compressed layer gets, and why not a faster one.")
@click.option("--calibration", is_flag=True, help="Show the ranges that calibration fixed, and what they clip.")
@click.option("--training", is_flag=True, help="Show how the model was trained: steps, losses, speed.")
@html_option("With --calibration: write its table and histograms as one page.")
@click.option("--svg", metavar="FILE", callback=writable, help="With --training: draw the losses as a picture.")
@trust_option
@plugin_option
@device_option
@json_option
@files_overwrite_option
@quiet_option
@exits_cleanly
def inspect(
    model: str,
    kernels: bool,
    calibration: bool,
    training: bool,
    html: str | None,
    svg: str | None,
    trust_remote_code: bool,
    device: str | None,
    json_file: str | None,
    quiet: bool,
) -> None:
    """Show every layer of a checkpoint: shape, scheme, bits, bytes, and what was left alone and why."""
    wanted = {"--kernels": kernels, "--calibration": calibration, "--training": training}
    reports = [name for name, asked in wanted.items() if asked]
    if len(reports) > 1:
        raise InputError(f"{reports[0]} and {reports[1]} are two reports; ask for one")
    if svg is not None and not training:
        raise InputError("--svg is for --training, which has losses to draw; drop it or add that")
    if svg == "-":
        raise InputError("--svg '-'; give a file")
    if html is not None and not calibration:
        raise InputError("--html is for --calibration, which has histograms to draw; drop it or add that")
    if device is not None and not kernels:
        raise InputError("--device is for --kernels: without it nothing depends on a device")
    if trust_remote_code and not kernels:
        raise InputError("--trust-remote-code is for --kernels: without it nothing of the model is run")
    check_page(html)
    begin()
    silent = quiet or json_file == "-"
    if kernels:
        _kernels(model, device, trust_remote_code, json_file, silent)
    elif calibration:
        _calibration(model, html, json_file, silent)
    elif training:
        _training(model, svg, json_file, silent)
    else:
        _layers(model, json_file, silent)


def _kernels(model: str, device: str | None, trust_remote_code: bool, json_file: str | None, silent: bool) -> None:
    """Report the kernel that each layer gets."""
    from compress.base.device import find_device
    from compress.cli import tables as show
    from compress.evaluation.cost.routes import kernel_rows, library_rows

    target = find_device(device)
    rows = kernel_rows(model, target, trust_remote_code=trust_remote_code)
    libraries = library_rows(target)
    report = {"libraries": [asdict(row) for row in libraries], "layers": [asdict(row) for row in rows]}
    write_report(json_file, {"device": str(target), **report})
    if not silent:
        show.kernels(rows, str(target), libraries)


def _calibration(model: str, html: str | None, json_file: str | None, silent: bool) -> None:
    """The ranges that calibration fixed."""
    from compress.cli import tables as show
    from compress.evaluation.report.calibration import calibrated_ranges, content, write_ranges

    ranges = calibrated_ranges(model)
    write_report(json_file, {"model": model, "ranges": content(ranges)})
    if html is not None:
        write_ranges(model, ranges, Path(html))
    if not silent:
        show.calibration(ranges)


def _training(model: str, svg: str | None, json_file: str | None, silent: bool) -> None:
    """Report the losses of the model's training, as rows, and in files if asked for."""
    from compress.cli import tables as show
    from compress.evaluation.report.training import content, curves, rows, write_curves

    found = curves(model)
    write_report(json_file, {"model": model, "trainings": content(found)})
    if svg is not None:
        write_curves(model, found, Path(svg))
    if not silent:
        show.curves(rows(found))


def _layers(model: str, json_file: str | None, silent: bool) -> None:
    """Every layer, and the size of the whole."""
    from compress.checkpoint.read.fused import unlike_numbers
    from compress.checkpoint.read.source import find_source
    from compress.cli import tables as show
    from compress.evaluation.cost.size import inspect_checkpoint

    rows, size = inspect_checkpoint(model)
    remarks = unlike_numbers(find_source(model))
    write_report(json_file, {"layers": [asdict(row) for row in rows], "size": asdict(size), "remarks": remarks})
    if not silent:
        show.inspection(rows, size)
        for remark in remarks:
            click.echo(visible(remark))


@click.command(short_help="Check that a checkpoint holds what its run decided.")
@click.argument("model")
@trust_option
@plugin_option
@json_option
@files_overwrite_option
@quiet_option
@exits_cleanly
def verify(model: str, trust_remote_code: bool, json_file: str | None, quiet: bool) -> None:
    """Check that a written checkpoint holds what its run decided and loads in transformers as exactly that; or that an
    export does, as the package of its readers reads it."""
    begin()
    found = compress.verify(model, trust_remote_code)
    write_report(json_file, found)
    if not quiet and json_file != "-":
        compared = f"transformers {found['transformers']}" if "transformers" in found else f"read by {found['reader']}"
        click.echo(visible(f"{found['layers']} layers bit for bit; {compared}"))
        for remark in found.get("remarks", ()):
            click.echo(visible(remark))
