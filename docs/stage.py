"""Stages the pages of the site in a folder: Markdown files under their own paths, what they link to, notebooks with
their outputs, and the pages that are made of the program itself (commands from click, cards of methods)."""

import inspect
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from nbconvert import MarkdownExporter

import compress
from compress.cli.cards import card_of, summary_of
from compress.cli.main import cli
from compress.passes.protocol.base import Pass
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
        "docs/python.md",
        "docs/ranks.md",
        "docs/troubleshooting.md",
    ),
    *("compress/passes/README.md", "compress/train/README.md", "compress/inference/README.md"),
    *("evaluation/README.md", "kernels/README.md", "recipes/README.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs" / "figures").glob("*.md"))),
)
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)")
# The commands by what a person wants, each once.
TASKS = {
    "Before": ("doctor", "plan", "methods", "recipes"),
    "Compress": ("demo", "quantize", "prune", "fit", "sweep"),
    "Train": ("qat", "distill", "cache-logits"),
    "Measure": ("evaluate", "bench", "report"),
    "Look, run and hand on": ("inspect", "verify", "generate", "export", "push"),
}


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table of plain texts."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(each.replace('|', '&#124;') for each in line)} |\n" for line in lines)


def commands_page() -> str:
    """Every command: its usage, what it does, and a table of its options."""
    assert sorted(cli.commands) == sorted(name for names in TASKS.values() for name in names)
    parts = ["# Commands\n"]
    for task, names in TASKS.items():
        rows = [(f"[`compress {n}`](#compress-{n})", cli.commands[n].get_short_help_str(200)) for n in names]
        parts.append(f"\n**{task}**\n\n{table(('command', ''), rows)}")
    return "".join((*parts, *(command_section(n) for names in TASKS.values() for n in names)))


def command_section(name: str) -> str:
    """A command with its options, one a line."""
    command = cli.commands[name]
    context = click.Context(command, info_name=f"compress {name}")
    usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
    records = [record for p in command.get_params(context) if (record := p.get_help_record(context))]
    rows = [(f"`{option}`", words(meaning)) for option, meaning in records]
    about = escaped(inspect.cleandoc(command.help or "").replace("\b\n", ""))
    return f"\n## compress {name}\n\n`{usage}`\n\n{about}\n\n{table(('option', 'meaning'), rows)}"


def escaped(text: str) -> str:
    """Plain text as Markdown: nothing of it is markup, but what stands between backticks."""
    return re.sub(r"(`[^`]*`)|([*_<\[\]])", lambda m: m[1] or f"\\{m[2]}", text)


def words(text: str) -> str:
    """Plain text of one line, as Markdown of a cell."""
    return escaped(" ".join(text.split()))


def methods_page() -> str:
    """The card of every method, as `compress methods NAME` prints it, with its options as a table."""
    parts = [
        "# Methods and their options\n\n",
        table(("method", ""), [(f"[`{n}`](#{n})", words(summary_of(n))) for n in PASSES]),
    ]
    for name in PASSES:
        card = card_of(name)
        rows = [
            (f"`{o.name}`", f"`{o.shown}`" if o.shown else "", words(o.allowed), words(o.meaning)) for o in card.options
        ]
        options = table(("option", "default", "allowed", "meaning"), rows) if rows else "No options.\n"
        parts.append(f"\n## {name}\n\n```text\n{card.about}\n```\n\n{options}")
    return "".join(parts)


def python_page() -> str:
    """The public names by kind, each with its signature, an argument a line, and its docstring."""
    values = {name: getattr(compress, name) for name in sorted(set(compress.__all__) - {"__version__"})}
    kinds: dict[str, list[str]] = {"Functions": [], "Methods": [], "Results and other types": [], "Errors": []}
    for name, value in values.items():
        if not inspect.isclass(value):
            kinds["Functions"].append(name)
        elif issubclass(value, Exception):
            kinds["Errors"].append(name)
        else:
            kinds["Methods" if issubclass(value, Pass) else "Results and other types"].append(name)
    parts = ["# Python\n"]
    for kind, names in kinds.items():
        parts.append(f"\n## {kind}\n")
        for name in names:
            parts.append(
                f"\n### {name}\n\n{signature(name, values[name])}{escaped(inspect.getdoc(values[name]) or '')}\n"
            )
    return "".join(parts)


def signature(name: str, value: object) -> str:
    """The arguments of a name, one a line; nothing for a method, whose options stand in their table."""
    if inspect.isclass(value) and issubclass(value, Pass | Exception):
        return ""
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a type that is written in C
        return ""
    returned = inspect.formatannotation(found.return_annotation)
    result = "" if found.return_annotation is found.empty else f" -> {returned}"
    inside = "".join(f"\n    {each}," for each in found.parameters.values())
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", f"{name}({inside}\n){result}" if inside else f"{name}(){result}")
    return f"```python\n{text}\n```\n\n"


def linked(page: str) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        target = ((ROOT / page).parent / link).resolve()
        if target.is_file() and target.is_relative_to(ROOT):
            yield target.relative_to(ROOT)


def without_folders(page: str) -> str:
    """A page whose links to folders, which a site does not list, are plain words; those to notebooks lead to pages."""
    at = (ROOT / page).parent
    text = (ROOT / page).read_text(encoding="utf-8")
    text = text.replace(".ipynb)", ".md)")
    return re.sub(r"\[([^\]]+)\]\(([\w./-]+)\)", lambda m: m[1] if (at / m[2]).is_dir() else m[0], text)


def stage_notebook(path: Path, folder: Path) -> None:
    """Write a notebook as a page with its pictures beside it."""
    text, resources = MarkdownExporter().from_filename(str(path), {"output_files_dir": path.stem})
    (folder / f"{path.stem}.md").write_text(text, encoding="utf-8")
    for name, content in resources["outputs"].items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def stage(folder: Path) -> None:
    """Fill a folder with everything that the site is built from."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted({*map(Path, PAGES), *(each for page in PAGES for each in linked(page))}):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
    for page in PAGES:
        (folder / page).write_text(without_folders(page), encoding="utf-8")
    shutil.copyfile(ROOT / "docs" / "site.css", folder / "docs" / "site.css")
    for path in NOTEBOOKS:
        stage_notebook(path, folder / "docs" / "notebooks")
    generated = folder / "docs" / "generated"
    generated.mkdir(parents=True)
    (generated / "commands.md").write_text(commands_page(), encoding="utf-8")
    (generated / "python.md").write_text(python_page(), encoding="utf-8")
    (generated / "methods.md").write_text(methods_page(), encoding="utf-8")


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
