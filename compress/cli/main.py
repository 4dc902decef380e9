"""The command line: arguments -> API calls, and what a person reads. Nothing else is decided here."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

import compress
from compress.base.errors import InputError, one_of
from compress.base.terminal import open_closed_streams, say, spell_what_streams_lack, visible
from compress.cli.commands.bench import bench
from compress.cli.commands.cache_logits import cache_logits
from compress.cli.commands.demo import demo
from compress.cli.commands.doctor import doctor
from compress.cli.commands.evaluate import evaluate
from compress.cli.commands.export import export
from compress.cli.commands.fit import fit
from compress.cli.commands.generate import generate
from compress.cli.commands.inspect import inspect, verify
from compress.cli.commands.methods import methods, recipes
from compress.cli.commands.plan import plan
from compress.cli.commands.prune import prune
from compress.cli.commands.push import push
from compress.cli.commands.quantize import quantize
from compress.cli.commands.report import report
from compress.cli.commands.sweep import sweep
from compress.cli.commands.train import distill, qat
from compress.cli.completion import complete_values
from compress.cli.exit_codes import terminating

LONGEST_NAME = 100  # that is shown whole
MEANT = re.compile(r"[.(\s]*Did you mean (?:one of: )?([^?)]+)[?)]*$")  # at the end of an error of click


class UsageError(click.UsageError):
    """An error of usage, in one line as any other error of a command."""

    def show(self, file: Any = None) -> None:
        say(f"compress: {self.message}", stderr=True)


class Commands(click.Group):
    """The commands. Errors of usage quote arguments, which may be names of files: they are shown as text."""

    def make_context(self, *words: Any, **options: Any) -> click.Context:
        with _quoting():
            return super().make_context(*words, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _quoting():
            return super().invoke(ctx)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            one_of("command", args[0], self.commands)
        except InputError as error:
            raise UsageError(str(error), ctx) from None
        return super().resolve_command(ctx, args)


@contextmanager
def _quoting() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, UsageError) or type(error).__name__ == "NoArgsIsHelpError":  # of click from 8.2 on
            raise
        raise UsageError(_in_one_line(error), error.ctx) from None
    except OSError as error:  # of a name that the system cannot even look up
        name = visible(str(error.filename))
        short = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        raise UsageError(f"{short!r} cannot be looked up ({error.strerror}); give another name") from None


def _in_one_line(error: click.UsageError) -> str:
    """The words of click about an error: what was given, what is allowed, and where more is said."""
    words = visible(error.format_message()).removeprefix("Invalid value for ").removesuffix(".")
    words = MEANT.sub(r"; did you mean \1?", words[:1].lower() + words[1:])
    command = "compress" if error.ctx is None else error.ctx.command_path
    return words if "; give " in words else f"{words}{' ' if words.endswith('?') else '; '}see `{command} --help`"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(compress.__version__, prog_name="compress")
def cli() -> None:
    """Make a trained model smaller, and measure what it cost.

    \b
    compress demo                            see it work on the built-in model
    compress plan MODEL                      layers, bytes, memory and time
    compress quantize MODEL --calibration TEXT --output OUT
    compress fit MODEL --size 85MB --calibration TEXT --output OUT
    compress evaluate OUT --reference MODEL --text TEXT
    compress report OUT... --output report.html

    MODEL is a local Hugging Face directory, a hub id, a GGUF file, or `demo`. TEXT is a file of plain text (.txt, .raw,
    .md or no ending), of rows (.jsonl, .json or .parquet; fields `text`, `prompt` and `completion`, or `instruction`
    and `output`) or of token ids [samples, length] (.pt, .npy), a `datasets` id, or `demo`. For --calibration and
    --training, rows may also hold chat `messages`, and TEXT may be a folder of such files, or of images for a model
    that reads them.
    """


for command in (
    quantize,
    plan,
    prune,
    qat,
    distill,
    cache_logits,
    fit,
    sweep,
    evaluate,
    report,
    inspect,
    generate,
    verify,
    export,
    push,
    methods,
    recipes,
    bench,
    doctor,
    demo,
):
    complete_values(command)
    cli.add_command(command)


def main() -> None:
    """Entry point of `compress` and `python -m compress`."""
    open_closed_streams()
    spell_what_streams_lack()
    with terminating():
        cli(prog_name="compress")
