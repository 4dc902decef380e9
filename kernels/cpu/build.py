"""Builds a library for the processor it finds, once, and loads it: `cpu_gemm.cpp`, `cpu_columns.cpp`, or the operators
of `cpu_operators.cpp`, which are linked to torch.

Nothing here raises, but for a COMPRESS_CPU that there is not: `why_not` says why not.

The library lies in the cache directory under a name that is a hash of everything it depends on: sources, flags,
compiler and processor (a home directory may be shared by machines that differ). A process compiles to a name of its
own and renames the result, so that several may build at the same time.

    COMPRESS_CPU_KERNELS=0     build nothing and use torch's products
    COMPRESS_CPU=avx2          build for a processor that has no more than AVX2; avx2-vnni: and dot products of bytes
                               beside it; otherwise native, for this one
    COMPRESS_CACHE_DIR         where the library lies; otherwise $XDG_CACHE_HOME/compress, ~/.cache/compress
    CXX                        the compiler that is tried first
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from compress.errors import InputError
from compress.kernels.cache import cache_directory

NUMBERS = ("numbers", "vectors")
# What each library includes.
HEADERS: dict[str, tuple[str, ...]] = {
    "gemm": ("attention", "floats", "ints", "tiles", "sparse", "sparse24", "strips", "work", *NUMBERS),
    "columns": NUMBERS,
    "operators": ("attention", "work", *NUMBERS),
}
COMPILERS = ("c++", "g++", "clang++")
# Loops are unrolled by templates and written with intrinsics: higher levels take longer and gain nothing. Contraction
# into fused multiply-adds would round differently from the reference.
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-w")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
TARGETS = {"native": ("-march=native",), "avx2": AVX2, "avx2-vnni": (*AVX2, "-mavxvnni")}
NEEDED = ("avx2", "fma", "f16c")
VNNI = "avx_vnni"
BUILD_SECONDS = 300


def why_not(name: str = "gemm") -> tuple[str, ...]:
    """Reasons why there is no such library on this machine; empty when there is. The first call builds."""
    return _loaded(name)[1]


def library(name: str = "gemm") -> ctypes.CDLL:
    """A library of `HEADERS`, by its name; only where `why_not` is empty."""
    found, reasons = _loaded(name)
    assert found is not None, reasons
    return found


@cache
def _loaded(name: str) -> tuple[ctypes.CDLL | None, tuple[str, ...]]:
    reasons = machine_reasons()
    if reasons:
        return None, reasons
    return build_and_load(cache_directory(), flags_for(target()), name)


def sources(name: str) -> list[Path]:
    """What a library is made of, first what a compiler is given."""
    files = (f"cpu_{name}.cpp", *(f"cpu_{header}.h" for header in HEADERS[name]))
    return [Path(__file__).resolve().with_name(file) for file in files]


def target() -> str:
    """What COMPRESS_CPU asks for. Raises InputError for what there is not."""
    asked = os.environ.get("COMPRESS_CPU") or "native"
    if asked not in TARGETS:
        raise InputError(f"COMPRESS_CPU={asked}; allowed: {', '.join(TARGETS)}, or leave it out for native")
    return asked


def flags_for(name: str) -> tuple[str, ...]:
    """What a compiler is told to build for a name of `TARGETS`."""
    return (*FLAGS, *TARGETS[name])


def machine_reasons() -> tuple[str, ...]:
    """What speaks against building here, before a compiler is asked."""
    if os.environ.get("COMPRESS_CPU_KERNELS") == "0":
        return ("COMPRESS_CPU_KERNELS=0 turns the compiled CPU kernels off",)
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        return (f"the CPU kernels are written for Linux on x86_64; this is {system} on {machine}",)
    needed = (*NEEDED, VNNI) if target() == "avx2-vnni" else NEEDED
    missing = [flag for flag in needed if flag not in cpu_flags()]
    return (f"the CPU has no {', '.join(missing)}",) if missing else ()


def cpu_flags() -> frozenset[str]:
    """What the processor can do, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def compilers() -> list[list[str]]:
    """Commands to try, in order: each is there, none twice."""
    found: dict[str, list[str]] = {}
    for command in (os.environ.get("CXX", ""), *COMPILERS):
        words = shlex.split(command)
        path = shutil.which(words[0]) if words else None
        if path is not None:
            found.setdefault(os.path.realpath(path), words)
    return list(found.values())


def openmp_of_torch() -> list[str]:
    """The OpenMP runtime that torch brings and has loaded: linked to it, there is one pool of threads, not two."""
    home = Path(torch.__file__).parent
    for folder in (home / "lib", home.with_name("torch.libs")):
        libraries = sorted(folder.glob("libgomp*.so*"))
        if libraries:
            return ["-Wl,--as-needed", str(libraries[0])]
    return []


def torch_of(name: str) -> list[str]:
    """What a library that is linked to torch is compiled with."""
    home = Path(torch.__file__).parent
    if name != "operators":
        return []
    return [f"-I{home / 'include'}", str(home / "lib" / "libtorch_cpu.so"), f'-DTORCH="{torch.__version__}"']


def build_and_load(
    directory: Path, flags: tuple[str, ...], name: str = "gemm"
) -> tuple[ctypes.CDLL | None, tuple[str, ...]]:
    """The library, from the directory or from the first compiler that can build it; or None and why none could."""
    commands = compilers()
    if not commands:
        return None, (f"no C++ compiler: none of $CXX, {', '.join(COMPILERS)} was found",)
    reasons = []
    for command in commands:
        try:
            library = ctypes.CDLL(str(built(directory, command, flags, name)))
            if name == "gemm":
                library.instructions.restype = ctypes.c_char_p
            return library, ()
        except subprocess.TimeoutExpired:
            reasons.append(f"{shlex.join(command)} took more than {BUILD_SECONDS} s")
        except subprocess.CalledProcessError as failed:
            reasons.append(f"{shlex.join(command)} failed: {first_error(failed.stderr)}")
        except OSError as error:
            reasons.append(f"{shlex.join(command)}: {error}")
    return None, tuple(reasons)


def built(directory: Path, command: list[str], flags: tuple[str, ...], name: str = "gemm") -> Path:
    """The path of the library that this compiler makes, compiled unless it is there already."""
    linked = [*openmp_of_torch(), *torch_of(name)]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=BUILD_SECONDS)
    files = sources(name)
    depends = [*(source.read_text(encoding="utf-8") for source in files), *command, *flags, *linked]
    depends += [version.stdout, *sorted(cpu_flags())]
    key = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:20]
    target = directory / f"cpu_{name}-{key}.so"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as folder:
            made = Path(folder) / target.name
            words = [*command, *flags, str(files[0]), *linked, "-o", str(made)]
            subprocess.run(words, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS)
            made.replace(target)
    return target


def first_error(output: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
