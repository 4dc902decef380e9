"""`compress export`: a compressed checkpoint for readers that do not know it."""

from dataclasses import asdict

import click

import compress
from compress.cli.exits import exits_cleanly
from compress.cli.options import begin, json_option, plugin_option, quiet_option, write_report
from compress.cli.terminal import visible
from compress.errors import InputError


@click.command(short_help="Write a compressed checkpoint as a plain, dense one.")
@click.argument("model")
@click.option("--dense", is_flag=True, help="The dense weights that the codes stand for, as transformers writes them.")
@click.option("--output", required=True, metavar="DIR", help="The directory to write. It appears when it is complete.")
@click.option("--overwrite", is_flag=True, help="Replace an output that this tool wrote.")
@plugin_option
@json_option
@quiet_option
@exits_cleanly
def export(model: str, dense: bool, output: str, overwrite: bool, json_file: str | None, quiet: bool) -> None:
    """Write a compressed checkpoint for readers that do not know it: with --dense as a plain checkpoint of
    transformers, whose weights are exactly what the codes stand for. It takes the bytes of the original again.

    \b
    compress export OUT --dense --output DIR
    """
    if not dense:
        raise InputError("say what to export: --dense, the weights that the codes stand for, as a plain checkpoint")
    begin()
    from compress.cli.progress import reporting

    with reporting("export", quiet) as reporter:
        made = compress.export_dense(model, output, overwrite=overwrite, reporter=reporter)
    write_report(json_file, asdict(made))
    if not quiet and json_file != "-":
        click.echo(visible(f"{output}: {made.layers} layers dense, {made.bytes:,} bytes of weights"))
