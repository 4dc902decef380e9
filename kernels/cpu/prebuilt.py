"""CPU kernels that a wheel brings, compiled when it was made (`make wheels`): no compiler is needed for them.

    prebuilt/LEVEL.so         libraries of `libraries.py` in one, for processors with these instructions
    prebuilt/LEVEL-NAME.so    one that calls torch by its C interface, for one minor version of it
    prebuilt/about.json       {"sources": hash, "torch": version, "sha256": {file: checksum}}

One is used if its checksum is right, nobody else could have changed it, and the sources beside it are those that it was
made of. Otherwise kernels are compiled on this machine, and a note says why. They are written with intrinsics,
so that none is compiled for the very processor beside them.
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from compress.kernels.cpu.compiled_libraries import sha256_of
from compress.kernels.cpu.libraries import HERE, LIBRARIES, LINKED_TO_TORCH, sources
from compress.kernels.notes import note_once
from compress.kernels.private_folders import why_not_ours

FOLDER = HERE / "prebuilt"
ABOUT = "about.json"
# The libraries that one of a level holds; those that call torch by its C interface. `spill` takes that of C++.
WHOLE = tuple(name for name in LIBRARIES if name not in LINKED_TO_TORCH)
CALL_TORCH = ("operators", "dense")


class Level(NamedTuple):
    """Instructions of processors: the flags that Linux names them by, and those of a compiler."""

    needs: frozenset[str]
    flags: tuple[str, ...]
    pairs: bool = False


_V3 = frozenset({"avx2", "fma", "f16c"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "bmi1", "bmi2", "abm", "movbe"}
_V3_FLAGS, _V4_FLAGS = ("-mavx2", "-mfma", "-mf16c"), ("-march=x86-64-v4", "-mavx512vnni")
# Best first.
LEVELS = {
    "avx512-bf16": Level(_V4 | {"avx512_bf16"}, (*_V4_FLAGS, "-mavx512bf16"), pairs=True),
    "avx512": Level(_V4, _V4_FLAGS),
    "avx2-vnni": Level(_V3 | {"avx_vnni"}, (*_V3_FLAGS, "-mavxvnni")),
    "avx2": Level(_V3, _V3_FLAGS),
}


def level_of(target: str, cpu_flags: frozenset[str]) -> str | None:
    """The best level of a processor; a target other than `native` names one itself."""
    names = LEVELS if target == "native" else [name for name in LEVELS if name == target]
    return next((name for name in names if LEVELS[name].needs <= cpu_flags), None)


def load(name: str, target: str, cpu_flags: frozenset[str]) -> ctypes.CDLL | None:
    """The library that came with the package and holds that of this name; None where none fits."""
    path = path_of(name, target, cpu_flags)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        note_once(f"{path} cannot be loaded ({error}): the kernels are compiled here")
        return None


def path_of(name: str, target: str, cpu_flags: frozenset[str], folder: Path = FOLDER) -> Path | None:
    """The file of this library; None where none came, fits or can be trusted."""
    manifest = _told(folder)
    level = level_of(target, cpu_flags)
    if not manifest or level is None or os.environ.get("COMPRESS_CPU_KERNELS") == "compile":
        return None
    if name not in WHOLE and (name not in CALL_TORCH or manifest.get("torch") != torch_version()):
        return None
    path = folder / file_of(name, level)
    reason = _why_not(path, manifest)
    if reason is not None:
        note_once(f"{path}: {reason}; the kernels are compiled here")
        return None
    return path


def file_of(name: str, level: str) -> str:
    """The name of the file that holds a library."""
    return f"{level}-{name}.so" if name in CALL_TORCH else f"{level}.so"


def torch_version() -> str:
    """The minor version of torch."""
    return ".".join(torch.__version__.split(".")[:2])


@cache
def hash_of_sources() -> str:
    """A hash of everything that the libraries are made of."""
    return _hash({source for name in (*WHOLE, *CALL_TORCH) for source in sources(name)})


def _hash(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()


@cache
def _told(folder: Path) -> dict[str, object]:
    try:
        told = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


@cache
def _checked(path: Path) -> str:
    return sha256_of(path)


def _why_not(path: Path, told: dict[str, object]) -> str | None:
    """The reason why a library is not to be used; None where there is none."""
    checksums = told.get("sha256")
    if not path.exists() or not isinstance(checksums, dict) or path.name not in checksums:
        return "is not there"
    if told.get("sources") != hash_of_sources():
        return "was made of other sources than those beside it"
    if _checked(path) != checksums[path.name]:
        return "is not as it was made (another checksum)"
    return why_not_ours(path)
