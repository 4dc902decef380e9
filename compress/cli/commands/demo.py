"""`compress demo`: two methods on the built-in model, side by side."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

import compress
from compress.base.errors import CompressError, InputError
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import json_option, overwrite_option, quiet_option
from compress.cli.options import begin, write_report


@click.command(short_help="Compare plain rounding and GPTQ on the built-in model.")
@click.option("--scheme", default="w3a16", show_default=True, help="w2a16 ... w8a16: bits per weight.")
@click.option("--group-size", type=int, default=128, show_default=True, help="Inputs that share a scale.")
@click.option("--output", metavar="DIR", help="Keep the two checkpoints here.  [default: a temporary directory]")
@overwrite_option("Replace the checkpoints of an earlier demo in --output, and the file of --json.")
@json_option
@quiet_option
@exits_cleanly
def demo(scheme: str, group_size: int, output: str | None, overwrite: bool, json_file: str | None, quiet: bool) -> None:
    """Quantize the built-in model by plain rounding and by GPTQ, and compare both with the original."""
    from compress.cli.progress import reporting

    if overwrite and output is None and json_file in (None, "-"):
        raise InputError("--overwrite needs --output or --json FILE; without them the demo keeps nothing")
    begin()
    from compress.evaluation.json_document import as_document

    with tempfile.TemporaryDirectory() as scratch, _without_resuming(output is not None):
        rows = []
        for method in (
            compress.RTN(scheme=scheme, group_size=group_size),
            compress.GPTQ(scheme=scheme, group_size=group_size),
        ):
            target = Path(output or scratch) / f"demo-{scheme}-{method.name}"
            with reporting(f"{method.name} quantize", quiet) as reporter:
                compress.quantize(
                    "demo",
                    method,
                    calibration="demo" if method.calibrated else None,
                    output=target,
                    overwrite=overwrite,
                    reporter=reporter,
                )
            with reporting(f"{method.name} evaluate", quiet) as reporter:
                found = compress.evaluate(target, reference="demo", text="demo", reporter=reporter)
            rows.append((f"{method.name.upper()} {scheme} g{group_size}", found))
    write_report(json_file, {name: as_document(found) for name, found in rows})
    if not quiet and json_file != "-":
        from compress.cli.evaluation_tables import tables_of
        from compress.evaluation.report.terminal import show

        show(*tables_of(rows, "fp16 (original)"))


@contextmanager
def _without_resuming(kept: bool) -> Iterator[None]:
    """Replaces the notes of a run that was stopped, which name an option that the demo does not have. kept: its work is
    still there, in the way of the next demo."""
    try:
        yield
    except (KeyboardInterrupt, CompressError) as error:
        if getattr(error, "__notes__", ()):
            error.__notes__ = ["run again with --overwrite"] if kept else []
        raise
