"""Checks of what options name before the work begins, its common start, and the files that it ends in."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from compress.base.errors import InputError, WriteError
from compress.base.regular_files import LOOP, special
from compress.base.terminal import is_closed, say

OVERWRITE = "compress.overwrite"


def may_overwrite(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """Keep the answer for `writable`, which is asked later: the option is eager."""
    context.meta[OVERWRITE] = value
    return value


def writable(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a file that cannot be written, or is somebody else's, before the work whose figures it is to hold."""
    if value == "-" and is_closed(sys.stdout):
        raise click.BadParameter("'-' is standard output, which is closed; give a file")
    if value is None or value == "-":
        return value
    path = Path(value)
    if path.is_dir() or special(path) == LOOP:
        raise click.BadParameter(f"{value!r} is {special(path)}; give a file, or '-' for standard output")
    if not path.parent.is_dir():
        raise click.BadParameter(f"{value!r} cannot be written: there is no folder {path.parent}; give another, or '-'")
    if not os.access(held := path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{value!r} cannot be written: {held} is not yours to change; give another, or '-'")
    if path.exists() and not context.meta.get(OVERWRITE):
        from compress.checkpoint.ownership import check_replaceable

        try:
            check_replaceable(path, "give another file, or --overwrite")
        except InputError as error:
            raise click.BadParameter(str(error)) from None
    return value


PLUGINS = "compress.plugins"
WRITTEN = ("output", "run", "json_file", "markdown", "spill")  # options


def remember(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> None:
    """Keep the modules for `begin`, which may fail as commands do."""
    context.meta[PLUGINS] = value


def given(name: str) -> bool:
    """True if the user wrote this option of the running command, rather than leaving its default."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def begin() -> None:
    """Begin the work of a command with a model: warn about remote code, import plugins, silence the libraries' logging.
    Call it after the checks that need no libraries, whose import takes seconds."""
    chosen = click.get_current_context().params
    _check_files_apart(chosen)
    if chosen.get("trust_remote_code") and not chosen.get("quiet") and os.environ.get("RANK", "0") == "0":
        say("warning: Python code that comes with the model is run, with all your rights", stderr=True)
    warnings.filterwarnings("ignore")
    import_plugins()
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # of transformers: nothing is fetched that nobody named
    import huggingface_hub
    import transformers

    show_notes(quiet=bool(chosen.get("quiet")) or os.environ.get("RANK", "0") != "0")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.logging.set_verbosity_error()  # it announces every retry


def import_plugins() -> None:
    """Import the modules that --plugin names."""
    if plugins := click.get_current_context().meta.get(PLUGINS):
        from compress.weights.formats.registry import import_plugin

        for module in plugins:
            import_plugin(module)


def _check_files_apart(chosen: Mapping[str, Any]) -> None:
    """Raises InputError for two options that name the same file or folder to write."""
    taken: dict[Path, str] = {}
    for key in WRITTEN:
        value = chosen.get(key)
        if isinstance(value, str) and value != "-":
            option = f"--{key.removesuffix('_file').replace('_', '-')}"
            other = taken.setdefault(Path(value).absolute(), option)
            if other != option:
                raise InputError(f"{other} and {option} both name {value!r}; give each a place of its own")


class _Notes(logging.Handler):
    """Shows what the kernels (`compress.kernels.notes`) and `compress.data.text` have to say as notes of a command."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"note: {record.getMessage()}", stderr=True)


_NOTES = _Notes()


def show_notes(quiet: bool) -> None:
    """Show notes of the kernels and of long texts on standard error from now on, or nowhere."""
    _NOTES.setLevel(logging.ERROR if quiet else logging.NOTSET)
    for name in ("compress.kernels", "compress.data.text"):
        logging.getLogger(name).addHandler(_NOTES)
        logging.getLogger(name).setLevel(logging.INFO)


def write_report(target: str | None, value: Any) -> None:
    """JSON to a file, or to standard output for `-`."""
    if target is None:
        return
    text = json.dumps(value, indent=2, default=str) + "\n"
    if target == "-":
        click.echo(text, nl=False)
    else:
        write_file(target, text)


def write_file(target: str, text: str) -> None:
    """Write or replace a file that an option names: all of it, or nothing where the disk is full, say. What is no
    regular file (/dev/stderr, a FIFO), or lies where no other file can be made, is written to. Raises WriteError."""
    from compress.checkpoint.files import write_whole

    path = Path(target).resolve()
    try:
        if special(path) is None and os.access(path.parent, os.W_OK):
            write_whole(path, text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError(f"cannot write {target}: {error.strerror}") from None
