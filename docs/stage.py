"""Stages the pages of the site in a folder: Markdown files under their own paths, what they link to, and the pages that
are made of the program itself (commands from click, cards of methods)."""

import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import compress
from compress.cli.cards import card_of, summary_of
from compress.cli.main import cli
from compress.passes.protocol.recipe import PASSES

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/start.md", "docs/guides.md"),
    *(
        "docs/ci.md",
        "docs/commands.md",
        "docs/engines.md",
        "docs/formats.md",
        "docs/limits.md",
        "docs/memory.md",
        "docs/models.md",
        "docs/troubleshooting.md",
    ),
    *("compress/passes/README.md", "compress/train/README.md", "compress/inference/README.md"),
    *("evaluation/README.md", "kernels/README.md", "recipes/README.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs" / "figures").glob("*.md"))),
)
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)")
WIDTH = 100  # columns of help


def commands_page() -> str:
    """Every command with its help, as the program prints it."""
    parts = ["# Commands\n\n| command | |\n|---|---|\n"]
    parts += [
        f"| [`compress {name}`](#compress-{name}) | {c.short_help} |\n" for name, c in sorted(cli.commands.items())
    ]
    for name, command in sorted(cli.commands.items()):
        parts.append(f"\n## compress {name}\n\n```text\n{help_of(command, f'compress {name}')}\n```\n")
    return "".join(parts)


def help_of(command: click.Command, path: str) -> str:
    """The text of `--help`."""
    context = click.Context(command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH)
    return command.get_help(context)


def methods_page() -> str:
    """The card of every method, as `compress methods NAME` prints it."""
    parts = ["# Methods and their options\n"]
    for name in PASSES:
        parts.append(f"\n## {name}\n\n{summary_of(name)}\n\n```text\n{card_of(name)}\n```\n")
    return "".join(parts)


def python_page() -> str:
    """The public names with their signatures and docstrings."""
    parts = ["# Python\n"]
    for name in sorted(set(compress.__all__) - {"__version__"}):
        value = getattr(compress, name)
        try:
            signature = str(inspect.signature(value))
        except (TypeError, ValueError):  # a type that is written in C
            signature = ""
        parts.append(f"\n## {name}\n\n```text\n{name}{signature}\n\n{inspect.getdoc(value) or ''}\n```\n")
    return "".join(parts)


def linked(page: str) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        target = ((ROOT / page).parent / link).resolve()
        if target.is_file() and target.is_relative_to(ROOT):
            yield target.relative_to(ROOT)


def without_folders(page: str) -> str:
    """A page whose links to folders, which a site does not list, are plain words."""
    at = (ROOT / page).parent
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\(([\w./-]+)\)", lambda m: m[1] if (at / m[2]).is_dir() else m[0], text)


def stage(folder: Path) -> None:
    """Fill a folder with everything that the site is built from."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted({*map(Path, PAGES), *(each for page in PAGES for each in linked(page))}):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
    for page in PAGES:
        (folder / page).write_text(without_folders(page), encoding="utf-8")
    generated = folder / "docs" / "generated"
    generated.mkdir(parents=True)
    (generated / "commands.md").write_text(commands_page(), encoding="utf-8")
    (generated / "python.md").write_text(python_page(), encoding="utf-8")
    (generated / "methods.md").write_text(methods_page(), encoding="utf-8")


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
