"""Completion of values in a shell: files and directories by an option's metavar, names of methods and recipes.

click completes commands and options by itself, and a value only where its type says how.
"""

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from compress.passes.protocol.recipe import BUILT_IN, PASSES

PATHS = {"file": ("FILE", "RECIPE", "TEXT", "MODEL", "RUN..."), "dir": ("OUT", "DIR", "FOLDER")}
MODELS = ("model", "teacher")  # arguments without a metavar of their own
# Parameter, or (command, parameter) -> the names that it may have.
NAMES: dict[str | tuple[str | None, str], Iterable[str]] = {
    "method": PASSES,
    "recipe": BUILT_IN,
    ("methods", "name"): PASSES,
    ("recipes", "name"): BUILT_IN,
    **dict.fromkeys((*MODELS, "reference", "calibration", "training", "text", "texts"), ("demo",)),
}


class Completed(click.types.StringParamType):
    """A word that a shell completes. kind: `file`, `dir` or None; names: other words to offer."""

    def __init__(self, kind: str | None, names: Iterable[str]) -> None:
        self.kind, self.names = kind, names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        items = [CompletionItem(name) for name in self.names if name.startswith(incomplete)]
        return items if self.kind is None else [*items, CompletionItem(incomplete, type=self.kind)]


def complete_values(command: click.Command) -> None:
    """Give the parameters of a command that take a word a type that a shell can complete."""
    for parameter in command.params:
        name = parameter.name or ""
        metavar = parameter.metavar or ("MODEL" if name in MODELS else "")
        kind = next((kind for kind, metavars in PATHS.items() if metavar in metavars), None)
        names = NAMES.get((command.name, name)) or NAMES.get(name, ())
        if isinstance(parameter.type, click.types.StringParamType) and (kind or names):
            parameter.type = Completed(kind, names)
