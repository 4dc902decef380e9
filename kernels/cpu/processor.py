"""The processor at hand: its instructions, and what kernels are compiled for.

On x86_64 (Linux) the compiler knows what `native` is. On 64-bit ARM (Linux, and macOS on Apple silicon) it is the last
target whose instructions the processor has.
"""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from compress.kernels.errors import InputError


class Target(NamedTuple):
    """A kind of processor that libraries are compiled for: flags of the compiler, and the instructions that they use,
    by the names that Linux has for them."""

    flags: tuple[str, ...]
    needs: tuple[str, ...]


AMX_SETTING = "COMPRESS_CPU_AMX"
NATIVE, VNNI = "native", "avx_vnni"
_AVX2, _NEEDED = ("-mavx2", "-mfma", "-mf16c"), ("avx2", "fma", "f16c")
X86 = {
    NATIVE: Target(("-march=native",), _NEEDED),
    "avx2": Target(_AVX2, _NEEDED),
    "avx2-vnni": Target((*_AVX2, "-mavxvnni"), (*_NEEDED, VNNI)),
}
# From least to most: what every such processor has; dot products of bytes (Apple M1, Graviton2); products of tiles of
# bytes and of pairs of bfloat16 (Apple M2, Graviton3).
ARM = {
    "neon": Target(("-march=armv8-a",), ("asimd",)),
    "neon-dotprod": Target(("-march=armv8.2-a+dotprod",), ("asimd", "asimddp")),
    "neon-i8mm": Target(("-march=armv8.2-a+dotprod+i8mm+bf16",), ("asimd", "asimddp", "i8mm", "bf16")),
}
MACHINES = {("Linux", "x86_64"): X86, ("Linux", "aarch64"): ARM, ("Darwin", "arm64"): ARM}
MOST_OF_ARM = "neon-i8mm"
# Apple's names (https://developer.apple.com/documentation/kernel/1387446-sysctlbyname/determining_instruction_set_
# characteristics): every Apple silicon has NEON.
APPLE = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16"}


def machine() -> tuple[str, str]:
    """System and architecture."""
    return platform.system(), platform.machine()


def targets() -> dict[str, Target]:
    """The targets of this machine; empty where kernels are not written for it."""
    return MACHINES.get(machine(), {})


def target() -> str:
    """The target that COMPRESS_CPU names; the best of this processor where it is not set, or `native`. Raises
    InputError for one that is not allowed."""
    asked, here = os.environ.get("COMPRESS_CPU") or NATIVE, targets() or X86
    if asked not in (NATIVE, *here):
        allowed = ", ".join(dict.fromkeys((NATIVE, *here)))
        raise InputError(f"COMPRESS_CPU={asked}; allowed: {allowed}, or leave it out for {NATIVE}")
    if asked in here:
        return asked
    usable = [name for name, each in here.items() if cpu_flags().issuperset(each.needs)]
    return usable[-1] if usable else next(iter(here))


def amx_allowed() -> bool:
    """False where COMPRESS_CPU_AMX=0 leaves the tiles of AMX to torch. Raises InputError for a value that is not
    allowed."""
    asked = os.environ.get(AMX_SETTING) or "1"
    if asked not in ("0", "1"):
        raise InputError(f"{AMX_SETTING}={asked}; allowed: 0, 1, or leave it out to use AMX where the processor has it")
    return asked == "1"


def flags_of(name: str) -> tuple[str, ...]:
    """The compiler's flags for a target, of this machine or of another."""
    return {**X86, **ARM}[name].flags


def why_not() -> tuple[str, ...]:
    """Reasons why nothing can be compiled for COMPRESS_CPU on this machine; empty when it can be."""
    here = targets()
    if not here:
        known = ", ".join(f"{system} on {architecture}" for system, architecture in MACHINES)
        return (f"the CPU kernels are written for {known}; this is {' on '.join(machine())}",)
    missing = [flag for flag in here[target()].needs if flag not in cpu_flags()]
    return (f"the CPU has no {', '.join(missing)}",) if missing else ()


def cpu_flags() -> frozenset[str]:
    """The processor's instructions, as Linux names them; empty where the system names none."""
    return _apple_flags() if machine() == ("Darwin", "arm64") else _linux_flags()


def _linux_flags() -> frozenset[str]:
    lines = _cpuinfo()
    named = next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(named.split())


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


@cache
def _apple_flags() -> frozenset[str]:
    has = dict(line.rsplit(": ", 1) for line in _sysctl("hw.optional.arm") if ": " in line)
    return frozenset({"asimd"} | {flag for name, flag in APPLE.items() if has.get(f"hw.optional.arm.{name}") == "1"})


def _sysctl(*words: str) -> list[str]:
    try:
        done = subprocess.run(["sysctl", *words], capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return []
    return done.stdout.splitlines()


def cpu_name() -> str:
    """The model of this machine's processor; of an ARM processor that Linux has no name for, its maker's numbers."""
    if machine()[0] == "Darwin":
        return next(iter(_sysctl("-n", "machdep.cpu.brand_string")), "cpu")
    fields: dict[str, str] = {}
    for line in _cpuinfo():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if "model name" in fields or "CPU part" not in fields:
        return fields.get("model name", "cpu")
    return f"ARM processor (implementer {fields.get('CPU implementer')}, part {fields['CPU part']})"


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
