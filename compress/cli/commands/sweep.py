"""`compress sweep`: many recipes on one model, and which of them are worth their bytes."""

from typing import TYPE_CHECKING, Any

import click

import compress
from compress.base.terminal import say
from compress.cli.exit_codes import exits_cleanly, leave
from compress.cli.option_groups import (
    answer_options,
    calibration_option,
    device_option,
    extent_options,
    plugin_option,
    task_options,
    training_option,
    trust_option,
)
from compress.cli.options import begin, write_report

if TYPE_CHECKING:
    from compress.evaluation.report.content import ReportTable
    from compress.search.sweep_rows import Sweep


@click.command(short_help="Run many recipes, evaluate each, and show which are worth their bytes.")
@click.argument("model")
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE...")
@calibration_option()
@training_option
@extent_options
@click.option(
    "--group-size", type=int, help="Inputs that share a scale, in every recipe with groups.  [default: the recipe's]"
)
@click.option("--text", required=True, metavar="TEXT", help="Held-out text to compare each with MODEL on.")
@click.option(
    "--output", required=True, metavar="DIR", help="The directory of the sweep: a new one, or one to continue."
)
@click.option("--text-samples", type=int, help="Number of windows of held-out text.  [default: all]")
@click.option("--text-length", type=int, help="Tokens per window of held-out text.")
@task_options
@click.option("--speed", is_flag=True, help="Measure tokens per second of prompt processing and decoding.")
@click.option(
    "--keep/--discard", default=True, show_default=True, help="Keep or delete each checkpoint after its evaluation."
)
@plugin_option
@trust_option
@device_option
@answer_options
@exits_cleanly
def sweep(
    model: str, recipes: tuple[str, ...], output: str, json_file: str | None, quiet: bool, **options: Any
) -> None:
    """Quantize MODEL by each RECIPE (a YAML file, or a name from `compress recipes`), and compare each with MODEL.

    \b
    compress sweep MODEL RECIPE... --calibration TEXT --text TEXT --output DIR
    compress sweep MODEL RECIPE... --calibration TEXT --text TEXT --output DIR \\
        --task piqa.jsonl --speed

    The same command continues a sweep that was stopped. What is done for the same model, recipe and texts is not done
    again. A new task, or --speed, is measured on the checkpoints that are there. The original is measured once. If a
    recipe fails, the others still run; the exit code is then 1.
    """
    begin()
    from compress.cli.progress import reporting

    with reporting("sweep", quiet) as reporter:
        swept = compress.sweep(model, recipes, output=output, reporter=reporter, **options)
    write_report(json_file, swept.to_dict())
    if not quiet and json_file != "-":
        from compress.evaluation.report.terminal import show
        from compress.search.sweep import INDEX, PAGE, TEXT

        lines = [f"{output}/{INDEX} has these rows; each recipe has its checkpoint and evaluation beside it"]
        if len(swept.failed) < len(swept.rows):
            lines.append(f"{output}/{PAGE} and {TEXT} compare all that have figures")
        show(sweep_table(swept), *lines)
    for row in swept.failed:
        say(f"compress: recipe {row.name} failed: {' '.join(str(row.problem).split())}", stderr=True)
    if swept.failed:
        leave(1)


def sweep_table(swept: "Sweep") -> "ReportTable":
    """A row for each recipe, by bytes; a star where no other has fewer bytes and a lower KL."""
    from compress.cli.evaluation_tables import MIB, number
    from compress.evaluation.report.content import ReportTable

    tasks = list(dict.fromkeys(name for row in swept.rows for name in row.tasks))
    timed = any(row.decode is not None for row in swept.rows)
    headings = ["MiB", "bits/weight", "perplexity", "KL", "same top", *tasks, *(["tokens/s"] if timed else []), "front"]
    shown: list[tuple[str, ...]] = []
    for row in swept.rows:
        if row.problem is not None:
            shown.append((row.name, *("failed" if i == 0 else "-" for i in range(len(headings)))))
            continue
        shown.append(
            (
                row.name,
                number(row.bytes, ".2f", MIB),
                number(row.bits_per_weight, ".2f"),
                number(row.perplexity, ".4f"),
                number(row.kl_mean, ".5f"),
                number(row.same_top, ".2%"),
                *(number(row.tasks.get(name, {}).get("accuracy"), ".2%") for name in tasks),
                *([number(row.decode, ".1f")] if timed else []),
                "*" if row.front else "",
            )
        )
    return ReportTable(("recipe", *headings), shown, f"{swept.model}, evaluated on {swept.text}")
