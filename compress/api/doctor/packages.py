"""Installed packages beside the versions that this one asks for. Nothing is imported."""

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from compress.api.doctor.findings import Observation
from compress.errors import install
from compress.system.version import VERSION

DISTRIBUTION = "compress-models"
# What each extra is for. `dev`, `docs` and `release` are of people who work on it.
EXTRAS = {
    "hf": "transformers loads what we write, and `compress verify` compares with it",
    "gguf": "`compress export --to gguf`, `--for llama.cpp`",
    "onnx": "`compress export --to onnx`, `--for ort`",
    "images": "calibration on images",
    "eval": "`compress evaluate --task lm-eval:NAME`",
}


def packages() -> tuple[dict[str, Any], list[Observation]]:
    """(The versions of Python, of this package and of what it asks for, findings about them.)"""
    facts: dict[str, Any] = {"python": platform.python_version(), "compress": VERSION, "executable": sys.executable}
    try:
        declared = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        said = f"{DISTRIBUTION} is not installed as a package, so versions of others were not checked"
        return facts, [Observation("packages", "missing", said, "pip install -e . in the checkout")]
    facts |= {each.name: installed(each.name) for each in declared if not of_developers(each)}
    findings = [*of_base(declared), *(of_extra(extra, declared) for extra in EXTRAS)]
    return facts, findings


def of_base(declared: list[Requirement]) -> Iterator[Observation]:
    """A finding for each package that nothing works without and that is missing or of another version; one in all
    where there is none."""
    needed = [each for each in declared if applies(each, "")]
    wrong = [(each, why) for each in needed if (why := why_wrong(each)) is not None]
    for each, why in wrong:
        yield Observation("packages", "broken", why, f"pip install '{each.name}{each.specifier}'")
    if not wrong:
        yield Observation("packages", "good", f"all {len(needed)} needed packages are there in versions that fit")


def of_extra(extra: str, declared: list[Requirement]) -> Observation:
    """The finding about an extra."""
    needed = [each for each in declared if applies(each, extra) and not applies(each, "")]
    wrong = [why for each in needed if (why := why_wrong(each)) is not None]
    if wrong:
        return Observation(f"extra {extra}", "missing", f"{'; '.join(wrong)} (for {EXTRAS[extra]})", install(extra))
    return Observation(f"extra {extra}", "good", f"there: {EXTRAS[extra]}")


def applies(each: Requirement, extra: str) -> bool:
    """True if this system needs a requirement, for an extra ("" for none)."""
    return each.marker is None or each.marker.evaluate({"extra": extra})


def of_developers(each: Requirement) -> bool:
    """True for what no user needs."""
    return not any(applies(each, extra) for extra in ("", *EXTRAS))


def why_wrong(each: Requirement) -> str | None:
    """The reason why a requirement is not met; None where it is."""
    found = installed(each.name)
    if found is None:
        return f"{each.name} is not installed"
    if not each.specifier.contains(found, prereleases=True):
        return f"{each.name} {found} is installed, and {each.specifier} needed"
    return None


def installed(name: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
