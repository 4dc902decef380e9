"""`compress report`: what runs came to, as a page, as Markdown, as JSON, as a picture, or as a model card."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compress.base.errors import InputError
from compress.base.terminal import say
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import json_option, overwrite_option, plugin_option, quiet_option
from compress.cli.options import begin, writable, write_file, write_report

if TYPE_CHECKING:
    from compress.evaluation.report.content import Report
    from compress.evaluation.report.runs import ReportedRun

FORMS = (".html", ".htm", ".md", ".json", ".svg")


@click.command(short_help="Write results of runs as one page, Markdown, JSON, or a model card.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--output",
    metavar="FILE",
    callback=writable,
    help="The file to write: a page (.html), text (.md), data (.json), or a picture of quality against bytes (.svg).",
)
@click.option("--markdown", metavar="FILE", callback=writable, help="Also write the report as Markdown.")
@json_option
@click.option("--diff", is_flag=True, help="Compare two runs: their differences, and the layers that changed most.")
@click.option("--card", is_flag=True, help="Write a model card, README.md, into the directory of the run.")
@overwrite_option("Replace existing files (with --card: README.md), also those that compress did not write.")
@plugin_option
@quiet_option
@exits_cleanly
def report(
    runs: tuple[str, ...],
    output: str | None,
    markdown: str | None,
    json_file: str | None,
    diff: bool,
    card: bool,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Write the results of runs. RUN is a directory that compress wrote, with what `compress evaluate` measured of it,
    or a file of `compress evaluate --json`.

    The page needs no network and no script. Without --output (or --markdown, --json, --card) the Markdown goes to
    standard output.
    """
    _check(runs, output, markdown, json_file, diff, card, overwrite)
    begin()
    from compress.checkpoint.ownership import marked_text
    from compress.evaluation.json_document import documents
    from compress.evaluation.report.compose import compose
    from compress.evaluation.report.difference import differences
    from compress.evaluation.report.markdown import as_markdown
    from compress.evaluation.report.runs import open_runs

    opened = open_runs(runs)
    if card:
        _card(opened[0], overwrite)
        if not quiet:
            say(f"{opened[0].path / 'README.md'} written")
    content = differences(*opened) if diff else compose(opened)
    data: dict[str, Any] = {"verdict": content.verdict, "runs": documents(opened)}
    if output is not None:
        write_file(output, render(Path(output).suffix.lower(), content, opened, data))
    if markdown is not None:
        write_file(markdown, marked_text(as_markdown(content)))
    write_report(json_file, data)
    if not quiet and (output, markdown, json_file, card) == (None, None, None, False):
        for line in as_markdown(content).splitlines():
            say(line)
    elif not quiet and json_file != "-":
        say(content.verdict)


def _check(
    runs: Sequence[str],
    output: str | None,
    markdown: str | None,
    json_file: str | None,
    diff: bool,
    card: bool,
    overwrite: bool,
) -> None:
    """Refuse options that are wrong whatever the runs hold, before the libraries are imported."""
    suffix = "" if output is None else Path(output).suffix.lower()
    if output is not None and suffix not in FORMS:
        raise InputError(f"--output {output!r}: the end of the name says what is written: {', '.join(FORMS)}")
    if markdown == "-":
        raise InputError("--markdown '-'; give a file (without any, Markdown goes to standard output)")
    if diff and len(runs) != 2:
        raise InputError(f"--diff is of two runs; {len(runs)} given")
    if diff and card:
        raise InputError("--card is about one run and --diff about two; ask for one")
    if card and len(runs) != 1:
        raise InputError(f"--card is about one run, whose directory it goes into; {len(runs)} given")
    if overwrite and not card and {output, markdown, json_file} <= {None, "-"}:
        raise InputError("--overwrite is for files, and none is to be written; drop it, or name one")
    if suffix == ".svg" and (diff or len(runs) < 2):
        raise InputError("the picture is of quality against bytes over several runs; give more, without --diff")


def render(suffix: str, content: "Report", runs: Sequence["ReportedRun"], data: dict[str, Any]) -> str:
    """The report as the end of a name asks for it."""
    from compress.checkpoint.ownership import marked_text

    if suffix == ".md":
        from compress.evaluation.report.markdown import as_markdown

        return marked_text(as_markdown(content))
    if suffix == ".json":
        return json.dumps(data, indent=2) + "\n"
    if suffix == ".svg":
        from compress.evaluation.report.comparison import picture

        return marked_text(picture(runs))
    from compress.evaluation.report.page import as_html

    return as_html(content)


def _card(run: "ReportedRun", overwrite: bool) -> None:
    """README.md in the directory of a run."""
    from compress.checkpoint.write.late_files import put_beside
    from compress.evaluation.report.card import card_of_run

    if run.directory is None:
        raise InputError(f"{run.path} is an evaluation alone; --card goes into the directory of a run: give that")
    put_beside(run.directory, {"README.md": card_of_run(run)}, overwrite)
