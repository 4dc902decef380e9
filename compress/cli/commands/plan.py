"""`compress plan`: what `compress quantize` will do, told before it begins."""

import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

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
from compress.cli.options import PLUGINS, begin, given, write_report
from compress.cli.run_command import parts_options, store_option

if TYPE_CHECKING:
    from compress.jobs.forecast.forecast import CheaperRun

# Options that quantize is not given, or last.
OF_PLAN = ("output", "device_memory", "ranks", "json_file", "overwrite", "quiet")
OF_TEXT = ("calibration", "samples", "length", "bos", "batch_size")


def _no_text(context: click.Context, option: click.Parameter, text: str | None) -> None:
    if text is not None:
        raise click.UsageError("`compress plan` needs no text; drop --calibration", context)


def quantize_command(model: str, calibrated: bool, cheaper: "CheaperRun | None" = None) -> str | None:
    """The command line of what the running `compress plan` was asked about, or of a cheaper run. calibrated: it needs a
    text. None where the cheaper run is another method than that of a recipe."""
    from compress.jobs.forecast.forecast import CARDS
    from compress.jobs.known_models import hub_id
    from compress.passes.protocol.recipe import options_of, pass_class

    context = click.get_current_context()
    words = [] if cheaper is None else cheaper.options.split()
    instead: dict[str, Any] = dict(zip(words[::2], words[1::2], strict=True))
    method, calibrated = instead.get("--method"), calibrated if cheaper is None else cheaper.calibrated
    if method is not None and given("recipe"):
        return None
    if method is not None and given("settings"):
        known = options_of(pass_class(method))
        instead["--set"] = tuple(each for each in context.params["settings"] if each.partition("=")[0] in known)
    left_out = {*OF_PLAN, *(() if calibrated else OF_TEXT), *(() if method is None else ("effort",))}
    line = ["compress", "quantize", shlex.quote(hub_id(model) or model)]
    for option in (each for each in context.command.params if isinstance(each, click.Option)):
        name, flag = str(option.name), option.opts[0]
        if name in left_out:
            continue
        value = context.params.get(name, context.meta.get(PLUGINS)) if given(name) else None
        value = "cuda" if name == "device" and value in CARDS else value
        value = instead.get(flag, "TEXT" if name == "calibration" else value)
        if isinstance(value, bool):
            line.append(flag if value else option.secondary_opts[0])
        elif value is not None:
            values = value if isinstance(value, tuple) else [value]
            line += [word for each in values for word in (flag, shlex.quote(str(each)))]
    return " ".join([*line, "--output", shlex.quote(context.params["output"] or "OUT")])


@click.command(short_help="Show what quantize will do, in seconds: layers, bytes, memory, kernels.")
@click.argument("model")
@recipe_options
@method_options
@setting_option
@added_options
@click.option("--calibration", hidden=True, expose_value=False, callback=_no_text)
@extent_options
@ignore_option
@click.option("--output", metavar="OUT", help="Where the output will be written: its free disk space is checked.")
@click.option(
    "--device-memory",
    metavar="BYTES",
    help="Memory of the device, like 12GiB: tells whether quantizing and running fit. [default: what is free here]",
)
@click.option("--ranks", type=int, metavar="N", help="Tell what each of N ranks of a sharded run takes (--fsdp).")
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
    compress plan llama-3.1-8b --method gptq --device cuda --device-memory 12GiB
    compress plan MODEL --method gptq --scheme w4a16
    compress plan MODEL --recipe w4a16-gptq --json plan.json
    """
    chosen = chosen_options({key: options.pop(key) for key in OF_A_METHOD}, settings)
    passes, notes = passes_asked(method, effort, recipe, rotate, engine, chosen, embeddings, kv_cache)
    begin()
    if engine is not None:
        from compress.checkpoint.read.source import find_source
        from compress.jobs.known_models import model_from_configuration
        from compress.jobs.quantize_for import check_model, check_shapes

        alone = model_from_configuration(model)
        if alone is None:
            check_model(find_source(model, options["trust_remote_code"]), engine, passes, options["ignore"])
        else:
            check_shapes(alone, engine, passes, options["ignore"])
            notes.append(f"whether {engine} has this family, its checkpoint alone tells")
    forecast = compress.plan(model, passes, **options)
    if engine is not None:
        from compress.jobs.quantize_for import with_export
        from compress.jobs.target_engines import engine_named

        if (why := forecast.engines[engine]) is not None:
            raise InputError(why)
        forecast = with_export(forecast) if engine_named(engine).to is not None else forecast
    write_report(json_file, forecast.to_dict())
    if not quiet and json_file != "-":
        from compress.cli.byte_savings import embedding_line
        from compress.cli.forecasts import show_plan

        command = partial(quantize_command, model, any(p.calibrated for p in passes))
        show_plan(forecast, [*notes, *embedding_line(forecast.tables, forecast.saving.after, engine)], command)
