"""The command line: arguments -> API calls, and what a person reads. Nothing else is decided here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

import compress
from compress.base.terminal import open_closed_streams, spell_what_streams_lack, visible
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


class Commands(click.Group):
    """The commands. Errors of usage quote arguments, which may be names of files: they are shown as text."""

    def make_context(self, *words: Any, **options: Any) -> click.Context:
        with _quoting():
            return super().make_context(*words, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _quoting():
            return super().invoke(ctx)


@contextmanager
def _quoting() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        raise click.UsageError(visible(error.format_message()), error.ctx) from None
    except OSError as error:  # of a name that the system cannot even look up
        name = visible(str(error.filename))
        short = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        raise click.UsageError(f"{short!r} cannot be looked up ({error.strerror}); give another name") from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(compress.__version__, prog_name="compress")
def cli() -> None:
    """Make a trained model smaller, and measure what it cost.

    \b
    compress demo                                              see it work on the built-in model
    compress quantize MODEL --method gptq --calibration TEXT --output OUT
    compress plan MODEL --method gptq                          see what it will do, in seconds
    compress prune MODEL --method sparsegpt --pattern 2:4 --calibration TEXT --output OUT
    compress qat MODEL --scheme w2a16 --calibration TEXT --output OUT
    compress distill TEACHER --student-layers 6 --calibration TEXT --output OUT
    compress fit MODEL --size 85MB --calibration TEXT --output OUT
    compress fit MODEL --size 3.5bpw --recipe-only --calibration TEXT --output mixed.yaml
    compress sweep MODEL recipes/sweeps/*.yaml --calibration TEXT --text TEXT --output DIR
    compress evaluate OUT --reference MODEL --text TEXT
    compress report OUT... --output report.html
    compress inspect OUT
    compress generate OUT --prompt "Once upon a time"
    compress push OUT owner/name                              upload it, with a model card
    compress bench OUT
    compress doctor                                            see what this machine can do, and what is slow

    MODEL is a local Hugging Face directory, a hub id, or `demo`. TEXT is a .txt, .jsonl, .json or .parquet file
    (rows of `text`, `prompt` and `completion`, or `instruction` and `output`), a `datasets` id, a
    .pt or .npy file of token ids [samples, length], or `demo`. For --calibration and --training,
    rows may also hold chat `messages`, and TEXT may be a folder of such files, or of images for a
    model that reads them.
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
        cli()
