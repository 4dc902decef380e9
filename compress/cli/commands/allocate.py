"""`compress allocate`: a budget shared out between the layers of a model, as a recipe."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import compress
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import (
    calibration_option,
    extent_options,
    ignore_option,
    setting_option,
)
from compress.cli.options import (
    begin,
    device_option,
    files_overwrite_option,
    json_option,
    quiet_option,
    trust_option,
    writable,
    write_report,
)
from compress.cli.running import split_settings
from compress.errors import InputError

if TYPE_CHECKING:
    from compress.checkpoint.sensitivity import Sensitivity
    from compress.search.budget import Allocation


def numbers(kind: type[int] | type[float]) -> Callable[..., Any]:
    """The reader of an option that takes numbers with commas between."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
        try:
            return None if value is None else tuple(kind(word) for word in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r}; give numbers with commas between, like 3,4") from None

    return read


@click.command(short_help="Choose a scheme for each layer within a budget, as a recipe.")
@click.argument("model")
@click.option(
    "--method", default="gptq", show_default=True, help="The pass that every layer gets: gptq, k-quants, rtn, spqr."
)
@click.option("--bits", callback=numbers(int), default="2,3,4,5,6,8", show_default=True, help="Bits a layer may get.")
@click.option(
    "--group-sizes",
    callback=numbers(int),
    help="Group sizes a layer may get; -1: a whole channel.  [default: as of quantize]",
)
@click.option(
    "--outliers", callback=numbers(float), default="0", show_default=True, help="Shares of weights that may stay exact."
)
@click.option(
    "--patterns",
    default="none",
    show_default=True,
    help="Patterns that sparsegpt may prune a layer to first, like none,2:4. Only compress.load reads 2:4.",
)
@click.option(
    "--trellis",
    callback=numbers(int),
    metavar="BITS",
    help="Bits of trellis codes that a layer may get as well, like 2,3. Only compress.load reads them, and measuring "
    "them takes many times as long.",
)
@setting_option
@click.option(
    "--budget", required=True, metavar="SIZE", help="3.5bpw: bits per weight of compressed layers. 2.1GB: of all files."
)
@click.option(
    "--text",
    metavar="TEXT",
    help="Held-out text on which KL is measured (16 windows).  [default: the last windows of the calibration text]",
)
@click.option(
    "--fused/--no-fused",
    default=True,
    show_default=True,
    help="One scheme for layers that read one tensor (q, k, v; gate, up), as vLLM needs to fuse them.",
)
@calibration_option(required=True)
@extent_options
@ignore_option
@click.option("--output", required=True, metavar="RECIPE", callback=writable, help="The .yaml file to write.")
@files_overwrite_option
@trust_option
@device_option
@json_option
@quiet_option
@exits_cleanly
def allocate(
    model: str,
    method: str,
    bits: tuple[int, ...],
    group_sizes: tuple[int, ...] | None,
    outliers: tuple[float, ...],
    patterns: str,
    trellis: tuple[int, ...] | None,
    settings: tuple[str, ...],
    budget: str,
    output: str,
    json_file: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure what each scheme costs each layer of MODEL, and choose the best schemes that fit a budget.

    \b
    compress allocate MODEL --budget 3.5bpw --calibration TEXT --output mixed.yaml
    compress allocate MODEL --budget 2.1GB --bits 3,4 --group-sizes 32,128 --calibration TEXT --output mixed.yaml
    compress quantize MODEL --recipe mixed.yaml --calibration TEXT --output OUT

    The choice is exact (a 0-1 program) on bytes as the checkpoint will have them. Measurements are kept in the cache
    directory: another budget of the same model, text and schemes takes seconds.
    """
    from compress.search.budget import parse_budget, write_recipe

    wanted = parse_budget(budget)
    check_output(output)
    begin()
    from compress.cli import allocated as show
    from compress.cli.progress import reporting
    from compress.search.candidate import grid_of_candidates

    candidates = grid_of_candidates(
        method,
        bits=bits,
        group_sizes=group_sizes or (0,),
        outliers=outliers,
        patterns=patterns.split(","),
        trellis=trellis or (),
        options=split_settings(settings, {}),
    )
    with reporting("measure", quiet) as reporter:
        found = compress.measure_sensitivity(model, candidates, reporter=reporter, **options)
        made = compress.allocate(found, wanted)
    write_recipe(output, made, about(model, made))
    write_report(json_file, report(found, made))
    if not quiet and json_file != "-":
        show.allocation(found, made, model, output)


def check_output(output: str) -> None:
    """Refuse a recipe of another ending."""
    if Path(output).suffix not in (".yaml", ".yml"):
        raise InputError(f"output {output!r}; a recipe is a file that ends in .yaml")


def about(model: str, made: "Allocation") -> str:
    """The first line of a recipe."""
    kl = f"predicted KL {made.predicted_kl:.4g}"
    return f"Schemes for the layers of {Path(model).name}: {made.bits_per_weight:.4g} bits per weight, {kl}"


def report(found: "Sensitivity", made: "Allocation") -> dict[str, Any]:
    """The content of `--json`."""
    return {"sensitivity": asdict(found), "allocation": asdict(made)}
