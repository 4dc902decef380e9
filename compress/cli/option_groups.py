"""Option groups: what several commands take is declared here once. Each group is a decorator."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import click

from compress.cli.options import may_overwrite, remember, writable
from compress.weights.number_formats import ALONE, LEVELS, WITH_INPUTS

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def group(*options: Decorator) -> Decorator:
    """One decorator of several options, in the order in which help lists them."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        return reduce(lambda wrapped, option: option(wrapped), reversed(options), command)

    return decorated


def overwrite_option(about: str, exposed: bool = True) -> Decorator:
    """--overwrite. about: what it replaces; exposed: the command itself takes it, too."""
    words: dict[str, Any] = {"is_eager": True, "expose_value": exposed, "callback": may_overwrite}
    return click.option("--overwrite", is_flag=True, help=about, **words)


files_overwrite_option = overwrite_option("Replace existing files, also those that compress did not write.", False)


quiet_option = click.option("--quiet", is_flag=True, help="No progress, no table; errors only.")
trust_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code that comes with the model. Read it first: it can do whatever you can.",
)
plugin_option = click.option(
    "--plugin",
    metavar="MODULE",
    multiple=True,
    expose_value=False,
    callback=remember,
    help="Import this module first, for formats that MODEL is stored in, or passes of a recipe. Repeatable.",
)
json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    callback=writable,
    help="Write the figures as JSON ('-': standard output).",
)
device_option = click.option(
    "--device", metavar="DEVICE", help="cpu, cuda, cuda:1 ... [default: a GPU if there is one]"
)
answer_options = group(json_option, files_overwrite_option, quiet_option)
reading_options = group(trust_option, plugin_option, device_option, answer_options)
working_options = group(trust_option, device_option, json_option, quiet_option)

task_options = group(
    click.option(
        "--task",
        "tasks",
        multiple=True,
        metavar="FILE",
        help="Questions: a .jsonl file like PIQA's, HellaSwag's or LAMBADA's, or lm-eval:NAME. Repeatable.",
    ),
    click.option("--questions", type=int, help="Number of questions of each task: the first ones.  [default: all]"),
)
length_option = click.option(
    "--length", type=int, help="Tokens per window of text.  [default: the model's context, at most 2048]"
)
bos_option = click.option(
    "--bos",
    metavar="PLACE",
    help="BOS before every row of text, before every window, or nowhere: row, window, none.  [default: row if the "
    "tokenizer puts it before a text, or none]",
)
batch_size_option = click.option(
    "--batch-size", type=int, default=8, show_default=True, help="Samples per forward pass."
)
extent_options = group(
    click.option("--samples", type=int, help="Windows of calibration text.  [default: 128; every row of a token file]"),
    length_option,
    bos_option,
    batch_size_option,
)
training_option = click.option(
    "--training", metavar="TEXT", help="Training data; all of it is used.  [default: the calibration data]"
)
ignore_option = click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Names of layers to leave alone, like '*.down_proj' or 're:.*down_proj'. Repeatable.",
)


def calibration_option(required: bool = False) -> Decorator:
    """--calibration. required: the command has no use without it."""
    needed = "" if required else " Needed by methods that calibrate."
    return click.option("--calibration", required=required, metavar="TEXT", help=f"Calibration data.{needed}")


saving_options = group(
    click.option("--allow-little", is_flag=True, help="Accept less than 5 % of bytes saved: exit code 0 instead of 1."),
    click.option("--resume", is_flag=True, help="Continue a run that was stopped."),
    overwrite_option("Replace an existing or unfinished output, and files that other options name."),
    click.option(
        "--verify/--no-verify",
        default=None,
        help="Reload the output in a fresh process and compare.  [default: for models up to 2 GiB]",
    ),
)
setting_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any option of the method, like --set damp=0.05. Repeatable.",
)

# The parameters of `method_options`, which become options of a pass.
OF_A_METHOD = ("scheme", "bits", "group_size", "grid", "activations", "calibrator")
method_options = group(
    click.option(
        "--scheme",
        help="w2a16 ... w8a16: bits per weight, 16-bit inputs. w2a2, w3a3, w4a4, w4a8, w8a8: bits per weight and per "
        "input. fp8, fp8-block: float8 weights and inputs. "
        f"{', '.join(f'{name}a16' for name in LEVELS if name not in ALONE)}, and with inputs alike "
        f"{', '.join(WITH_INPUTS)}: small floats in groups. iq4_nl: llama.cpp's levels.  [default: w4a16]",
    ),
    click.option("--bits", type=int, help="Bits per weight with 16-bit inputs: --bits 3 means --scheme w3a16."),
    click.option(
        "--group-size",
        type=int,
        help="Inputs that share a scale; -1: one scale per output channel.  [default: 128; if that does not divide the "
        "inputs of every layer: 64, 32, a size for each layer, or -1; spqr: 16]",
    ),
    click.option(
        "--grid",
        help="Values that codes stand for: signed-scale, symmetric, narrow or asymmetric.  [default: signed-scale]",
    ),
    click.option("--activations", help="Ranges of rounded inputs: dynamic (per token) or static.  [default: dynamic]"),
    click.option(
        "--calibrator",
        help="Choice of static ranges: minmax, moving-average, percentile, mse or kl.  [default: minmax]",
    ),
)
added_options = group(
    click.option(
        "--kv-cache",
        metavar="TYPE[:PER]",
        help="Store keys and values in fewer bits: int8, fp8, int4 or int3. int8 and fp8 have a scale per :token "
        "(default), :head or :tensor; the last two are calibrated.",
    ),
    click.option(
        "--embeddings",
        metavar="SCHEME",
        help="Also quantize the token embedding and the output head: w2a16 ... w8a16, one scale per token "
        "(--for llama.cpp: per 32 numbers of it).",
    ),
)
