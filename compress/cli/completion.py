"""Completion of values in a shell: files and directories by an option's metavar, names of methods and recipes.

click completes commands and options by itself, and a value only where its type says how.
"""

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

PATHS = {"file": ("FILE", "RECIPE", "TEXT", "MODEL", "RUN..."), "dir": ("OUT", "DIR", "FOLDER")}
MODELS = ("model", "teacher")  # arguments without a metavar of their own


def method_names() -> Iterable[str]:
    """Names of methods."""
    from compress.passes.protocol.recipe import PASSES

    return PASSES


def recipe_names() -> Iterable[str]:
    """Names of built-in recipes."""
    from compress.passes.protocol.recipe import BUILT_IN

    return BUILT_IN


# (command or None for all, parameter) -> the names that it may have.
NAMES: dict[tuple[str | None, str], Callable[[], Iterable[str]]] = {
    (None, "method"): method_names,
    (None, "recipe"): recipe_names,
    ("methods", "name"): method_names,
    ("recipes", "name"): recipe_names,
    **{(None, name): lambda: ("demo",) for name in (*MODELS, "reference", "calibration", "training", "text", "texts")},
}


class Completed(click.types.StringParamType):
    """A word that a shell completes. kind: `file`, `dir` or None; names: other words to offer."""

    def __init__(self, kind: str | None, names: Callable[[], Iterable[str]] | None) -> None:
        self.kind, self.names = kind, names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = [] if self.names is None else [name for name in self.names() if name.startswith(incomplete)]
        items = [CompletionItem(name) for name in names]
        return items if self.kind is None else [*items, CompletionItem(incomplete, type=self.kind)]


def complete_values(command: click.Command) -> None:
    """Give the parameters of a command that take a word a type that a shell can complete."""
    for parameter in command.params:
        name = parameter.name or ""
        metavar = parameter.metavar or ("MODEL" if name in MODELS else "")
        kind = next((kind for kind, metavars in PATHS.items() if metavar in metavars), None)
        names = NAMES.get((command.name, name)) or NAMES.get((None, name))
        if isinstance(parameter.type, click.types.StringParamType) and (kind or names):
            parameter.type = Completed(kind, names)
