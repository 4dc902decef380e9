"""`compress doctor`: what this machine and its packages can do, what will be slow and why."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from compress.base.errors import CompressError
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import answer_options
from compress.cli.options import show_notes, write_report

if TYPE_CHECKING:
    from compress.jobs.doctor import Examination

HEADINGS = {
    "broken": "Broken",
    "slow": "Slower than it could be",
    "missing": "Not there, and needed only for what is said",
}


@click.command(short_help="Look over this machine: what is slow or missing, and why.")
@click.option("--build", is_flag=True, help="Compile the CPU kernels now, rather than at first use.")
@answer_options
@exits_cleanly
def doctor(build: bool, json_file: str | None, quiet: bool) -> None:
    """Look over this machine and its packages: versions, processor, CPU kernels, GPUs, memory, extras; what will be
    slow, what is missing, and why.

    The exit code is 0 unless something is broken, so that work would fail: then it is 1.
    """
    from dataclasses import asdict

    from compress.base.terminal import console, visible
    from compress.jobs.doctor import examine

    show_notes(quiet)
    examination = examine(build)
    write_report(json_file, {"facts": examination.facts, "findings": list(map(asdict, examination.findings))})
    if not quiet and json_file != "-":
        out = console()
        for line in [*facts(examination.facts), *verdict(examination)]:
            out.print(visible(line), soft_wrap=not out.is_terminal)
    if broken := [finding for finding in examination.findings if finding.state == "broken"]:
        raise CompressError("; ".join(map(str, broken)))


def facts(areas: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Lines about what is there."""
    versions = {name: version for name, version in areas["packages"].items() if name != "executable" and version}
    yield ", ".join(f"{name} {version}" for name, version in versions.items())
    chip, memory = areas["processor"], areas["memory"]
    yield f"processor: {chip['name']}, {chip['system']}, {chip['cores']} cores; {', '.join(chip['instructions'])}"
    if kernels := areas.get("kernels"):
        states = ", ".join(f"{number} {state}" for state, number in Counter(kernels["libraries"].values()).items())
        yield f"CPU kernels for {kernels['target']}: {states}; compilers: {', '.join(kernels['compilers']) or 'none'}"
        devices = [
            f"{each['name']}, {gib(each['free'])} of {gib(each['bytes'])} free" for each in areas["gpu"]["devices"]
        ]
        yield f"GPU: {'; '.join(devices) or 'none'}"
    yield "memory: " + (", ".join(f"{gib(size)} {name}" for name, size in memory.items() if size) or "not known")
    yield f"cache: {areas['cache']['path']}, {gib(areas['cache']['free'])} free"


def gib(size: int) -> str:
    """A size in GiB."""
    return f"{size / 2**30:.1f} GiB"


def verdict(found: "Examination") -> Iterator[str]:
    """Lines about what is to be mended, the gravest first."""
    for state, heading in HEADINGS.items():
        if findings := [finding for finding in found.findings if finding.state == state]:
            yield from ("", f"{heading}:", *(f"- {finding}" for finding in findings))
    if all(finding.state != "broken" for finding in found.findings):
        yield from ("", "Nothing is broken.")
