"""`compress allocate`: a budget shared out between the layers of a model, as a recipe; and what `compress quantize
--budget` and `--max-kl` have in common with it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import compress
from compress.cli.exits import exits_cleanly
from compress.cli.options import (
    begin,
    device_option,
    files_overwrite_option,
    given,
    json_option,
    quiet_option,
    trust_option,
    writable,
    write_report,
)
from compress.cli.running import setting_option, split_settings
from compress.cli.saving import end
from compress.errors import InputError

if TYPE_CHECKING:
    from compress.search.budget import Allocation, Budget
    from compress.search.within import Mixed

# What `compress quantize` takes only beside a budget.
OF_A_BUDGET = ("text", "by", "fused")
# What it does not take beside one: what a budget finds itself, and what else would not be read.
FOUND_BY_A_BUDGET = ("scheme", "bits", "recipe", "effort", "embeddings", "kv_cache")
UNREAD_BY_A_BUDGET = ("training", "fsdp", "one_block", "convolutions", "store", "drop_zeros")
BUDGET_OPTIONS = (
    click.option("--budget", metavar="SIZE", help="3.5bpw: bits per weight of compressed layers; 2.1GB: of all files."),
    click.option("--max-kl", type=float, help="Instead: the fewest bytes at which KL to the original is at most this."),
    click.option(
        "--text",
        metavar="TEXT",
        help="Held-out text on which KL is measured (16 windows).  [default: the last windows of the calibration text]",
    ),
    click.option(
        "--by",
        type=click.Choice(["kl", "loss"]),
        default="kl",
        show_default=True,
        help="What is least: the KL of each swap alone, or errors of outputs (faster; a poor guide to deep models).",
    ),
    click.option(
        "--fused/--no-fused",
        default=True,
        show_default=True,
        help="Layers that read one tensor (q, k, v; gate, up) get one scheme, as vLLM needs to fuse them.",
    ),
)


def budget_options(command: Callable[..., None]) -> Callable[..., None]:
    """What a budget is, and how it is shared out."""
    for option in reversed(BUDGET_OPTIONS):
        command = option(command)
    return command


def numbers(kind: type[int] | type[float]) -> Callable[..., Any]:
    """What reads numbers with commas between."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
        try:
            return None if value is None else tuple(kind(word) for word in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r}; give numbers with commas between, like 3,4") from None

    return read


@click.command(short_help="Share a budget out between layers, and write that as a recipe.")
@click.argument("model")
@click.option("--method", default="gptq", show_default=True, help="The pass that every layer gets: gptq, rtn, spqr.")
@click.option("--bits", callback=numbers(int), default="2,3,4,5,6,8", show_default=True, help="Bits a layer may get.")
@click.option(
    "--group-sizes", callback=numbers(int), help="Group sizes it may get, -1 a whole channel.  [default: usual]"
)
@click.option("--outliers", callback=numbers(float), default="0", show_default=True, help="Shares of exact weights.")
@click.option(
    "--patterns",
    default="none",
    show_default=True,
    help="Zeros made first by sparsegpt, like none,2:4; of 2:4 they are not stored (for compress.load alone).",
)
@setting_option
@budget_options
@click.option("--calibration", required=True, metavar="TEXT", help="What the model is shown.")
@click.option("--samples", type=int, help="Windows of calibration text.  [default: 128; every row of a token file]")
@click.option("--length", type=int, help="Tokens per window of text.  [default: the model's context, at most 2048]")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Samples per forward pass.")
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Layers to leave alone, like '*.down_proj'.")
@click.option("--output", required=True, metavar="RECIPE", callback=writable, help="The recipe to write, a .yaml file.")
@trust_option
@device_option
@json_option
@files_overwrite_option
@quiet_option
@exits_cleanly
def allocate(
    model: str,
    method: str,
    bits: tuple[int, ...],
    group_sizes: tuple[int, ...] | None,
    outliers: tuple[float, ...],
    patterns: str,
    settings: tuple[str, ...],
    budget: str | None,
    max_kl: float | None,
    by: Any,
    output: str,
    json_file: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure what each layer of MODEL loses by each scheme, and choose the best that fit a budget.

    \b
    compress allocate MODEL --budget 3.5bpw --calibration TEXT --output mixed.yaml
    compress allocate MODEL --budget 2.1GB --bits 3,4 --group-sizes 32,128 --calibration TEXT --output mixed.yaml
    compress quantize MODEL --recipe mixed.yaml --calibration TEXT --output OUT

    The choice is exact (a 0-1 program) on bytes as the checkpoint will have them. What is measured is kept in the cache
    directory: another budget of the same model, text and schemes takes seconds.
    """
    wanted = checked_budget(budget, max_kl)
    if Path(output).suffix not in (".yaml", ".yml"):
        raise InputError(f"output {output!r}; a recipe is a file that ends in .yaml")
    begin()
    from compress.cli.progress import reporting
    from compress.search.budget import write_recipe
    from compress.search.candidate import grid_of_candidates

    candidates = grid_of_candidates(
        method,
        bits=bits,
        group_sizes=group_sizes or (0,),
        outliers=outliers,
        patterns=patterns.split(","),
        options=split_settings(settings, {}),
    )
    with reporting("measure", quiet) as reporter:
        found = compress.measure_sensitivity(model, candidates, score=by, reporter=reporter, **options).table
    made = compress.allocate(found, wanted, max_kl=max_kl, by=by)
    write_recipe(output, made, about(model, made))
    write_report(json_file, {"sensitivity": asdict(found), "allocation": asdict(made)})
    if not quiet and json_file != "-":
        from compress.cli import allocated as show

        show.allocation(found, made)
        click.echo(f"{output}: run it with compress quantize {model} --recipe {output} --calibration ... --output ...")


def checked_budget(budget: str | None, max_kl: float | None) -> "Budget | None":
    """What was asked for. Raises InputError unless it is one of the two."""
    if (budget is None) == (max_kl is None):
        raise InputError("give --budget SIZE or --max-kl NUMBER, one of them")
    from compress.search.budget import parse_budget

    return None if budget is None else parse_budget(budget)


def about(model: str, made: "Allocation") -> str:
    """What a recipe begins with."""
    kl = "" if made.predicted_kl is None else f", predicted KL {made.predicted_kl:.4g}"
    return f"Schemes for the layers of {Path(model).name}: {made.bits_per_weight:.4g} bits per weight{kl}"


def quantize_to_budget(
    model: str,
    method: str,
    chosen: dict[str, Any],
    *,
    budget: str | None,
    max_kl: float | None,
    json_file: str | None,
    quiet: bool,
    allow_little: bool,
    **options: Any,
) -> None:
    """`compress quantize` with a budget: the recipe is found, run, and its result measured."""
    if unread := [f"--{name.replace('_', '-')}" for name in (*FOUND_BY_A_BUDGET, *UNREAD_BY_A_BUDGET) if given(name)]:
        raise InputError(f"a budget finds the scheme of every layer itself, in one process; drop {', '.join(unread)}")
    wanted = checked_budget(budget, max_kl)
    if options["calibration"] is None:
        raise InputError("a budget is shared out by what calibration data shows; give --calibration TEXT")
    begin()
    from compress.cli.progress import reporting
    from compress.search.candidate import grid_of_candidates

    size = chosen.pop("group_size", 0)
    candidates = grid_of_candidates(method, group_sizes=(int(size),), options=chosen)
    for name in UNREAD_BY_A_BUDGET:
        options.pop(name)
    with reporting("quantize", quiet) as reporter:
        made = compress.quantize_within(model, candidates, wanted, max_kl=max_kl, reporter=reporter, **options)
    write_report(json_file, report(made))
    if not quiet and json_file != "-":
        from compress.cli import allocated as show
        from compress.cli import tables

        tables.result(made.result, model, options["output"])
        show.allocation(made.sensitivity, made.allocation)
        show.achieved(made)
    end(made.result.record, options["output"], promised=True, allowed=allow_little)


def report(made: "Mixed") -> dict[str, Any]:
    """What `--json` has of a run with a budget."""
    return {
        "sensitivity": asdict(made.sensitivity),
        "allocation": asdict(made.allocation),
        "achieved_kl": made.achieved_kl,
        "rounds": made.rounds,
    }


def unread_without_budget(names: Sequence[str] = OF_A_BUDGET) -> None:
    """Refuse options that only a budget reads."""
    unread = [f"--{name}" for name in names if given(name)]
    if unread:
        raise InputError(f"{', '.join(unread)}: without --budget or --max-kl nobody reads that; drop it, or give one")
