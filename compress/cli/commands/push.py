"""`compress push`: an output, with its model card, on the hub."""

from dataclasses import asdict
from typing import Any

import click

from compress.base.terminal import say
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import json_option, overwrite_option, quiet_option
from compress.cli.options import begin, write_report


@click.command(short_help="Upload an output to the Hugging Face hub, with its model card.")
@click.argument("directory", metavar="OUT")
@click.argument("repo", metavar="REPO")
@click.option("--private", is_flag=True, help="Make a repository that others cannot see.")
@click.option(
    "--base-model", metavar="ID", help="The original on the hub, for the card.  [default: the evaluation's reference]"
)
@click.option(
    "--message", metavar="TEXT", default="Upload a compressed model", show_default=True, help="Of the commit."
)
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded; ask the hub nothing.")
@overwrite_option("Replace the model in a repository that holds one, and an existing --json file.")
@json_option
@quiet_option
@exits_cleanly
def push(directory: str, repo: str, json_file: str | None, quiet: bool, **options: Any) -> None:
    """Upload OUT, which a command wrote, to the repository REPO (owner/name) of the Hugging Face hub.

    \b
    compress push OUT me/model-w4 --dry-run
    compress push OUT me/model-w4 --base-model them/model

    Files are checked against the record first, and go in one commit. A README.md of yours in OUT is the card; otherwise
    one is made of the run and of what `compress evaluate` found. The token is that of `hf auth login`, or HF_TOKEN.
    """
    begin()
    from compress.evaluation.push import push as upload

    pushed = upload(directory, repo, **options)
    write_report(json_file, asdict(pushed))
    if quiet or json_file == "-":
        return
    for name, size in pushed.files.items():
        say(f"{size:>15,}  {name}")
    for name in pushed.left:
        say(f"not uploaded: {name}, which compress did not write")
    for name in pushed.removed:
        say(f"removed from {repo}: {name}")
    total = sum(pushed.files.values())
    if pushed.url is None:
        for line in ["", *pushed.card.splitlines(), ""]:
            say(line)
        say(f"nothing was uploaded: {total:,} bytes would go to {repo}")
    else:
        say(f"{total:,} bytes are in {repo}: {pushed.url}")
