"""`compress plan`: what `compress quantize` will do, told before it begins."""

from typing import Any

import click

import compress
from compress.base.errors import InputError
from compress.cli.commands.quantize import chosen_options, passes_asked, recipe_options
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import (
    OF_A_METHOD,
    added_options,
    answer_options,
    device_option,
    extent_options,
    ignore_option,
    method_options,
    setting_option,
    trust_option,
)
from compress.cli.options import begin, write_report
from compress.cli.run_command import parts_options, store_option


@click.command(short_help="Show what quantize will do, in seconds: layers, bytes, memory, kernels.")
@click.argument("model")
@recipe_options
@method_options
@setting_option
@added_options
@extent_options
@ignore_option
@click.option("--output", metavar="OUT", help="Where the output will be written: its free disk space is checked.")
@click.option(
    "--device-memory",
    metavar="BYTES",
    help="Memory of the device, like 12GB: tells whether quantizing and running fit. [default: what is free here]",
)
@store_option
@parts_options
@trust_option
@device_option
@answer_options
@exits_cleanly
def plan(
    model: str,
    method: str,
    effort: str | None,
    recipe: str | None,
    rotate: bool | None,
    engine: str | None,
    embeddings: str | None,
    kv_cache: str | None,
    settings: tuple[str, ...],
    json_file: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Show what `compress quantize` will do with MODEL: schemes, sizes, memory, time, engines. Reads no weights and
    writes nothing. MODEL may also be a config.json, or the name of a well-known model, and --device a GPU that this
    machine does not have.

    \b
    compress plan llama-3.1-8b --method gptq --device cuda --device-memory 12GB
    compress plan MODEL --method gptq --scheme w4a16
    compress plan MODEL --recipe w4a16-gptq --json plan.json
    """
    chosen = chosen_options({key: options.pop(key) for key in OF_A_METHOD}, settings)
    passes, notes = passes_asked(method, effort, recipe, rotate, engine, chosen, embeddings, kv_cache)
    begin()
    if engine is not None:
        from compress.checkpoint.read.source import find_source
        from compress.jobs.forecast.known_models import model_from_configuration
        from compress.jobs.quantize_for import check_model, check_shapes

        alone = model_from_configuration(model)
        if alone is None:
            check_model(find_source(model, options["trust_remote_code"]), engine, passes, options["ignore"])
        else:
            check_shapes(alone, engine, passes, options["ignore"])
            notes.append(f"whether {engine} has this family, its checkpoint alone tells")
    forecast = compress.plan(model, passes, **options)
    if engine is not None and (why := forecast.engines[engine]) is not None:
        raise InputError(why)
    write_report(json_file, forecast.to_dict())
    if not quiet and json_file != "-":
        from compress.cli.byte_savings import embedding_line
        from compress.cli.forecasts import show_plan

        show_plan(forecast, [*notes, *embedding_line(forecast.tables, forecast.saving.after, engine)])
