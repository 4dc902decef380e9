"""`compress methods` and `recipes`: what there is to choose from."""

import click

from compress.cli.exit_codes import exits_cleanly
from compress.errors import one_of


@click.command(short_help="List the methods, or show the card of one.")
@click.argument("name", required=False)
@exits_cleanly
def methods(name: str | None) -> None:
    """List the methods, or show the card of one: what it does, its source, and its options, one per line.

    NAME is a method, or module:Class for a pass of your own, with its module on PYTHONPATH.
    """
    from compress.cli.cards import card_of, card_of_class, summary_of
    from compress.passes.protocol.recipe import PASSES, method_named, pass_class

    if name is None:
        for key in PASSES:
            click.echo(f"{key:12} {summary_of(key)}")
        return
    click.echo(str(card_of_class(pass_class(name)) if ":" in name else card_of(method_named(name))))


@click.command(short_help="List the built-in recipes, or print one.")
@click.argument("name", required=False)
@exits_cleanly
def recipes(name: str | None) -> None:
    """List the built-in recipes, or print one: YAML to use by its name (--recipe NAME), or to copy and change."""
    from compress.passes.protocol.recipe import BUILT_IN, about

    texts = {key: path.read_text(encoding="utf-8") for key, path in BUILT_IN.items()}
    if name is not None:
        click.echo(texts[one_of("recipe", name, texts)], nl=False)
        return
    for key, text in texts.items():
        click.echo(f"{key:16} {about(text)}")
