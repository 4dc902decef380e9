"""The examination as a whole, in the order in which one part needs the other."""

from collections.abc import Iterable
from typing import Any

from compress.api.doctor.computing import gpu, imported, kernels
from compress.api.doctor.findings import Examination, Observation, gathered
from compress.api.doctor.machine import disk, memory, processor
from compress.api.doctor.packages import packages

LIBRARIES = ("torch", "transformers", "datasets", "safetensors")


def examine(build: bool = False) -> Examination:
    """Look over this machine and its packages. Where torch cannot be imported, nothing that needs it is looked at.
    build: compile kernels that are not there yet."""
    parts: list[tuple[str, dict[str, Any], Iterable[Observation]]] = [("packages", *packages())]
    found = imported(*LIBRARIES)
    parts.append(("libraries", {finding.about: finding.state for finding in found}, found))
    if any(finding.about == "torch" and finding.state == "broken" for finding in found):
        said = "processor, kernels and GPU were not looked at, because torch is needed for it"
        return gathered([*parts, ("machine", {}, [Observation("machine", "missing", said)]), ("memory", *memory())])
    from compress.kernels.cache import cache_directory
    from compress.kernels.cpu.processor import cpu_flags, cpu_name

    parts.append(("processor", *processor(cpu_flags(), cpu_name())))
    parts.append(("kernels", *kernels(build)))
    parts.append(("gpu", *gpu()))
    return gathered([*parts, ("memory", *memory()), ("disk", *disk(cache_directory()))])
