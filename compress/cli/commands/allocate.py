"""`compress allocate`: a budget shared out between the layers of a model, as a recipe that may be run at once."""

from collections.abc import Callable, Sequence
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
    saving_options,
    setting_option,
)
from compress.cli.options import (
    begin,
    device_option,
    given,
    json_option,
    quiet_option,
    trust_option,
    writable,
    write_report,
)
from compress.cli.running import split_settings
from compress.cli.saving import end
from compress.errors import InputError

if TYPE_CHECKING:
    from compress.checkpoint.sensitivity import Sensitivity
    from compress.search.budget import Allocation, Budget
    from compress.search.candidate import Candidate
    from compress.search.within import Mixed

# Options of the run that --run asks for.
OF_A_RUN = ("allow_little", "resume", "verify")


def numbers(kind: type[int] | type[float]) -> Callable[..., Any]:
    """The reader of an option that takes numbers with commas between."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
        try:
            return None if value is None else tuple(kind(word) for word in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r}; give numbers with commas between, like 3,4") from None

    return read


@click.command(short_help="Choose a scheme for each layer within a budget: a recipe, or its checkpoint.")
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
@click.option("--budget", metavar="SIZE", help="3.5bpw: bits per weight of compressed layers. 2.1GB: of all files.")
@click.option(
    "--max-kl", type=float, help="Instead of --budget: the fewest bytes with at most this KL to the original."
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
@click.option("--output", metavar="RECIPE", callback=writable, help="Write the recipe to this .yaml file.")
@click.option(
    "--run", metavar="OUT", help="Also run the recipe: write the checkpoint to this directory, and measure its KL."
)
@saving_options
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
    budget: str | None,
    max_kl: float | None,
    output: str | None,
    run: str | None,
    json_file: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure what each scheme costs each layer of MODEL, and choose the best schemes that fit a budget.

    \b
    compress allocate MODEL --budget 3.5bpw --calibration TEXT --output mixed.yaml
    compress allocate MODEL --budget 2.1GB --bits 3,4 --group-sizes 32,128 --calibration TEXT --output mixed.yaml
    compress quantize MODEL --recipe mixed.yaml --calibration TEXT --output OUT
    compress allocate MODEL --max-kl 0.05 --calibration TEXT --run OUT

    The choice is exact (a 0-1 program) on bytes as the checkpoint will have them. Measurements are kept in the cache
    directory: another budget of the same model, text and schemes takes seconds.
    """
    wanted = checked_budget(budget, max_kl)
    check_outputs(output, run)
    begin()
    from compress.cli import allocated as show
    from compress.cli.progress import reporting
    from compress.search.budget import write_recipe
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
    allowed = options.pop("allow_little")
    with reporting("measure" if run is None else "allocate", quiet) as reporter:
        found, made, mixed = chosen(model, candidates, wanted, run, max_kl=max_kl, reporter=reporter, **options)
    if output is not None:
        write_recipe(output, made, about(model, made))
    write_report(json_file, report(found, made, mixed))
    if not quiet and json_file != "-":
        show.all_of(found, made, mixed, model, output, run)
    if mixed is not None:
        end(mixed.result.record, str(run), promised=True, allowed=allowed)


def chosen(
    model: str,
    candidates: Sequence["Candidate"],
    budget: "Budget | None",
    run: str | None,
    *,
    max_kl: float | None,
    resume: bool,
    overwrite: bool,
    verify: bool | None,
    **options: Any,
) -> tuple["Sensitivity", "Allocation", "Mixed | None"]:
    """The measurements, the allocation, and the run of its recipe into the directory `run`, where there is one."""
    if run is None:
        once = max_kl is not None  # a budget needs no predicted KL, which takes a run of its own
        found = compress.measure_sensitivity(model, candidates, run_once=once, **options).table
        return found, compress.allocate(found, budget, max_kl=max_kl), None
    options |= {"max_kl": max_kl, "resume": resume, "overwrite": overwrite, "verify": verify}
    mixed = compress.quantize_within(model, candidates, budget, output=run, **options)
    return mixed.sensitivity, mixed.allocation, mixed


def check_outputs(output: str | None, run: str | None) -> None:
    """Refuse a command that writes nothing, a recipe of another ending, and options of a run without one."""
    if output is None and run is None:
        raise InputError("nothing to write; give --output RECIPE.yaml, --run OUT, or both")
    if output is not None and Path(output).suffix not in (".yaml", ".yml"):
        raise InputError(f"output {output!r}; a recipe is a file that ends in .yaml")
    unread = [f"--{name.replace('_', '-')}" for name in OF_A_RUN if given(name)]
    if run is None and unread:
        raise InputError(f"{', '.join(unread)}: only for --run; drop it, or give --run OUT")


def checked_budget(budget: str | None, max_kl: float | None) -> "Budget | None":
    """The budget, None with --max-kl. Raises InputError unless one of the two is given."""
    if (budget is None) == (max_kl is None):
        raise InputError("give --budget SIZE or --max-kl NUMBER, one of them")
    from compress.search.budget import parse_budget

    return None if budget is None else parse_budget(budget)


def about(model: str, made: "Allocation") -> str:
    """The first line of a recipe."""
    kl = f"predicted KL {made.predicted_kl:.4g}"
    return f"Schemes for the layers of {Path(model).name}: {made.bits_per_weight:.4g} bits per weight, {kl}"


def report(found: "Sensitivity", made: "Allocation", mixed: "Mixed | None") -> dict[str, Any]:
    """The content of `--json`. mixed: of a run."""
    ran = {} if mixed is None else {"achieved_kl": mixed.achieved_kl, "rounds": mixed.rounds}
    return {"sensitivity": asdict(found), "allocation": asdict(made), **ran}
