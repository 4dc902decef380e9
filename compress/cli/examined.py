"""The result of `compress doctor` in plain words: what is there, then what will be slow, missing or broken."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from compress.api.doctor.findings import Examination, State
from compress.system.terminal import console, visible

GIB = 2**30
HEADINGS: dict[State, str] = {
    "broken": "Broken",
    "slow": "Slower than it could be",
    "missing": "Not there, and needed only for what is said",
}


def show_examination(found: Examination) -> None:
    """Print the facts, a line each, then the findings that are not good, a line each."""
    out = console()
    for line in [*facts(found), *verdict(found)]:
        out.print(visible(line), soft_wrap=not out.is_terminal)


def facts(found: Examination) -> Iterator[str]:
    """Lines about what is there."""
    said = found.facts
    packages = {name: version for name, version in said["packages"].items() if name != "executable" and version}
    yield ", ".join(f"{name} {version}" for name, version in packages.items())
    if "processor" in said:
        chip = said["processor"]
        has = ", ".join(chip["instructions"]) or "no vector instructions that we know"
        yield f"processor: {chip['name']}, {chip['system']}, {chip['cores']} cores; {has}"
        yield f"kernels for {said['kernels']['target']}: {counted(said['kernels']['libraries'])}; " + (
            f"compiler: {', '.join(said['kernels']['compilers']) or 'none'}"
        )
        devices = said["gpu"]["devices"]
        yield f"GPU: {', '.join(device['name'] for device in devices) or 'none'}"
    yield f"memory: {sized(said['memory'], ('total', 'available', 'limit', 'swap'))}"
    if "disk" in said:
        places = said["disk"].items()
        yield "disk, free: " + ", ".join(f"{name} {amount(place['free'])}" for name, place in places)


def verdict(found: Examination) -> Iterator[str]:
    """Lines about what is not good, the gravest first."""
    for state, heading in HEADINGS.items():
        if findings := found.of(state):
            yield ""
            yield f"{heading}:"
            yield from (f"- {finding}" for finding in findings)
    if not found.of("broken"):
        yield ""
        yield "Nothing is broken."


def sized(sizes: dict[str, Any], names: tuple[str, ...]) -> str:
    """Sizes by name, those that are known."""
    return ", ".join(f"{amount(sizes[name])} {name}" for name in names if sizes.get(name)) or "not known"


def amount(size: int | None) -> str:
    """A size in GiB."""
    return "unknown" if size is None else f"{size / GIB:.1f} GiB"


def counted(states: Mapping[str, str]) -> str:
    """The number of libraries in each state, in words."""
    return ", ".join(f"{number} {state}" for state, number in Counter(states.values()).items())
