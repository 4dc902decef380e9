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
    help="Python module to import first, which adds formats or methods. Repeatable.",
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
        help="A task: a .jsonl file in the format of PIQA, HellaSwag or LAMBADA, or lm-eval:NAME; lm-eval:quick and "
        "lm-eval:standard are sets of 4 and 8 tasks. Repeatable.",
    ),
    click.option("--questions", type=int, help="Use only the first N questions of each task.  [default: all]"),
)
length_option = click.option(
    "--length", type=int, help="Tokens per window of text.  [default: the model's context, at most 2048]"
)
bos_option = click.option(
    "--bos",
    metavar="PLACE",
    help="Where the BOS token goes: before each row of text (row), each window (window), or nowhere (none).  [default: "
    "row if the tokenizer adds BOS, else none]",
)
batch_size_option = click.option(
    "--batch-size", type=int, default=8, show_default=True, help="Samples per forward pass."
)
extent_options = group(
    click.option(
        "--samples", type=int, help="Number of calibration windows.  [default: 128; all rows of a token file]"
    ),
    length_option,
    bos_option,
    batch_size_option,
)
training_option = click.option(
    "--training", metavar="TEXT", help="Training set; all of it is used.  [default: the calibration set]"
)
ignore_option = click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Layers not to compress, like '*.down_proj' or 're:.*down_proj'. Repeatable.",
)


def calibration_option(required: bool = False) -> Decorator:
    """--calibration. required: the command has no use without it."""
    needed = "" if required else " Needed by methods that use it."
    return click.option(
        "--calibration",
        required=required,
        metavar="TEXT",
        help=f"Calibration set; self: what the model writes.{needed}",
    )


shard_option = click.option(
    "--shard-size", metavar="SIZE", help="Largest weight file, like 2GB or 800MiB.  [default: 5GB]"
)
saving_options = group(
    shard_option,
    click.option(
        "--allow-little", is_flag=True, help="Exit with 0 even if less than 5 % of the bytes are saved (otherwise 1)."
    ),
    click.option("--resume", is_flag=True, help="Continue a run that was stopped."),
    overwrite_option("Replace an existing or unfinished output, and the files of --json and the like."),
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
        help="Bits: w2a16 ... w8a16 quantize weights only; w2a2, w3a3, w4a4, w4a8, w8a8 also activations; fp8, "
        "fp8-block: float8 for both. Small floats in groups: "
        f"{', '.join(f'{name}a16' for name in LEVELS if name not in ALONE)} (weights), {', '.join(WITH_INPUTS)} (also "
        "activations). iq4_nl, and of gptq and rtn iq4_xs, q2_k ... q6_k and mixes like q4_k_m: llama.cpp's types.  "
        "[default: w4a16]",
    ),
    click.option("--bits", type=int, help="Short for a scheme of weights only: --bits 3 is --scheme w3a16."),
    click.option(
        "--group-size",
        type=int,
        help="Weights in a row that share a scale; -1: one scale per output channel.  [default: 128, or 64, 32 or a "
        "size for each layer where 128 does not divide; spqr: 16]",
    ),
    click.option(
        "--grid",
        help="Quantization grid: symmetric; narrow (symmetric, without the lowest value); asymmetric (with a zero "
        "point); signed-scale (symmetric, the scale may be negative).  [default: signed-scale]",
    ),
    click.option(
        "--activations",
        help="Scales of quantized activations: dynamic (per token) or static (calibrated).  [default: dynamic]",
    ),
    click.option(
        "--calibrator",
        help="How static ranges are found: minmax, moving-average, percentile, mse or kl.  [default: minmax]",
    ),
)
added_options = group(
    click.option(
        "--kv-cache",
        metavar="TYPE[:PER]",
        help="Quantize the key-value cache: int8, fp8, int4 or int3. For int8 and fp8 with one scale per :token "
        "(default), or a calibrated one per :head or :tensor.",
    ),
    click.option(
        "--embeddings",
        metavar="SCHEME",
        help="Also quantize the token embedding and the output head: w2a16 ... w8a16, one scale per token "
        "(--for llama.cpp: groups of 32).",
    ),
)
