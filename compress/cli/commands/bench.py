"""`compress bench`: the speed of kernels, or of a model, on this machine."""

from pathlib import Path
from typing import Any

import click

from compress.base.errors import CompressError, InputError
from compress.cli.exit_codes import exits_cleanly
from compress.cli.options import (
    begin,
    check_page,
    device_option,
    files_overwrite_option,
    given,
    html_option,
    json_option,
    plugin_option,
    quiet_option,
    trust_option,
    write_report,
)


@click.command(short_help="Measure speed on this machine: of the kernels, or of a model.")
@click.argument("model", required=False)
@click.option(
    "--shapes", metavar="NxK,...", help="Outputs x inputs of the linear layers.  [default: Llama's; CPU: square ones]"
)
@click.option("--tokens", metavar="M,...", help="Numbers of tokens that a product is timed for.")
@click.option("--schemes", metavar="NAME,...", help="Schemes of a model of known shape.  [default: dense,w4a16,w8a8]")
@click.option("--batch", metavar="B,...", help="Batch sizes: sequences generated at once.  [default: 1,16; CPU: 1,4]")
@click.option("--prompt", type=int, help="Tokens of the prompt.  [default: 2048; CPU: 128]")
@click.option("--new", type=int, help="New tokens after the prompt.  [default: 128; CPU: 16]")
@click.option(
    "--dtype", default="bfloat16", show_default=True, help="Dtype of the arithmetic: bfloat16, float16, float32."
)
@click.option("--rounds", type=int, help="Number of timings of each product or model.  [default: 50; of a MODEL: 10]")
@click.option("--quick", is_flag=True, help="Fewer shapes, tokens and rounds.")
@click.option("--tune", is_flag=True, help="First find the fastest kernel configurations for these products (GPU).")
@html_option("Write the results as one page of pictures and tables.")
@trust_option
@plugin_option
@device_option
@json_option
@files_overwrite_option
@quiet_option
@exits_cleanly
def bench(model: str | None, json_file: str | None, html: str | None, quiet: bool, **options: Any) -> None:
    """Measure speed on this machine.

    \b
    compress bench                    the linear layers: every kernel against dense and other libraries
    compress bench llama-3-8b         a random model of a known shape: prefill and decode, dense and compressed
    compress bench OUT                a compressed checkpoint against its dequantized self

    Shapes: tiny, small, llama-3-8b, llama-3-70b. What a kernel or a model computes is checked before it is timed.
    Each time is compared with the best bandwidth and arithmetic rate of this machine, measured in the same run.
    """
    of_linears, of_models = ("shapes", "tokens", "tune"), ("schemes", "batch", "prompt", "new", "trust_remote_code")
    foreign = [
        f"--{name.replace('_', '-')}" for name in (of_linears if model is not None else of_models) if given(name)
    ]
    if foreign:
        where = "the linear layers, without a MODEL" if model is not None else "a MODEL, and none is given"
        raise InputError(f"{', '.join(foreign)}: only for {where}; drop it")
    check_page(html)
    begin()
    from compress.cli.progress import reporting
    from compress.evaluation.report.terminal import show
    from compress.evaluation.speed.run import run_bench
    from compress.evaluation.speed.speed_tables import tables

    chosen = {
        name: value for name, value in options.items() if name not in (of_models if model is None else of_linears)
    }
    target = None if json_file in (None, "-") else Path(str(json_file))
    page = None if html is None else Path(html)
    with reporting("bench", quiet) as reporter:
        report = run_bench(model, target, page, reporter, **chosen)
    if json_file == "-":
        write_report("-", report.content())
    elif not quiet:
        show(*tables(report))
    if report.failures:
        more = f" ({len(report.failures)} in all)" if len(report.failures) > 1 else ""
        raise CompressError(f"wrong or failed, and not timed: {report.failures[0]}{more}")
