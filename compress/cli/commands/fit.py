"""`compress fit`: a size or a loss that is asked for, met by the best recipe, with the proof beside it."""

from typing import TYPE_CHECKING, Any

import click

import compress
from compress.base.terminal import say
from compress.cli.exit_codes import exits_cleanly, fail
from compress.cli.option_groups import (
    calibration_option,
    extent_options,
    ignore_option,
    overwrite_option,
    working_options,
)
from compress.cli.options import begin, writable, write_report

if TYPE_CHECKING:
    from compress.search.fit import FitResult


def recipe_file(context: click.Context, parameter: click.Parameter, value: str) -> str | None:
    """Refuse a file that cannot be written, where a recipe is all that is asked for."""
    return writable(context, parameter, value) if context.params.get("recipe_only") else value


@click.command(short_help="Meet a size or a loss with the best recipe, and show the proof.")
@click.argument("model")
@click.option(
    "--size",
    metavar="SIZE",
    help="Largest size of the weight files, like 85MB or 1.5GiB; or 3.4bpw, the same as --bits 3.4.",
)
@click.option("--bits", type=float, help="Most bits per weight of the layers, like 3.4. Embeddings are not changed.")
@click.option("--kl", type=float, help="Largest KL to the original on held-out text, in nats per token, like 0.05.")
@click.option("--task-loss", metavar="SHARE", help="Largest rise of the loss on held-out text, like 1%.")
@click.option(
    "--recipe-only",
    is_flag=True,
    is_eager=True,  # before --output, which is a file then
    help="Do not run the recipe: write it to --output, a .yaml file for `compress quantize --recipe`.",
)
@click.option("--for", "engine", metavar="ENGINE", help="vllm or transformers: only schemes that it runs.")
@click.option(
    "--method",
    default="gptq",
    show_default=True,
    help="gptq, or k-quants (llama.cpp's types, for `compress export --to gguf`).",
)
@click.option(
    "--effort",
    default="default",
    show_default=True,
    help="default, or best: rounded for the loss of the model, 2 to 3 times as long for each recipe that is run.",
)
@click.option(
    "--embeddings/--no-embeddings",
    default=True,
    show_default=True,
    help="Allow compressing the token embedding; then only compress.load reads the result. Not with --for.",
)
@click.option(
    "--trellis/--no-trellis",
    default=True,
    show_default=True,
    help="Allow trellis quantization of 2 to 4 bits (QTIP): more accurate, but slower to decode. Not with --for.",
)
@click.option(
    "--rotate/--no-rotate",
    default=True,
    show_default=True,
    help="Rotate the model first if this lowers the KL of 3 bits by a fifth; partly at inference, so that only "
    "compress.load reads the result. Not with --for.",
)
@click.option("--hours", type=float, help="Time limit.  [default: none]")
@click.option(
    "--recover",
    metavar="TIME",
    help="Then train on the calibration set for this long, like 30min, within --hours. Kept only if closer to the "
    "original on held-out text.",
)
@calibration_option(required=True)
@click.option(
    "--text",
    metavar="TEXT",
    help="Held-out text to measure on (32 windows).  [default: the last fifth of the calibration windows, which are "
    "then not used for calibration]",
)
@extent_options
@ignore_option
@click.option(
    "--output",
    required=True,
    metavar="OUT",
    callback=recipe_file,
    help="The directory to write; proof and recipe are in OUT.fit.",
)
@overwrite_option("Replace an existing or unfinished output, and files that other options name.")
@working_options
@exits_cleanly
def fit(model: str, output: str, json_file: str | None, quiet: bool, **options: Any) -> None:
    """Find a scheme for each layer of MODEL and for its embedding that meets a target, run it, and measure what it cost
    on text that no weight was fitted to, beside the original and beside the same bits for every layer.

    \b
    compress fit MODEL --size 85MB --calibration TEXT --output OUT
    compress fit MODEL --bits 3.4 --for vllm --calibration TEXT --output OUT
    compress fit MODEL --size 3.5bpw --recipe-only --calibration TEXT \\
        --output mixed.yaml
    compress fit MODEL --kl 0.05 --hours 0.5 --calibration TEXT --output OUT

    Says first how long it will take. The same command goes on where it was stopped. A target that is missed is an exit
    code of 1, and OUT is the nearest to it.
    """
    begin()
    from compress.cli.progress import reporting

    with reporting("fit", quiet) as reporter:
        fitted = compress.fit(model, output=output, reporter=reporter, **options)
    write_report(json_file, fitted.to_dict())
    if not quiet and json_file != "-":
        for line in fit_lines(fitted):
            say(line)
    if fitted.proof is not None and not fitted.proof.met:
        fail(f"the target, {fitted.proof.target}, is missed; {output} is the nearest to it", 1)


def fit_lines(fitted: "FitResult") -> list[str]:
    """The result in words, and where everything lies."""
    if fitted.proof is None:
        choice = fitted.choice
        return [
            f"{choice.allocation.bits_per_weight:.4g} bits per weight, weight files of {choice.bytes:,} bytes; "
            f"predicted KL {choice.predicted_kl:.4g}, without what layers make up for",
            f"{fitted.output}: run it with compress quantize MODEL --recipe {fitted.output} ...",
        ]
    from compress.search.fitting.prove import paragraph_of

    where = f"{fitted.beside}: proof (fit.md), report.html, and recipe.yaml, which makes {fitted.output} again"
    return [paragraph_of(fitted.proof), where]
