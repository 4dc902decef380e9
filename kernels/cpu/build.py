"""Builds the libraries of `libraries.py` for the processor at hand, each once, and loads them. A part of the products
is built when a call first needs it: `gemm` asks for it.

Nothing here raises, except for an unknown value of COMPRESS_CPU: `why_not` returns the reasons against a library. A
build, or the reason why there is none, is logged once (`compress.kernels.notes`).

The library lies in a private folder of the cache directory (`compress.kernels.private_folders`) under a name that is a
hash of everything it depends on: sources, flags, compiler and processor (a home directory may be shared by machines
that differ). `compiled_libraries.py` has its checksum, or why it could not be built, which is not tried again until one
of these changes.

    COMPRESS_CPU_KERNELS=0     build nothing and use torch's products; retry: build again what could not be built;
                               compile: build what a wheel brought compiled, too (`prebuilt.py`)
    COMPRESS_CPU=NAME          build for a processor that has no more than AVX2 (avx2), AVX2 and dot products of bytes
                               (avx2-vnni), or on ARM NEON (neon), dot products of bytes (neon-dotprod), products of
                               tiles of bytes and pairs of bfloat16 (neon-i8mm); otherwise native, for this one
    COMPRESS_CACHE_DIR         where the folder lies; otherwise $XDG_CACHE_HOME/compress, ~/.cache/compress
    CXX                        the compiler that is tried first
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from compress.kernels.cpu import compiled_libraries, prebuilt, processor
from compress.kernels.cpu.compiling import CompileError, jobs, run_all
from compress.kernels.cpu.libraries import LIBRARIES, LINKED_TO_TORCH, OF_LINUX, sources, units
from compress.kernels.cpu.processor import cpu_flags, target
from compress.kernels.errors import CompressError
from compress.kernels.notes import note_once
from compress.kernels.private_folders import candidates, make_private, why_not_private

COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = f"no C++ compiler: none of $CXX, {', '.join(COMPILERS)} was found"
# Loops are unrolled by templates and written with intrinsics: higher levels take longer and gain nothing. Contraction
# into fused multiply-adds would round differently from the reference.
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fopenmp", "-fPIC", "-w")
OPENMP = "-fopenmp"
PAIRS = (frozenset({"avx512_bf16"}), frozenset({"bf16", "i8mm"}))  # of processors that multiply pairs of bfloat16
PRIVATE_FOLDER = "kernels"
STILL_COMPILING_SECONDS = 60.0
NO_MEMORY, NO_PART = 1, 2  # as in cpu_gemm.cpp


def why_not(name: str = "gemm") -> tuple[str, ...]:
    """Reasons why there is no such library on this machine; empty when there is. The first call builds."""
    return _loaded(name)[1]


def library(name: str = "gemm") -> ctypes.CDLL:
    """A library of `LIBRARIES`, by its name; only where `why_not` is empty."""
    found, reasons = _loaded(name)
    assert found is not None, reasons
    return found


@cache
def _loaded(name: str) -> tuple[ctypes.CDLL | None, tuple[str, ...]]:
    reasons = machine_reasons() or _elsewhere(name)
    if reasons:
        return None, reasons
    came = prebuilt.load(name, target(), cpu_flags())
    if came is not None:
        return _ready(came, name), ()
    found, reasons = load_from_a_place(name)
    if found is None and name in LINKED_TO_TORCH and not why_not():
        note_once(f"not compiled: {LIBRARIES[name].about} ({'; '.join(reasons)}); other kernels do without, slower")
    elif found is None:
        note_once(f"no compiled kernels: {'; '.join(reasons)}; torch computes instead, which is slower")
    return found, reasons


def build_all(names: Iterable[str]) -> None:
    """Build and load libraries, several at a time."""
    with ThreadPoolExecutor(jobs()) as pool:
        list(pool.map(why_not, names))


def names_here() -> list[str]:
    """The libraries of use to this processor, and to COMPRESS_CPU."""
    pairs = target() in (processor.NATIVE, processor.MOST_OF_ARM) and any(flags <= cpu_flags() for flags in PAIRS)
    return [name for name, made in LIBRARIES.items() if (pairs or not made.pairs) and not _elsewhere(name)]


def load_from_a_place(name: str, flags: tuple[str, ...] | None = None) -> tuple[ctypes.CDLL | None, tuple[str, ...]]:
    """A library, from the first folder that only this user can write to; or None and the reasons. flags: for another
    processor than COMPRESS_CPU says."""
    refused: list[str] = []
    for folder in candidates(PRIVATE_FOLDER):
        try:
            make_private(folder)
            reason = why_not_private(folder)
        except OSError as error:
            reason = f"{folder}: {error.strerror}"
        if reason is not None:
            refused.append(reason)
            continue
        if refused:
            note_once(f"{'; '.join(refused)}: compiled kernels lie in {folder} instead")
        found, reasons = build_and_load(folder, flags or flags_for(target()), name)
        if found is not None or os.access(folder, os.W_OK):
            if found is not None and name == "gemm":
                _give_parts(found, flags)
            return found, reasons
        refused.extend(reasons)
    return None, tuple(refused)


# Of a part, its function; 0 where there is none.
ASK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
# Answers that libraries of products call, which must live as long, and the reasons against parts that were asked for.
_answers: list[object] = []
_lacking: dict[str, tuple[str, ...]] = {}


def _give_parts(gemm: ctypes.CDLL, flags: tuple[str, ...] | None) -> None:
    """Let the products find parts that they lack."""

    def give(asked: bytes) -> int | None:
        name = asked.decode()
        try:
            part, _lacking[name] = load_from_a_place(name, flags)
        except KeyboardInterrupt:  # which cannot pass through C++: `raise_for` raises it again
            return None
        return None if part is None else ctypes.cast(getattr(part, name), ctypes.c_void_p).value

    _answers.append(answer := ASK(give))
    gemm.ask_for_parts(answer)


def raise_for(outcome: int, no_memory: str) -> None:
    """Raise what a product returned that did not succeed: MemoryError with these words, CompressError where a part
    cannot be built, KeyboardInterrupt where its build was interrupted."""
    if outcome == NO_MEMORY:
        raise MemoryError(no_memory)
    said = [f"{LIBRARIES[name].about}: {'; '.join(reasons)}" for name, reasons in _lacking.items() if reasons]
    if not said:
        raise KeyboardInterrupt
    without = "COMPRESS_CPU_KERNELS=0 computes without compiled kernels"
    raise CompressError(f"kernels that cannot be compiled: {', '.join(said)} ({without})")


def flags_for(name: str) -> tuple[str, ...]:
    """The compiler's flags for a target (`processor.targets`). Where clang comes without OpenMP, on macOS, loops have
    threads of their own (cpu_threads.h)."""
    return (*(flag for flag in FLAGS if flag != OPENMP or not on_macos()), *processor.flags_of(name))


def on_macos() -> bool:
    """True on macOS."""
    return processor.machine()[0] == "Darwin"


def machine_reasons() -> tuple[str, ...]:
    """Reasons against building on this machine that need no compiler to find; empty when there are none."""
    if os.environ.get("COMPRESS_CPU_KERNELS") == "0":
        return ("COMPRESS_CPU_KERNELS=0 turns the compiled CPU kernels off",)
    return processor.why_not()


def _elsewhere(name: str) -> tuple[str, ...]:
    return (f"{LIBRARIES[name].about}: only on Linux",) if name in OF_LINUX and on_macos() else ()


def compilers() -> list[list[str]]:
    """Commands to try, in order: all of them exist, none occurs twice."""
    commands: dict[str, list[str]] = {}
    for command in (os.environ.get("CXX", ""), *COMPILERS):
        words = shlex.split(command)
        path = shutil.which(words[0]) if words else None
        if path is not None:
            commands.setdefault(os.path.realpath(path), words)
    return list(commands.values())


def openmp_of_torch() -> list[str]:
    """The OpenMP runtime that torch brings and has loaded: linked to it, there is one pool of threads, not two."""
    home = Path(torch.__file__).parent
    for folder in (home / "lib", home.with_name("torch.libs")):
        libraries = sorted(folder.glob("libgomp*.so*"))
        if libraries:
            return ["-Wl,--as-needed", str(libraries[0])]
    return []


def torch_of(name: str) -> list[str]:
    """The compiler's arguments for linking to torch; none for libraries that are not linked to it."""
    home = Path(torch.__file__).parent
    if name not in LINKED_TO_TORCH:
        return []
    ending, found = ("dylib", (f"-Wl,-rpath,{home / 'lib'}",)) if on_macos() else ("so", ())
    linked = [str(home / "lib" / f"lib{library}.{ending}") for library in LINKED_TO_TORCH[name]]
    return [f"-I{home / 'include'}", *linked, *found, f'-DTORCH="{torch.__version__}"']


def build_and_load(
    directory: Path, flags: tuple[str, ...], name: str = "gemm"
) -> tuple[ctypes.CDLL | None, tuple[str, ...]]:
    """The library, from the directory or from the first compiler that can build it; or None and why none could."""
    commands = compilers()
    if not commands:
        return None, (NO_COMPILER,)
    reasons = []
    for command in commands:
        try:
            return _load(built(directory, command, flags, name), name), ()
        except CompileError as failed:
            reasons.append(str(failed))
        except OSError as error:
            reasons.append(f"{shlex.join(command)}: {error}")
    return None, tuple(reasons)


def _load(path: Path, name: str) -> ctypes.CDLL:
    """Load a library and keep it. Raises CompileError where it cannot be loaded, and records that."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        compiled_libraries.keep_failure(path, f"{path.name} cannot be loaded: {error}")
        raise CompileError(f"{path.name} cannot be loaded: {error}") from None
    return _ready(library, name)


def _ready(library: ctypes.CDLL, name: str) -> ctypes.CDLL:
    if name == "gemm":
        library.instructions.restype = ctypes.c_char_p
    return library


def built(directory: Path, command: list[str], flags: tuple[str, ...], name: str = "gemm") -> Path:
    """The path of the library that this compiler makes, compiled unless it is there already. Raises CompileError where
    it cannot be made, now or at an earlier try."""
    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(directory, command, flags, name)
    if compiled_libraries.is_whole(path):
        return path
    waiting = "another process compiles kernels for this CPU: waiting for it"
    with compiled_libraries.locked(path.with_suffix(".lock"), lambda: note_once(waiting)) as beat:
        if compiled_libraries.is_whole(path):
            return path
        earlier = compiled_libraries.failure(path)
        if earlier is not None and os.environ.get("COMPRESS_CPU_KERNELS") != "retry":
            raise CompileError(earlier)
        about, seconds = LIBRARIES[name].about, LIBRARIES[name].seconds
        note_once(f"compiling for this CPU, once: {about} (about {seconds} s)", logging.INFO)
        try:
            with compiled_libraries.scratch(directory) as folder:
                compiled_libraries.keep(_compiled(folder, command, flags, name, beat), path)
        except CompileError as failed:
            if not failed.passes:
                compiled_libraries.keep_failure(path, str(failed))
            raise
    return path


def path_of(directory: Path, command: list[str], flags: tuple[str, ...], name: str) -> Path:
    """The path that a library has, built by this compiler or to be built. Raises CompileError where the compiler does
    not even say its version."""
    return directory / f"cpu_{name}-{_key(command, flags, name)}.so"


def state(name: str) -> str:
    """`prebuilt` for a library that the package brought, `there` for one that is built, `not yet` for one that its
    first use would build, or the reason why it cannot be built. Nothing is built."""
    if prebuilt.path_of(name, target(), cpu_flags()) is not None:
        return "prebuilt"
    commands, reasons = compilers(), []
    if not commands:
        return NO_COMPILER
    for command in commands:
        try:
            paths = [path_of(folder, command, flags_for(target()), name) for folder in candidates(PRIVATE_FOLDER)]
            if any(compiled_libraries.is_whole(path) for path in paths):
                return "there"
            earlier = next(filter(None, map(compiled_libraries.failure, paths)), None)
        except (CompileError, OSError) as failed:
            earlier = f"{shlex.join(command)}: {failed}"
        if earlier is None:
            return "not yet"
        reasons.append(earlier)
    return "; ".join(reasons)


def _key(command: list[str], flags: tuple[str, ...], name: str) -> str:
    """A hash of everything that a library depends on."""
    (version,) = run_all([[*command, "--version"]], 1)
    depends = [source.read_text(encoding="utf-8") for source in sources(name)]
    depends += [f"{unit.source.name} {unit.defined}" for unit in units(name)]
    depends += [*command, *flags, *openmp_of_torch(), *torch_of(name), version, *sorted(cpu_flags())]
    return hashlib.sha256("\0".join(depends).encode()).hexdigest()[:20]


def _compiled(folder: Path, command: list[str], flags: tuple[str, ...], name: str, beat: Callable[[], None]) -> Path:
    """The library in a folder, of units that are compiled side by side."""
    parts, begun = units(name), time.monotonic()
    objects = [str(folder / f"{number}.o") for number in range(len(parts))]
    includes = [word for word in torch_of(name) if word.startswith(("-I", "-D"))]
    commands = [
        [*command, *flags, *unit.defined, *includes, "-c", str(unit.source), "-o", target]
        for unit, target in zip(parts, objects, strict=True)
    ]

    noted = 0

    def on(done: int) -> None:
        nonlocal noted
        with suppress(OSError):
            beat()
        minutes = int((time.monotonic() - begun) // STILL_COMPILING_SECONDS)
        if minutes > noted:
            note_once(f"still compiling kernels after {minutes} min: {done} of {len(parts)} parts are done")
        noted = minutes

    run_all(commands, jobs(), on)
    linked = folder / "linked.so"
    libraries = [word for word in [*openmp_of_torch(), *torch_of(name)] if word not in includes]
    run_all([[*command, *flags, "-shared", *objects, *libraries, "-o", str(linked)]], 1, on)
    return linked
