"""`compress inspect`, `evaluate` and `verify`: what a checkpoint holds, what it cost, and whether it is right."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import compress
from compress.cli.exits import GATE, exits_cleanly, fail
from compress.cli.options import (
    begin,
    check_page,
    device_option,
    given,
    html_option,
    json_option,
    plugin_option,
    quiet_option,
    task_options,
    trust_option,
    writable,
    write_report,
)
from compress.cli.terminal import visible
from compress.errors import InputError

OF_TEXT = ("calibration", "length", "stride", "samples", "noise_floor", "no_cache")
OF_LANGUAGE = ("texts", *OF_TEXT, "tasks", "questions")


@click.command(short_help="Measure perplexity, KL divergence to the original, and size.")
@click.argument("model")
@click.option("--reference", metavar="MODEL", help="The original, to compare with: KL divergence, same-top share.")
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="Held-out text, or token ids (evaluated row by row). Repeatable. Needed but for --task and --pairs.",
)
@task_options
@click.option(
    "--pairs", metavar="FILE", help="For an encoder: JSONL of sentence1, sentence2, score (instead of --text)."
)
@click.option("--calibration", metavar="TEXT", help="What the model was calibrated on: measured, too, and the gap.")
@click.option("--length", type=int, help="Tokens per window of text.  [default: the model's context, at most 2048]")
@click.option(
    "--stride", type=int, help="Tokens between the beginnings of windows, which overlap then.  [default: --length]"
)
@click.option("--samples", type=int, help="At most so many windows of each text, spread over it.")
@click.option("--noise-floor", is_flag=True, help="Measure the original against itself in its own 16 bits, too.")
@click.option("--no-cache", is_flag=True, help="Keep nothing of what the original says, and read nothing.")
@click.option(
    "--fail-if",
    "gates",
    multiple=True,
    metavar="CONDITION",
    help="Exit with 3 where it is true, like 'kl_mean > 0.05', or cannot be told. Repeatable.",
)
@trust_option
@plugin_option
@device_option
@json_option
@quiet_option
@exits_cleanly
def evaluate(
    model: str,
    reference: str | None,
    texts: tuple[str, ...],
    tasks: tuple[str, ...],
    pairs: str | None,
    gates: tuple[str, ...],
    json_file: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure perplexity, KL divergence to the original, answers to questions, and true size.

    Non-overlapping windows; every token after a window's first is predicted (--stride: those that no earlier window has
    had). KL is KL(original || MODEL) in nats per token, delta p the probability of the text's token less the
    original's. Bytes are those of the weight files. Behind ± is the standard error over windows (--json: over tokens,
    too).
    """
    if not texts and not tasks and pairs is None:
        raise InputError("nothing to measure on; give --text TEXT, --task FILE, or both (an encoder: --pairs FILE)")
    if pairs is not None and (unused := [name for name in OF_LANGUAGE if given(name)]):
        told = {"texts": "text", "tasks": "task"}.get(unused[0], unused[0]).replace("_", "-")
        about = "tasks" if unused[0] in ("tasks", "questions") else "text"
        raise InputError(f"--pairs is for encoders; --{told} is for {about}: drop one of them")
    if not texts and (unused := [name for name in OF_TEXT if given(name)]):
        raise InputError(f"--{unused[0].replace('_', '-')} is for text; give --text TEXT, or drop it")
    begin()
    from compress.cli.progress import reporting
    from compress.evaluation.gates import broken_gates, parse_gate

    asked = [parse_gate(gate) for gate in gates]
    of_text = {name: options.pop(name) for name in (*OF_TEXT, "questions")}
    with reporting("evaluate", quiet) as reporter:
        words = {"reference": reference, "reporter": reporter, **options}
        if pairs is not None:
            from compress.evaluation.encoders import evaluate_encoder

            found = evaluate_encoder(model, pairs, **words)
        else:
            cache = not of_text.pop("no_cache")
            found = compress.evaluate(model, text=texts or None, tasks=tasks, cache=cache, **of_text, **words)
    write_report(json_file, asdict(found))
    if not quiet and json_file != "-":
        from compress.cli import figures
        from compress.cli import tables as show
        from compress.cli.tasks import answered

        show.evaluations([(model, found)], reference)
        figures.details(found, model)
        answered(found.tasks)
    if broken := broken_gates(found, asked):
        fail("; ".join(broken), GATE)


@click.command(short_help="Show every layer: scheme, bits, bytes, why it was left alone.")
@click.argument("model")
@click.option("--kernels", is_flag=True, help="Which kernel each compressed layer gets, and why not a faster one.")
@click.option("--calibration", is_flag=True, help="The ranges that calibration fixed, and what they clip.")
@click.option("--training", is_flag=True, help="How the model was trained: steps, losses, speed.")
@html_option("With --calibration: write its table and histograms as one page")
@click.option("--svg", metavar="FILE", callback=writable, help="With --training: draw the losses (needs nothing more).")
@trust_option
@plugin_option
@device_option
@json_option
@quiet_option
@exits_cleanly
def inspect(
    model: str,
    kernels: bool,
    calibration: bool,
    training: bool,
    html: str | None,
    svg: str | None,
    trust_remote_code: bool,
    device: str | None,
    json_file: str | None,
    quiet: bool,
) -> None:
    """Show every layer of a checkpoint: shape, scheme, bits, bytes, and what was left alone and why."""
    wanted = {"--kernels": kernels, "--calibration": calibration, "--training": training}
    reports = [name for name, asked in wanted.items() if asked]
    if len(reports) > 1:
        raise InputError(f"{reports[0]} and {reports[1]} are two reports; ask for one")
    if svg is not None and not training:
        raise InputError("--svg is for --training, which has losses to draw; drop it or add that")
    if svg == "-":
        raise InputError("--svg '-'; give a file")
    if html is not None and not calibration:
        raise InputError("--html is for --calibration, which has histograms to draw; drop it or add that")
    if device is not None and not kernels:
        raise InputError("--device is for --kernels: without it nothing depends on a device")
    if trust_remote_code and not kernels:
        raise InputError("--trust-remote-code is for --kernels: without it nothing of the model is run")
    check_page(html)
    if html is not None:
        from compress.evaluation.page import check_plotly

        check_plotly()
    begin()
    silent = quiet or json_file == "-"
    if kernels:
        _kernels(model, device, trust_remote_code, json_file, silent)
    elif calibration:
        _calibration(model, html, json_file, silent)
    elif training:
        _training(model, svg, json_file, silent)
    else:
        _layers(model, json_file, silent)


def _kernels(model: str, device: str | None, trust_remote_code: bool, json_file: str | None, silent: bool) -> None:
    """Which kernel each layer gets."""
    from compress.cli import tables as show
    from compress.device import find_device
    from compress.evaluation.routes import kernel_rows

    target = find_device(device)
    rows = kernel_rows(model, target, trust_remote_code=trust_remote_code)
    write_report(json_file, {"device": str(target), "layers": [asdict(row) for row in rows]})
    if not silent:
        show.kernels(rows, str(target))


def _calibration(model: str, html: str | None, json_file: str | None, silent: bool) -> None:
    """The ranges that calibration fixed."""
    from compress.cli import tables as show
    from compress.evaluation.calibration import calibrated_ranges, content, write_ranges

    ranges = calibrated_ranges(model)
    write_report(json_file, {"model": model, "ranges": content(ranges)})
    if html is not None:
        write_ranges(model, ranges, Path(html))
    if not silent:
        show.calibration(ranges)


def _training(model: str, svg: str | None, json_file: str | None, silent: bool) -> None:
    """How the model was trained."""
    from compress.cli import tables as show
    from compress.evaluation.training import content, curves, rows, write_curves

    found = curves(model)
    write_report(json_file, {"model": model, "trainings": content(found)})
    if svg is not None:
        write_curves(model, found, Path(svg))
    if not silent:
        show.curves(rows(found))


def _layers(model: str, json_file: str | None, silent: bool) -> None:
    """Every layer, and the size of the whole."""
    from compress.cli import tables as show
    from compress.evaluation.size import inspect_checkpoint

    rows, size = inspect_checkpoint(model)
    write_report(json_file, {"layers": [asdict(row) for row in rows], "size": asdict(size)})
    if not silent:
        show.inspection(rows, size)


@click.command(short_help="Check that a checkpoint holds what its run decided.")
@click.argument("model")
@trust_option
@plugin_option
@json_option
@quiet_option
@exits_cleanly
def verify(model: str, trust_remote_code: bool, json_file: str | None, quiet: bool) -> None:
    """Check that a written checkpoint holds what its run decided and loads in transformers as exactly that."""
    begin()
    found = compress.verify(model, trust_remote_code)
    write_report(json_file, found)
    if not quiet and json_file != "-":
        click.echo(visible(f"{found['layers']} layers bit for bit; transformers {found['transformers']}"))
