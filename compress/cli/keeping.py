"""Optional measurements of `compress evaluate`, and the files that it leaves beside the weights of a run."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compress.errors import InputError
from compress.system.terminal import visible

if TYPE_CHECKING:
    from compress.evaluation.document import Evaluation
    from compress.evaluation.on_request import Asked

KEPT = ("evaluation.json", "evaluation.html", "evaluation.md")


def asked_options(command: Callable[..., None]) -> Callable[..., None]:
    """--speed, --memory, --continuations, --prompts, --keep."""
    for option in (
        click.option(
            "--keep/--no-keep",
            default=True,
            show_default=True,
            help=f"Write {', '.join(KEPT)} into MODEL, if compress wrote that directory.",
        ),
        click.option("--prompts", metavar="FILE", help="Show how both models continue these prompts, one per line."),
        click.option("--continuations", is_flag=True, help="Show how both models continue the beginnings of the text."),
        click.option("--memory", is_flag=True, help="Measure peak memory of loading and running, in a fresh process."),
        click.option(
            "--speed", is_flag=True, help="Measure tokens per second of prompt processing and decoding, of both models."
        ),
    ):
        command = option(command)
    return command


def asked_of(speed: bool, memory: bool, continuations: bool, prompts: str | None) -> "Asked":
    """The options as one value. Raises InputError for prompts that cannot be read: before any work."""
    from compress.evaluation.on_request import Asked
    from compress.evaluation.quality.generations import read_prompts

    given = () if prompts is None else tuple(read_prompts(prompts))
    return Asked(speed, memory, continuations or prompts is not None, given)


def keep(model: str, found: "Evaluation") -> None:
    """Leave an evaluation in the directory of its run, as JSON, as a page and as text. A directory that no run wrote is
    left as it is; where a file of somebody else is in the way, or nothing can be written, that is said."""
    from compress.checkpoint.write.directory import is_checkpoint
    from compress.checkpoint.write.late_files import put_beside
    from compress.evaluation.report.compose import compose
    from compress.evaluation.report.markdown import as_markdown
    from compress.evaluation.report.page import as_html
    from compress.evaluation.report.runs import ReportedRun

    path = Path(model)
    if not is_checkpoint(path):
        return
    made = compose([ReportedRun(path.absolute().name, path, found, path)])
    content = (json.dumps(asdict(found), indent=2) + "\n", as_html(made), as_markdown(made))
    try:
        put_beside(path, dict(zip(KEPT, content, strict=True)))
    except InputError as error:
        click.echo(visible(f"compress: the evaluation is not kept in {path}: {error}"), err=True)
