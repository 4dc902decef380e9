"""Kernels that come compiled with the package: which library fits a machine, and when one is left alone."""

import json
import subprocess
from pathlib import Path

import pytest

from compress.kernels.cpu import prebuilding, prebuilt, processor
from compress.kernels.cpu.compiled_libraries import sha256_of

FLAGS = prebuilt.LEVELS["avx512"].needs


@pytest.fixture
def folder(tmp_path):
    """Stands for the libraries of a wheel: files whose content is no library."""
    found = tmp_path / "prebuilt"
    found.mkdir()
    for level in prebuilt.LEVELS:
        for name in ("gemm", *prebuilt.CALL_TORCH):
            (found / prebuilt.file_of(name, level)).write_bytes(name.encode())
    tell(found)
    return found


def tell(folder: Path, **changed: str) -> None:
    about = {"sources": prebuilt.hash_of_sources(), "torch": prebuilt.torch_version()}
    checksums = {path.name: sha256_of(path) for path in folder.glob("*.so")}
    text = json.dumps({**about, "sha256": checksums, **changed})
    (folder / prebuilt.ABOUT).write_text(text, encoding="utf-8")
    prebuilt._told.cache_clear()
    prebuilt._checked.cache_clear()


def test_the_best_level_of_a_processor_is_taken_unless_another_is_asked_for():
    assert prebuilt.level_of("native", FLAGS | {"avx512_bf16", "avx_vnni"}) == "avx512-bf16"
    assert prebuilt.level_of("native", FLAGS | {"avx_vnni"}) == "avx512"
    assert prebuilt.level_of("native", FLAGS - {"avx512_vnni"}) == "avx2"
    assert prebuilt.level_of("avx2", FLAGS) == "avx2"
    assert prebuilt.level_of("avx2-vnni", FLAGS) is None
    assert prebuilt.level_of("native", frozenset()) is None
    assert set(processor.X86) - {"native"} <= set(prebuilt.LEVELS)


def test_libraries_are_found_by_name_and_none_where_the_package_brings_none(folder, tmp_path):
    where = ("native", FLAGS, folder)
    assert prebuilt.path_of("gemm", *where) == prebuilt.path_of("columns", *where) == folder / "avx512.so"
    assert prebuilt.path_of("operators", *where) == folder / "avx512-operators.so"
    assert prebuilt.path_of("spill", *where) is None
    assert prebuilt.path_of("gemm", "native", frozenset(), folder) is None
    assert prebuilt.path_of("gemm", "native", FLAGS, tmp_path) is None


@pytest.mark.parametrize("damage", ["changed", "missing", "sources", "writable"])
def test_a_library_that_cannot_be_trusted_is_left_alone(folder, notes, damage):
    path = folder / "avx512.so"
    if damage == "changed":
        path.write_bytes(b"other")
    elif damage == "missing":
        path.unlink()
    elif damage == "sources":
        tell(folder, sources="0")
    else:
        path.chmod(0o666)
    prebuilt._checked.cache_clear()
    assert prebuilt.path_of("gemm", "native", FLAGS, folder) is None
    (note,) = notes()
    assert note.startswith(f"{path}: ")
    assert note.endswith("; the kernels are compiled here")


def test_operators_are_for_one_version_of_torch_and_kernels_can_be_compiled_all_the_same(folder, notes, monkeypatch):
    tell(folder, torch="2.0")
    assert prebuilt.path_of("operators", "native", FLAGS, folder) is None
    assert prebuilt.path_of("gemm", "native", FLAGS, folder) is not None
    monkeypatch.setenv("COMPRESS_CPU_KERNELS", "compile")
    assert prebuilt.path_of("gemm", "native", FLAGS, folder) is None
    assert notes() == []


def test_a_library_that_does_not_load_is_compiled_instead(folder, notes, monkeypatch):
    monkeypatch.setattr(prebuilt, "path_of", lambda *_: folder / "avx512.so")
    assert prebuilt.load("gemm", "native", FLAGS) is None
    assert "avx512.so cannot be loaded" in notes()[0]


def test_a_library_that_would_not_run_elsewhere_is_not_shipped(tmp_path, monkeypatch):
    try:
        compiler = prebuilding.gnu_compiler()
    except SystemExit as reason:
        pytest.skip(str(reason))

    def reason_of(body: str) -> str | None:
        source, made = tmp_path / "some.cpp", tmp_path / "some.so"
        source.write_text(body)
        subprocess.run([*compiler, "-shared", "-fPIC", source, "-o", made], check=True)
        return prebuilding.why_not_elsewhere(made)

    uses_memory = "#include <cstdlib>\nvoid* f() { return aligned_alloc(64, 64); }\n"
    assert reason_of(uses_memory) is None
    monkeypatch.setitem(prebuilding.NEWEST, "GLIBC", (2, 15))
    assert reason_of(uses_memory) == "needs GLIBC_2.16; allowed: up to 2.15"
    assert "OpenMP" in reason_of('extern "C" void __kmpc_barrier();\nvoid f() { __kmpc_barrier(); }\n')
