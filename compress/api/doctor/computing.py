"""torch, the compiler, the compiled kernels and the GPU: what computes here."""

import shlex
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from compress.api.doctor.findings import Observation
from compress.errors import first_line

FLOAT8 = (8, 9)  # compute capability from which float8 is multiplied
NVIDIA = Path("/dev/nvidia0")
IN_THEIR_PLACE = "torch computes in their place"
LOADING = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError)  # of libraries that do not fit


def imported(*names: str) -> list[Observation]:
    """A finding for each library: that it can be imported, or why not."""
    findings = []
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a library about its own code
                version = getattr(import_module(name), "__version__", "")
            findings.append(Observation(name, "good", f"{name} {version} can be imported".replace("  ", " ")))
        except LOADING as error:
            said = f"{name} cannot be imported ({first_line(error)})"
            findings.append(Observation(name, "broken", said, f"pip install --force-reinstall {name}"))
    return findings


def kernels(build: bool) -> tuple[dict[str, Any], Iterator[Observation]]:
    """(Facts, findings) about compiled kernels. build: compile those that are not there yet."""
    from compress.kernels.cpu import build as cpu
    from compress.kernels.cpu.processor import target

    reasons, names = cpu.machine_reasons(), cpu.names_here()
    if build and not reasons:
        cpu.build_all(names)
    states = {name: "off" if reasons else compiled(name, build) for name in names}
    facts = {"compilers": [shlex.join(words) for words in cpu.compilers()], "target": target(), "libraries": states}
    return facts, of_kernels(reasons, states)


def compiled(name: str, build: bool) -> str:
    """The state of a library: `prebuilt`, `there`, `not yet`, or why it cannot be built."""
    from compress.kernels.cpu import build as cpu

    if build and cpu.state(name) != "prebuilt":
        return "; ".join(cpu.why_not(name)) or "there"
    return cpu.state(name)


def of_kernels(reasons: tuple[str, ...], states: dict[str, str]) -> Iterator[Observation]:
    """Findings about compiled kernels. reasons: against building any on this machine."""
    from compress.kernels.cpu.libraries import LIBRARIES
    from compress.kernels.cpu.processor import target

    about = "kernels"
    if reasons:
        yield Observation(about, "slow", f"{'; '.join(reasons)}: {IN_THEIR_PLACE}")
        return
    there = ("prebuilt", "there", "not yet")
    came = sum(state == "prebuilt" for state in states.values())
    if came:
        said = f"{came} of {len(states)} prebuilt in the wheel; COMPRESS_CPU_KERNELS=compile compiles them here"
        yield Observation(about, "good", said)
    instead = {"spill": "--spill needs them"}
    if states["gemm"] in there:
        without = "the other kernels do without, slower"
        instead |= {"operators": without, "dense": without}
    refused = {name: (state, instead.get(name, IN_THEIR_PLACE)) for name, state in states.items() if state not in there}
    for reason, else_ in dict.fromkeys(refused.values()):
        names = [name for name, found in refused.items() if found == (reason, else_)]
        what = LIBRARIES[names[0]].about if len(names) == 1 else f"{len(names)} libraries"
        said = f"{what}: {reason}; {else_}"
        yield Observation(
            about, "slow", said, "install g++ or clang++, then COMPRESS_CPU_KERNELS=retry compress doctor"
        )
    waiting = [name for name, state in states.items() if state == "not yet"]
    if waiting:
        seconds = sum(LIBRARIES[name].seconds for name in waiting)
        said = (
            f"{len(waiting)} of {len(states)} not compiled yet (about {seconds} s of CPU time together; each once, "
            "when a model needs it)"
        )
        yield Observation(about, "slow", said, "`compress doctor --build` compiles them now")
    elif all(state == "there" for state in states.values()):
        yield Observation(about, "good", f"all compiled for this processor ({target()})")
    if states.get("dense") in ("prebuilt", "there"):
        yield from of_dense_blocks()


def of_dense_blocks() -> Iterator[Observation]:
    """A finding about the products that were measured on this machine, where there are any."""
    from compress.kernels.cpu import dense
    from compress.kernels.cpu.crossings import NEVER

    measured = dense.known()
    if measured:
        faster = sum(tokens < NEVER for tokens in measured.values())
        said = (
            f"dense blocks are faster for many tokens in {faster} of {len(measured)} kinds of products measured so far"
        )
        yield Observation("kernels", "good", said)


def gpu() -> tuple[dict[str, Any], Iterator[Observation]]:
    """(Facts, findings) about GPUs. Raises nothing: a GPU that does not work is a finding."""
    import torch

    facts: dict[str, Any] = {"cuda": torch.version.cuda, "devices": []}
    if not torch.cuda.is_available():
        return facts, without_gpu(torch.version.cuda)
    problems = []
    for number in range(torch.cuda.device_count()):
        try:
            found = torch.cuda.get_device_properties(number)
            torch.zeros(1, device=f"cuda:{number}").item()
            capability = [found.major, found.minor]
            facts["devices"].append({"name": found.name, "bytes": found.total_memory, "capability": capability})
        except (RuntimeError, AssertionError) as error:
            problems.append(f"cuda:{number} does not compute ({first_line(error)})")
    return facts, with_gpu(facts["devices"], problems)


def without_gpu(cuda: str | None) -> Iterator[Observation]:
    """The finding where torch sees no GPU. cuda: the version that torch is built for."""
    if NVIDIA.exists() and cuda is None:
        said = "there is an NVIDIA GPU, and this build of torch has no CUDA"
        yield Observation("gpu", "slow", said, "install a build of torch with CUDA (pytorch.org)")
    elif NVIDIA.exists():
        said = f"there is an NVIDIA GPU, and torch (CUDA {cuda}) cannot use it"
        yield Observation("gpu", "broken", said, "compare the driver with `nvidia-smi`; or give --device cpu")
    else:
        said = "none: everything runs on the CPU"
        yield Observation("gpu", "slow", said, "small models are quantized in minutes; training is slow")


def with_gpu(devices: list[dict[str, Any]], problems: list[str]) -> Iterator[Observation]:
    """Findings about GPUs that torch sees. devices: those that compute."""
    for problem in problems:
        yield Observation("gpu", "broken", problem, "give --device cpu, or free that GPU")
    for device in devices:
        yield Observation("gpu", "good", f"{device['name']}, {device['bytes'] / 2**30:.0f} GiB")
        if tuple(device["capability"]) < FLOAT8:
            said = f"{device['name']} multiplies no float8: fp8 and MXFP8 layers are unpacked for each product"
            yield Observation("gpu", "slow", said, "w8a8 is multiplied in int8 there")
