"""`compress cache-logits`: a teacher's log-probabilities, stored for the trainings that follow."""

from dataclasses import asdict
from typing import Any

import click

import compress
from compress.base.terminal import say
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import (
    batch_size_option,
    bos_option,
    calibration_option,
    length_option,
    overwrite_option,
    working_options,
)
from compress.cli.options import begin, write_report
from compress.cli.run_command import check_processes, process_group


@click.command(name="cache-logits", short_help="Store a teacher's log-probabilities for training.")
@click.argument("teacher")
@calibration_option(required=True)
@click.option("--output", required=True, metavar="FILE", help="The file to write; it ends in .safetensors.")
@click.option("--top-k", type=int, default=64, show_default=True, help="Log-probabilities to store for each token.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="Temperature that training will use.")
@length_option
@bos_option
@batch_size_option
@overwrite_option("Replace a file that holds no cached logits.")
@click.option("--fsdp", is_flag=True, help="Shard the teacher over the processes of torchrun.")
@working_options
@exits_cleanly
def cache_logits(
    teacher: str, calibration: str, output: str, fsdp: bool, json_file: str | None, quiet: bool, **options: Any
) -> None:
    """Run TEACHER once and store the largest log-probabilities of each token. Training then reads the file,
    and needs no teacher.

    \b
    compress cache-logits TEACHER --calibration TEXT --output said.safetensors
    compress distill TEACHER --student MODEL --train teacher=said.safetensors \\
        --training TEXT --output out

    TEXT, --length and --bos must be those of the training.
    """
    check_processes(fsdp, options["device"])
    begin()
    from compress.cli.progress import reporting

    with process_group(fsdp, options["device"]) as rank, reporting("cache", quiet or rank > 0) as reporter:
        cached = compress.cache_logits(teacher, output, calibration, fsdp=fsdp, reporter=reporter, **options)
    if rank > 0:
        return
    write_report(json_file, asdict(cached))
    if not quiet and json_file != "-":
        figures = (
            f"{cached.top_k} log-probabilities for each of {cached.tokens:,} tokens, {cached.mass:.2%} of the mass"
        )
        say(f"{output}: {figures}")
