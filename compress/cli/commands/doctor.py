"""`compress doctor`: what this machine and its packages can do, what will be slow and why."""

import click

from compress.cli.exit_codes import exits_cleanly
from compress.cli.options import files_overwrite_option, json_option, quiet_option, show_notes, write_report
from compress.errors import CompressError


@click.command(short_help="Look over this machine: what is slow or missing, and why.")
@click.option("--build", is_flag=True, help="Compile the CPU kernels now, rather than at first use.")
@json_option
@files_overwrite_option
@quiet_option
@exits_cleanly
def doctor(build: bool, json_file: str | None, quiet: bool) -> None:
    """Look over this machine and its packages: processor, compiler, kernels, GPU, memory, versions; what will be slow,
    what is missing, and why.

    The exit code is 0 unless something is broken, so that work would fail: then it is 1.
    """
    from compress.api.doctor.examine import examine

    show_notes(quiet)
    found = examine(build)
    write_report(json_file, found.content())
    if not quiet and json_file != "-":
        from compress.cli.examined import show_examination

        show_examination(found)
    if broken := found.of("broken"):
        raise CompressError("; ".join(map(str, broken)))
