"""Makes the libraries of `prebuilt.py`: `python -m compress.kernels.cpu.prebuilding FOLDER`, with g++.

They are linked to the C library and libstdc++ at old versions, and to no OpenMP runtime: torch has loaded its own with
global symbols, so there is one pool of threads.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from compress.kernels.cpu.build import FLAGS, compilers, torch_of
from compress.kernels.cpu.compiled_libraries import sha256_of
from compress.kernels.cpu.compiling import jobs, run_all
from compress.kernels.cpu.libraries import LIBRARIES, units
from compress.kernels.cpu.prebuilt import (
    ABOUT,
    CALL_TORCH,
    LEVELS,
    WHOLE,
    Level,
    file_of,
    hash_of_sources,
    torch_version,
)

# The C library of manylinux_2_28, which torch's own wheels are for. Messages of operators take the libstdc++ of g++ 9;
# where that of the system is older, the operators do not load, and are compiled there.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 26), "CXXABI": (1, 3, 11)}
# Since 2.32 the C library says whether a process has one thread. Ours do not ask.
NOT_ASKED = 'extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'
VERSIONED = re.compile(r"\b(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)")
OTHER_OPENMP = "__kmpc_"


def main(folder: Path) -> None:
    """Make all libraries in a folder. Raises SystemExit where they would not run elsewhere."""
    compiler = gnu_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with tempfile.TemporaryDirectory() as scratch:
        for level, instructions in LEVELS.items():
            files += [level_file := file_of("gemm", level)]
            _make_level(compiler, instructions, folder / level_file, Path(scratch))
            for name in CALL_TORCH:
                files += [file := file_of(name, level)]
                _make_for_torch(compiler, instructions, name, folder / file, Path(scratch))
    for name in files:
        if reason := why_not_elsewhere(folder / name):
            raise SystemExit(f"{name}: {reason}")
    about = {"sources": hash_of_sources(), "torch": torch_version()}
    checksums = {name: sha256_of(folder / name) for name in files}
    (folder / ABOUT).write_text(json.dumps({**about, "sha256": checksums}, indent=1) + "\n", encoding="utf-8")


def gnu_compiler() -> list[str]:
    """The first compiler that is g++: others take an OpenMP runtime that torch does not bring."""
    for command in compilers():
        (said,) = run_all([[*command, "--version"]], 1)
        if "Free Software Foundation" in said:
            return command
    raise SystemExit("no g++: CXX=... names one")


def _make_level(compiler: list[str], level: Level, path: Path, scratch: Path) -> None:
    parts = [unit for name in WHOLE if level.pairs or not LIBRARIES[name].pairs for unit in units(name)]
    objects = [str(scratch / f"{number}.o") for number in range(len(parts))]
    flags = [*FLAGS, *level.flags]
    commands = [
        [*compiler, *flags, *unit.defined, "-c", str(unit.source), "-o", made]
        for unit, made in zip(parts, objects, strict=True)
    ]
    print(f"{path.name}: {len(parts)} units", file=sys.stderr)
    run_all(commands, jobs())
    run_all([[*compiler, "-shared", "-Wl,-s", *objects, "-o", str(path)]], 1)


def _make_for_torch(compiler: list[str], level: Level, name: str, path: Path, scratch: Path) -> None:
    (unit,) = units(name)
    (extra := scratch / "not_asked.cpp").write_text(NOT_ASKED, encoding="utf-8")
    words = torch_of(name)
    includes = [word for word in words if word.startswith(("-I", "-D"))]
    made = {source: str(scratch / f"{source.stem}.o") for source in (unit.source, extra)}
    flags = [*FLAGS, *level.flags, *includes]
    run_all([[*compiler, *flags, "-c", str(source), "-o", to] for source, to in made.items()], jobs())
    libraries = [word for word in words if word not in includes]
    run_all([[*compiler, "-shared", "-Wl,-s", *made.values(), *libraries, "-o", str(path)]], 1)


def why_not_elsewhere(path: Path) -> str | None:
    """The reason why a library needs a newer system than torch does; None where it does not."""
    symbols = subprocess.run(["objdump", "-T", str(path)], capture_output=True, text=True, check=True).stdout
    if OTHER_OPENMP in symbols:
        return "calls an OpenMP runtime that torch does not bring"
    for kind, version in VERSIONED.findall(symbols):
        if tuple(map(int, version.split("."))) > NEWEST[kind]:
            return f"needs {kind}_{version}; allowed: up to {'.'.join(map(str, NEWEST[kind]))}"
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
