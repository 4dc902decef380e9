"""`compress methods` and `recipes`: what there is to choose from."""

from dataclasses import asdict

import click

from compress.base.errors import one_of
from compress.base.terminal import console, say_list
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import answer_options
from compress.cli.options import write_report


@click.command(short_help="List the methods, or show the card of one.")
@click.argument("name", required=False)
@answer_options
@exits_cleanly
def methods(name: str | None, json_file: str | None, quiet: bool) -> None:
    """List the methods, or show the card of one: what it does, its source, and its options, one per line.

    NAME is a method, or module:Class for a pass of your own, with its module on PYTHONPATH.
    """
    from compress.cli.cards import card_of, card_of_class, summary_of
    from compress.passes.protocol.recipe import PASSES, method_named, pass_class

    silent = quiet or json_file == "-"
    if name is None:
        summaries = {key: summary_of(key) for key in PASSES}
        write_report(json_file, {"methods": summaries})
        if not silent:
            say_list(summaries)
        return
    card = card_of_class(pass_class(name)) if ":" in name else card_of(method_named(name))
    write_report(json_file, {"method": name, **asdict(card)})
    if not silent:
        out = console()
        click.echo(card.in_columns(out.width) if out.is_terminal else str(card))


@click.command(short_help="List the built-in recipes, or print one.")
@click.argument("name", required=False)
@answer_options
@exits_cleanly
def recipes(name: str | None, json_file: str | None, quiet: bool) -> None:
    """List the built-in recipes, or print one: YAML to use by its name (--recipe NAME), or to copy and change."""
    from compress.passes.protocol.recipe import BUILT_IN, about

    texts = {key: path.read_text(encoding="utf-8") for key, path in BUILT_IN.items()}
    silent = quiet or json_file == "-"
    if name is not None:
        text = texts[one_of("recipe", name, texts)]
        write_report(json_file, {"recipe": name, "about": about(text), "yaml": text})
        if not silent:
            click.echo(text, nl=False)
        return
    summaries = {key: about(text) for key, text in texts.items()}
    write_report(json_file, {"recipes": summaries})
    if not silent:
        say_list(summaries)
