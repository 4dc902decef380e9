"""`compress sweep`: many recipes on one model, and which of them are worth their bytes."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compress.cli.exits import exits_cleanly, leave
from compress.cli.options import (
    begin,
    device_option,
    json_option,
    quiet_option,
    task_options,
    trust_option,
    write_report,
)
from compress.cli.terminal import visible
from compress.errors import InputError

if TYPE_CHECKING:
    from compress.passes.base import Pass


@click.command(short_help="Run many recipes, evaluate each, and show which are worth their bytes.")
@click.argument("model")
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE...")
@click.option("--calibration", metavar="TEXT", help="What recipes that calibrate are shown.")
@click.option(
    "--training", metavar="TEXT", help="What recipes that train are shown.  [default: what --calibration says]"
)
@click.option("--text", required=True, metavar="TEXT", help="Held-out text on which each is compared with MODEL.")
@click.option("--output", required=True, metavar="DIR", help="The directory of the sweep, new or to go on with.")
@click.option("--samples", type=int, help="Windows of calibration text.  [default: 128; every row of a token file]")
@click.option("--length", type=int, help="Tokens per window of calibration text.")
@click.option("--text-samples", type=int, help="At most so many windows of held-out text.")
@click.option("--text-length", type=int, help="Tokens per window of held-out text.")
@task_options
@click.option("--speed", is_flag=True, help="Tokens a second of a prompt and of decoding; the original's once.")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Samples per forward pass.")
@click.option("--keep/--discard", default=True, show_default=True, help="Whether checkpoints stay once evaluated.")
@trust_option
@device_option
@json_option
@quiet_option
@exits_cleanly
def sweep(
    model: str,
    recipes: tuple[str, ...],
    output: str,
    tasks: tuple[str, ...],
    questions: int | None,
    speed: bool,
    keep: bool,
    device: str | None,
    trust_remote_code: bool,
    json_file: str | None,
    quiet: bool,
    **texts: Any,
) -> None:
    """Quantize MODEL by every RECIPE (a YAML file, or a name from `compress recipes`), and evaluate each against it.

    \b
    compress sweep MODEL recipes/sweeps/*.yaml --calibration TEXT --text TEXT --output DIR
    compress sweep MODEL RECIPE... --calibration TEXT --text TEXT --task piqa.jsonl --speed --output DIR

    The same command goes on where it was stopped: what is done, by the content of model, recipe and texts, stays; a
    task or --speed that is new is measured on the checkpoints that are there. Of the original nothing is measured
    twice. A recipe that fails is reported, and the others go on; the exit code is 1 then.
    """
    begin()
    from compress.cli.progress import reporting
    from compress.cli.sweeping import Beside, Shown
    from compress.cli.sweeping import sweep as swept

    found = named(recipes)
    with reporting("sweep", quiet) as reporter:
        made = swept(
            model,
            found,
            Shown(**texts),
            output,
            beside=Beside(tasks, questions, speed),
            device=device,
            keep=keep,
            trust_remote_code=trust_remote_code,
            reporter=reporter,
        )
    write_report(json_file, asdict(made))
    written = _reported(Path(output), [row.evaluation for row in made.rows if row.evaluation is not None])
    if not quiet and json_file != "-":
        from compress.cli import swept as show

        show.rows(made, output)
        click.echo("\n".join(visible(str(path)) for path in written))
    for row in made.failed:
        click.echo(f"compress: recipe {row.name} failed: {' '.join(str(row.problem).split())}", err=True)
    if made.failed:
        leave(1)


def _reported(place: Path, evaluations: Sequence[str]) -> list[Path]:
    """One report on all recipes that have figures, as a page and as Markdown, in the directory of the sweep."""
    if not evaluations:
        return []
    from compress.checkpoint.files import write_whole
    from compress.cli.sweeping import PAGE, TEXT
    from compress.evaluation.showing.compose import compose
    from compress.evaluation.showing.markdown import as_markdown
    from compress.evaluation.showing.page import as_html
    from compress.evaluation.showing.runs import open_runs

    made = compose(open_runs([str(place / each) for each in evaluations]))
    write_whole(place / PAGE, as_html(made))
    write_whole(place / TEXT, as_markdown(made))
    return [place / PAGE, place / TEXT]


def named(recipes: Sequence[str]) -> dict[str, tuple["Pass", ...]]:
    """{name: passes}, the name being the file's. Raises InputError for a recipe that cannot be read, and for two of one
    name."""
    from compress.recipe import load_recipe

    found: dict[str, tuple[Pass, ...]] = {}
    for path in recipes:
        name = Path(path).stem
        if name in found:
            raise InputError(f"two recipes are called {name!r}; each has a directory of its name: rename one")
        found[name] = load_recipe(path)
    return found
