"""Processor, memory and disk: what the system says about them, and what follows for speed."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.api.doctor.findings import Observation
from compress.kernels.cpu.processor import usable_cores
from compress.system.memory import container_limit, meminfo

GIB = 2**30
LITTLE_MEMORY, LITTLE_DISK = 4 * GIB, 2 * GIB
# Instructions that our kernels, torch's or an engine's use, by the name that Linux has for them.
INSTRUCTIONS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_int8": "AMX",
    "asimd": "NEON",
    "asimddp": "dot products of bytes",
    "i8mm": "products of tiles of bytes",
    "bf16": "products of bfloat16",
}

ARM_PRODUCTS = ("asimddp", "i8mm", "bf16")


def processor(flags: frozenset[str], name: str) -> tuple[dict[str, Any], Iterator[Observation]]:
    """(Facts, findings) about a processor of these flags and this name."""
    has = [word for flag, word in INSTRUCTIONS.items() if flag in flags]
    cores = usable_cores()
    facts = {
        "name": name,
        "system": f"{platform.system()} on {platform.machine()}",
        "cores": cores,
        "instructions": has,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }
    return facts, of_processor(flags, cores)


def of_processor(flags: frozenset[str], cores: int) -> Iterator[Observation]:
    """Findings about a processor of these flags, of which this process may use so many cores."""
    about = "processor"
    if not flags:
        yield Observation(
            about, "slow", "the system names no instructions of the processor, so compiled kernels stay off"
        )
        return
    if "asimd" in flags:
        yield from of_arm(flags)
    else:
        yield from of_x86(flags)
    if cores == 1:
        yield Observation(about, "slow", "this process may use one core")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) < cores:
        yield Observation(about, "slow", f"OMP_NUM_THREADS={threads} of {cores} cores", "unset it to use all of them")


def of_arm(flags: frozenset[str]) -> Iterator[Observation]:
    """Findings about an ARM processor of these flags."""
    if missing := [word for flag, word in INSTRUCTIONS.items() if flag in ARM_PRODUCTS and flag not in flags]:
        said = f"it has no {', '.join(missing)}: compiled kernels take more instructions for the same products"
        yield Observation("processor", "slow", said)


def of_x86(flags: frozenset[str]) -> Iterator[Observation]:
    """Findings about an x86 processor of these flags."""
    about = "processor"
    if missing := [
        word for flag, word in INSTRUCTIONS.items() if flag in ("avx2", "fma", "f16c") and flag not in flags
    ]:
        yield Observation(
            about, "slow", f"it has no {', '.join(missing)}: torch computes in place of the compiled kernels"
        )
        return
    if "avx512f" not in flags:
        said = "it has no AVX-512: prompts are read more slowly, and vLLM has no 4-bit kernel for it"
        yield Observation(about, "slow", said, "int8_activations=True makes 4-bit layers faster, a little less exact")
        said = "it multiplies no bfloat16: dense bfloat16 models take longer than float32 ones"
        yield Observation(about, "slow", said, "run originals in float32, or compressed")
    if not {"avx_vnni", "avx512_vnni"} & flags:
        said = "it has no VNNI: w8a8 saturates in vLLM and ONNX Runtime, and loses accuracy there"
        yield Observation(
            about, "slow", said, "`compress export --to onnx-exact` writes codes whose products are exact"
        )


def memory() -> tuple[dict[str, Any], list[Observation]]:
    """(Facts, findings) about memory, in bytes. limit: of the container, None where there is none."""
    total, available, swap = (meminfo(key) for key in ("MemTotal", "MemAvailable", "SwapTotal"))
    limit = container_limit(total)
    facts = {"total": total, "available": available, "limit": limit, "swap": swap}
    usable = min(size for size in (available, limit, total) if size is not None) if total else None
    if usable is None:
        return facts, [Observation("memory", "good", "this system does not say how much there is")]
    free = f"{usable / GIB:.1f} GiB can be used"
    if usable >= LITTLE_MEMORY:
        return facts, [Observation("memory", "good", free)]
    return facts, [Observation("memory", "slow", free, "--spill FOLDER keeps large tensors of a run in files")]


def disk(cache: Path) -> tuple[dict[str, Any], list[Observation]]:
    """(Facts, findings) about the folder of caches, that of temporary files, and the working directory."""
    places = {"caches": cache, "temporary files": Path(tempfile.gettempdir()), "working directory": Path.cwd()}
    facts = {name: {"path": str(path), "free": free_bytes(path)} for name, path in places.items()}
    findings = []
    for name, path in places.items():
        free, there = free_bytes(path), existing(path)
        advice = "COMPRESS_CACHE_DIR names another place" if name == "caches" else "TMPDIR names another place"
        advice = "write with --output elsewhere" if name == "working directory" else advice
        if not os.access(there, os.W_OK):
            findings.append(Observation("disk", "slow", f"{name}: {path} cannot be written", advice))
        elif free is not None and free < LITTLE_DISK:
            findings.append(Observation("disk", "slow", f"{name}: {path} has {free / GIB:.1f} GiB left", advice))
    return facts, findings or [Observation("disk", "good", "caches, temporary files and this folder can be written")]


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def free_bytes(path: Path) -> int | None:
    """Bytes free where a path is, or would be made; None where the system does not say."""
    try:
        return shutil.disk_usage(existing(path)).free
    except OSError:
        return None
