"""`compress export`: the same values, stored another way."""

from dataclasses import asdict

import click

import compress
from compress.cli.exits import exits_cleanly
from compress.cli.options import begin, given, json_option, overwrite_option, plugin_option, quiet_option, write_report
from compress.cli.saving import change, end_of_export
from compress.errors import InputError
from compress.system.terminal import visible


@click.command(short_help="Write a checkpoint another way: as a plain, dense one, or its 2:4 layers as such.")
@click.argument("model")
@click.option("--dense", is_flag=True, help="The dense weights that the codes stand for, as transformers writes them.")
@click.option("--sparse24", is_flag=True, help="Layers of which two in four weights are pruned, without their zeros.")
@click.option("--output", required=True, metavar="DIR", help="The directory to write. It appears when it is complete.")
@overwrite_option("Replace an output that this tool wrote.")
@click.option(
    "--allow-little",
    is_flag=True,
    help="Of --sparse24: end with exit code 0 where less than 5 % of the bytes are saved, too.",
)
@plugin_option
@json_option
@quiet_option
@exits_cleanly
def export(
    model: str,
    dense: bool,
    sparse24: bool,
    output: str,
    overwrite: bool,
    allow_little: bool,
    json_file: str | None,
    quiet: bool,
) -> None:
    """Write a checkpoint of this tool another way, with exactly the same values.

    With --dense as a plain checkpoint of transformers, for readers that do not know compression: it takes the bytes of
    the original again. With --sparse24 the layers that are pruned to 2:4, be they numbers or codes, as the two of four
    that are kept and their places, for `compress.load` alone: 9 bits a weight instead of 16, 3 instead of 4. Layers
    that are not 2:4 stay as they are, and are named.

    \b
    compress export OUT --dense --output DIR
    compress export OUT --sparse24 --output DIR
    """
    if dense == sparse24:
        raise InputError(
            "say what to export: --dense, the weights that the codes stand for, as a plain checkpoint, or --sparse24, "
            "layers that are 2:4 without their zeros"
        )
    if dense and given("allow_little"):
        raise InputError("--dense makes a checkpoint larger, and is not refused for that; drop --allow-little")
    begin()
    from compress.checkpoint.saving import Saving
    from compress.cli.progress import reporting

    with reporting("export", quiet) as reporter:
        how = compress.export_dense if dense else compress.export_sparse24
        made = how(model, output, overwrite=overwrite, reporter=reporter)
    write_report(json_file, asdict(made))
    if not quiet and json_file != "-":
        said = change(Saving(made.bytes_before, made.bytes))
        click.echo(visible(f"{model} -> {output}: {said}; {made.layers} layers {'dense' if dense else '2:4'}"))
    if sparse24 and not allow_little:
        end_of_export(made, output)
