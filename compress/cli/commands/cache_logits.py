"""`compress distill --cache-logits`: what a teacher says, kept for trainings that follow."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

import compress
from compress.cli.options import begin, given, write_report
from compress.cli.running import check_processes, process_group, split_settings
from compress.errors import InputError
from compress.system.terminal import visible

# Whatever else `distill` takes is about a student.
OF_A_TEACHER = (
    *("teacher", "cache_logits", "top_k", "training", "calibration", "length", "batch_size", "training_settings"),
    *("device", "fsdp", "trust_remote_code", "json_file", "quiet", "overwrite"),
)


def cache(teacher: str, file: str, top_k: int | None, settings: Sequence[str], options: Mapping[str, Any]) -> None:
    """Ask a teacher, and write what it says. options: of the command."""
    context = click.get_current_context()
    about = [p.opts[-1] for p in context.command.params if p.name and given(p.name) and p.name not in OF_A_TEACHER]
    if about:
        raise InputError(f"--cache-logits asks {teacher} alone, and trains nothing; drop {', '.join(about)}")
    chosen = split_settings(settings, {})
    try:
        temperature = float(chosen.pop("temperature", 1.0))
    except ValueError:
        raise InputError("temperature is a number above 0") from None
    if chosen:
        raise InputError(f"--cache-logits trains nothing; drop --train {', '.join(chosen)} (temperature alone counts)")
    data = options["calibration"] if options["training"] is None else options["training"]
    if data is None:
        raise InputError("--cache-logits asks the teacher about data; give --training TEXT, as to the training")
    fsdp, device = options["fsdp"], options["device"]
    check_processes(fsdp, device)
    begin()
    from compress.cli.progress import reporting

    with process_group(fsdp, device) as rank, reporting("cache", options["quiet"] or rank > 0) as reporter:
        made = compress.cache_logits(
            teacher,
            file,
            data,
            **({} if top_k is None else {"top_k": top_k}),
            temperature=temperature,
            length=options["length"],
            batch_size=options["batch_size"],
            device=device,
            fsdp=fsdp,
            overwrite=options["overwrite"],
            trust_remote_code=options["trust_remote_code"],
            reporter=reporter,
        )
    if rank > 0:
        return
    write_report(options["json_file"], asdict(made))
    if not options["quiet"] and options["json_file"] != "-":
        line = f"{file}: {made.top_k} log-probabilities for each of {made.tokens:,} tokens, {made.mass:.2%} of the mass"
        click.echo(visible(line))
