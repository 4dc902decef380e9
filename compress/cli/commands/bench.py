"""`compress bench`: the speed of a model on this machine."""

from pathlib import Path
from typing import Any

import click

from compress.base.errors import CompressError, InputError
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import reading_options
from compress.cli.options import begin, write_report

KERNELS = "python -m compress.recipes.studies.kernels.bench"


@click.command(short_help="Measure the speed of a model on this machine.")
@click.argument("model", required=False)
@click.option("--schemes", metavar="NAME,...", help="Schemes of a model of known shape.  [default: dense,w4a16,w8a8]")
@click.option("--batch", metavar="B,...", help="Batch sizes: sequences generated at once.  [default: 1,16; CPU: 1,4]")
@click.option("--prompt", type=int, help="Tokens of the prompt.  [default: 2048; CPU: 128]")
@click.option("--new", type=int, help="New tokens after the prompt.  [default: 128; CPU: 16]")
@click.option(
    "--dtype", default="bfloat16", show_default=True, help="Dtype of the arithmetic: bfloat16, float16, float32."
)
@click.option("--rounds", type=int, help="Number of timings of each variant.  [default: 10]")
@click.option("--quick", is_flag=True, help="Fewer tokens and rounds.")
@reading_options
@exits_cleanly
def bench(model: str | None, json_file: str | None, quiet: bool, **options: Any) -> None:
    """Measure the speed of a model on this machine.

    \b
    compress bench llama-3-8b    random weights of a known shape, dense and packed
    compress bench OUT           a compressed checkpoint, against it dequantized

    Shapes: tiny, small, llama-3-8b, llama-3-70b. What a model computes is checked before it is timed.
    """
    if model is None:
        raise InputError(f"give a MODEL, as in `compress bench small`; a checkout times each kernel: {KERNELS}")
    begin()
    from compress.cli.progress import reporting
    from compress.evaluation.report.terminal import show
    from compress.evaluation.speed.models import bench_model
    from compress.evaluation.speed.options import model_options
    from compress.evaluation.speed.speed_tables import tables

    asked = model_options(model, **options)
    target = None if json_file in (None, "-") else Path(str(json_file))
    with reporting("bench", quiet) as reporter:
        report = bench_model(asked, target, reporter)
    if json_file == "-":
        write_report("-", report.content())
    elif not quiet:
        show(*tables(report))
    if report.failures:
        raise CompressError(report.complaint())
