"""`compress export`: the same values, stored another way."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

import compress
from compress.base.errors import InputError, one_of
from compress.base.terminal import say, visible
from compress.checkpoint.export.registry import EXPORTERS, exporter_named
from compress.cli.byte_savings import change, end_of_export
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import (
    json_option,
    overwrite_option,
    plugin_option,
    quiet_option,
    shard_option,
    trust_option,
)
from compress.cli.options import PLUGINS, begin, given, write_report

if TYPE_CHECKING:
    from compress.checkpoint.export.exporter import Exporter


@click.command(short_help="Write a checkpoint in another layout, for other readers or in fewer bytes.")
@click.argument("model")
@click.option("--to", metavar="NAME", help=f"The layout: {', '.join(EXPORTERS)}, or one of a plugin.")
@click.option("--output", metavar="DIR", help="The directory to write. It appears when it is complete.")
@click.option("--list", "listing", is_flag=True, help="Only show which layouts fit MODEL, and why others do not.")
@overwrite_option("Replace an output that compress wrote.")
@click.option(
    "--allow-little",
    is_flag=True,
    help="With --to sparse24: accept less than 5 % of bytes saved (exit code 0 instead of 1).",
)
@click.option(
    "--template", metavar="FILE", help="Of --to gguf: a GGUF file that llama.cpp's converter made of the dense export."
)
@click.option("--name", metavar="NAME", help="Of --to gguf: the model's name in the file.  [default: its folder's]")
@shard_option
@click.option("--no-verify", is_flag=True, help="Do not read the output back with the package of its readers.")
@trust_option
@plugin_option
@json_option
@quiet_option
@exits_cleanly
def export(
    model: str,
    to: str | None,
    output: str | None,
    listing: bool,
    overwrite: bool,
    allow_little: bool,
    no_verify: bool,
    template: str | None,
    name: str | None,
    shard_size: str | None,
    trust_remote_code: bool,
    json_file: str | None,
    quiet: bool,
) -> None:
    """Write a checkpoint of compress in another layout, with exactly the same values.

    \b
    dense     a plain transformers checkpoint, as large as the original
    gptq, awq, bitsandbytes, mlx, modelopt    the layouts of these names
    gguf      one GGUF file, for llama.cpp, Ollama and LM Studio
    onnx      an ONNX graph for ONNX Runtime, which rounds inputs to int8
              (onnx-exact: it does not; onnx-qdq: standard operators alone)
    sparse24  2:4 layers without their zeros, for `compress.load` alone

    \b
    compress export OUT --list
    compress export OUT --to dense --output DIR
    """
    silent = quiet or json_file == "-"
    if listing:
        _check_listing()
        begin()
        _list(model, trust_remote_code, json_file, silent)
        return
    layout, folder = _check(to, output)
    begin()
    words = {"template": template, "name": name}
    exporter = exporter_named(layout, **{word: value for word, value in words.items() if value is not None})
    _check_options(layout, exporter, no_verify)
    from compress.checkpoint.byte_savings import Saving
    from compress.cli.progress import reporting

    how: dict[str, Any] = {"shard_size": shard_size, "trust_remote_code": trust_remote_code}
    with reporting("export", quiet) as reporter:
        how |= {"overwrite": overwrite, "verify": not no_verify, "reporter": reporter}
        exported = compress.export(model, folder, exporter, **how)
    write_report(json_file, asdict(exported))
    if not silent:
        said = change(Saving(exported.bytes_before, exported.bytes))
        say(f"{model} -> {folder}: {said}; {exported.layers} layers {exporter.kind}")
        _show_next(layout, folder)
    if exporter.smaller and not allow_little:
        end_of_export(exported, exporter.kind, folder)


def _show_next(layout: str, folder: str) -> None:
    """The command lines that run a layout which engines open."""
    from compress.jobs.target_engines import ENGINES, commands_to_run

    engines = (name for name, engine in ENGINES.items() if engine.to == layout)
    for line in (line for name in engines for line in commands_to_run(name, folder, "")):
        click.echo(f"next: {visible(line)}")


def _check_listing() -> None:
    """Refuse options of writing beside --list. (--overwrite is of --json, too.)"""
    for option in ("to", "output", "allow_little", "no_verify", "template", "name", "shard_size"):
        if given(option):
            raise InputError(f"--list writes no checkpoint; drop --{option.replace('_', '-')}")


def _check(name: str | None, output: str | None) -> tuple[str, str]:
    """The layout and the output, both of which are needed. A name may be a plugin's, which is not imported yet."""
    if name is None:
        known = " or ".join(f"--to {name}" for name in EXPORTERS)
        raise InputError(f"say what to export: {known}; `compress export OUT --list` shows which of them fit")
    if not click.get_current_context().meta.get(PLUGINS):
        one_of("export", name, EXPORTERS)
    if output is None:
        raise InputError("--output DIR is missing: the directory to write")
    return name, output


def _check_options(name: str, exporter: "Exporter", no_verify: bool) -> None:
    if given("allow_little") and not exporter.smaller:
        raise InputError(f"--to {name} promises no smaller checkpoint, and is not held to one; drop --allow-little")
    if no_verify and not exporter.reads_back:
        raise InputError(f"--to {name} is not read back; drop --no-verify")


def _list(model: str, trusted: bool, json_file: str | None, silent: bool) -> None:
    """The ways to write a checkpoint, and why some do not fit."""
    from compress.checkpoint.export.write import offers
    from compress.evaluation.report.content import ReportTable
    from compress.evaluation.report.terminal import show

    found = offers(model, trusted)
    write_report(json_file, {"model": model, "exports": [asdict(offer) for offer in found]})
    rows = [(each.name, each.about, f"no: {'; '.join(each.why_not)}" if each.why_not else "yes") for each in found]
    if not silent:
        show(ReportTable(("--to", "writes", "fits"), rows, names=3))
