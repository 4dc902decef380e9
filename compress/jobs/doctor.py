"""Facts about this machine and its packages, and what is slow, missing or broken there."""

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement

from compress.base.errors import first_line, install
from compress.base.memory import container_limit, meminfo
from compress.base.version import VERSION
from compress.kernels.cache_folder import cache_directory
from compress.kernels.cpu.processor import cpu_flags, cpu_name, target, usable_cores

EXTRAS = {
    "hf": "transformers loads what we write, and `compress verify` compares with it",
    "gguf": "`compress export --to gguf`, `--for llama.cpp`",
    "onnx": "`compress export --to onnx`, `--for ort`",
    "images": "calibration on images",
    "eval": "`compress evaluate --task lm-eval:NAME`",
}
X86 = ("avx2", "fma", "f16c", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8")
ARM = ("asimd", "asimddp", "i8mm", "bf16")
LOADING = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError)  # of libraries that do not fit
NVIDIA = Path("/dev/nvidia0")
Facts = dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """Something to mend. state: `slow` (it works, more slowly than it could), `missing` (something optional is not
    there), `broken` (work will fail)."""

    about: str
    state: Literal["slow", "missing", "broken"]
    said: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.about}: {self.said}" + (f"; {self.advice}" if self.advice else "")


class Examination(NamedTuple):
    """Facts of this machine, {area: {name: value}}, and what there is to mend."""

    facts: dict[str, Facts]
    findings: list[Observation]


def examine(build: bool = False) -> Examination:
    """Look over this machine and its packages. build: compile kernels that are not there yet."""
    unusable = list(import_problems("torch", "transformers"))
    has = [flag for flag in (*X86, *ARM) if flag in cpu_flags()]
    system = f"{platform.system()} on {platform.machine()}"
    chip = {"name": cpu_name(), "system": system, "cores": usable_cores(), "instructions": has}
    parts: dict[str, tuple[Facts, list[Observation]]] = {"packages": packages(), "processor": (chip, [])}
    if not any(each.about == "torch" for each in unusable):  # the other two need it
        parts |= {"kernels": kernels(build), "gpu": gpu()}
    total, folder = meminfo("MemTotal"), cache_directory()
    memory = {"total": total, "available": meminfo("MemAvailable"), "limit": container_limit(total)}  # of the container
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    facts = {area: facts for area, (facts, _) in parts.items()}
    facts |= {"memory": memory, "cache": {"path": str(folder), "free": shutil.disk_usage(there).free}}
    return Examination(facts, [*unusable, *(found for _, findings in parts.values() for found in findings)])


def import_problems(*names: str) -> Iterator[Observation]:
    """A finding for each library that cannot be imported."""
    for name in names:
        try:
            import_module(name)
        except LOADING as error:
            said = f"{name} cannot be imported ({first_line(error)})"
            yield Observation(name, "broken", said, f"pip install --force-reinstall {name}")


def packages() -> tuple[Facts, list[Observation]]:
    """(Versions of Python, of this package and of what it asks for, findings about them.)"""
    facts: Facts = {"python": platform.python_version(), "compress": VERSION, "executable": sys.executable}
    try:
        declared = [Requirement(line) for line in metadata.requires("compress-models") or ()]
    except metadata.PackageNotFoundError:
        said = "compress-models is not installed as a package, so versions of others were not checked"
        return facts, [Observation("packages", "missing", said, "pip install -e . in the checkout")]
    facts |= {
        each.name: installed_version(each.name) for each in declared if any(applies(each, e) for e in ("", *EXTRAS))
    }
    return facts, list(of_packages(declared))


def of_packages(declared: list[Requirement]) -> Iterator[Observation]:
    """A finding for each needed package that is missing or of another version, and for each extra that lacks one."""
    for each in declared:
        if applies(each, "") and (why := why_wrong(each)):
            yield Observation("packages", "broken", why, f"pip install '{each.name}{each.specifier}'")
    for extra, purpose in EXTRAS.items():
        added = [each for each in declared if applies(each, extra) and not applies(each, "")]
        if wrong := [why for each in added if (why := why_wrong(each))]:
            yield Observation(f"extra {extra}", "missing", f"{'; '.join(wrong)} (for {purpose})", install(extra))


def applies(each: Requirement, extra: str) -> bool:
    """True if this system needs a requirement, for an extra ("" for none)."""
    return each.marker is None or each.marker.evaluate({"extra": extra})


def why_wrong(each: Requirement) -> str | None:
    """The reason why a requirement is not met; None where it is."""
    if (found := installed_version(each.name)) is None:
        return f"{each.name} is not installed"
    fits = each.specifier.contains(found, prereleases=True)
    return None if fits else f"{each.name} {found} is installed, and {each.specifier} needed"


def installed_version(name: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def kernels(build: bool) -> tuple[Facts, list[Observation]]:
    """(Facts, findings) about compiled kernels. build: compile those that are not there yet."""
    from compress.kernels.cpu import build as cpu

    reasons, names = cpu.machine_reasons(), cpu.names_here()
    if build and not reasons:
        cpu.build_all(names)
    states = {name: "off" if reasons else cpu.state(name) for name in names}
    compilers = [" ".join(words) for words in cpu.compilers()]
    return {"compilers": compilers, "target": target(), "libraries": states}, list(of_kernels(reasons, states))


def of_kernels(reasons: tuple[str, ...], states: dict[str, str]) -> Iterator[Observation]:
    """Findings about compiled kernels. reasons: against building any on this machine. states: {library: state}."""
    failed: dict[str, list[str]] = {}
    for name, state in states.items():
        if state not in ("prebuilt", "there", "not yet", "off"):
            failed.setdefault(state, []).append(name)
    if reasons:
        yield Observation("kernels", "slow", f"{'; '.join(reasons)}: torch computes in their place")
    for reason, names in failed.items():
        said = f"not compiled ({reason}), so that torch computes in their place: {', '.join(names)}"
        yield Observation("kernels", "slow", said, "install g++ or clang++, then COMPRESS_CPU_KERNELS=retry")
    if waiting := sum(state == "not yet" for state in states.values()):
        said = f"{waiting} of {len(states)} not compiled yet (each once, when a model needs it)"
        yield Observation("kernels", "slow", said, "`compress doctor --build` compiles them now")


def gpu() -> tuple[Facts, list[Observation]]:
    """(Facts, findings) about GPUs. Raises nothing: a GPU that does not work is a finding."""
    import torch

    devices, problems = [], []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            (free, total), name = torch.cuda.mem_get_info(number), torch.cuda.get_device_name(number)
            torch.zeros(1, device=f"cuda:{number}").item()
            devices.append({"name": name, "bytes": total, "free": free})
        except (RuntimeError, AssertionError) as error:
            said = f"cuda:{number} does not compute ({first_line(error)})"
            problems.append(Observation("gpu", "broken", said, "give --device cpu, or free that GPU"))
    facts = {"cuda": torch.version.cuda, "devices": devices}
    return facts, problems if torch.cuda.is_available() else without_gpu(torch.version.cuda)


def without_gpu(cuda: str | None) -> list[Observation]:
    """Findings where torch sees no GPU. cuda: the version that torch is built for."""
    if not NVIDIA.exists():
        return []
    said, advice = "this build of torch has no CUDA", "install a build of torch with CUDA (pytorch.org)"
    if cuda is not None:
        said, advice = f"torch (CUDA {cuda}) cannot use it", "compare `nvidia-smi`, or give --device cpu"
    return [Observation("gpu", "slow" if cuda is None else "broken", f"there is an NVIDIA GPU, and {said}", advice)]
