"""What the doctor says of machines that are described to it, and of this one."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from commands import command
from packaging.requirements import Requirement
from places import ROOT

from compress.api.doctor import computing, machine, packages
from compress.api.doctor.findings import Observation
from compress.cli import examined
from compress.kernels.cpu import build, compiled_libraries, processor
from compress.system import memory

AVX2 = frozenset({"avx2", "fma", "f16c"})
ALL = AVX2 | {"avx512f", "avx512_vnni", "avx512_bf16"}


def words(findings: object) -> str:
    return "\n".join(map(str, findings))


def test_what_a_processor_lacks_is_said_with_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert not list(machine.of_processor(ALL, 8))
    of_avx2 = words(machine.of_processor(AVX2, 8))
    assert all(each in of_avx2 for each in ("no AVX-512", "no VNNI", "no bfloat16"))
    assert "VNNI" not in words(machine.of_processor(AVX2 | {"avx_vnni"}, 8))
    assert words(machine.of_processor(AVX2 - {"fma"}, 8)).startswith("processor: it has no FMA: torch computes")
    assert "names no instructions" in words(machine.of_processor(frozenset(), 8))
    assert "one core" in words(machine.of_processor(ALL, 1))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS=2 of 8 cores" in words(machine.of_processor(ALL, 8))
    assert not list(machine.of_processor(ALL, 2))
    m1 = words(machine.of_processor(frozenset({"asimd", "asimddp"}), 8))
    assert m1.startswith("processor: it has no products of tiles of bytes, products of bfloat16: compiled kernels take")
    assert not list(machine.of_processor(frozenset({"asimd", "asimddp", "i8mm", "bf16"}), 2))


def test_a_package_of_another_version_breaks_and_an_extra_is_only_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.0.0", "numpy": "2.1.0", "gguf": "0.19.0"}
    monkeypatch.setattr(packages, "installed", there.get)
    declared = [Requirement(line) for line in ("torch>=2.11", "numpy>=2", "scipy>=1", 'onnx>=1; extra == "onnx"')]
    found = list(packages.of_base(declared))
    assert [(each.state, each.said) for each in found] == [
        ("broken", "torch 2.0.0 is installed, and >=2.11 needed"),
        ("broken", "scipy is not installed"),
    ]
    assert found[0].advice == "pip install 'torch>=2.11'"
    assert packages.of_extra("onnx", declared).state == "missing"
    assert packages.of_extra("gguf", [Requirement('gguf>=0.19; extra == "gguf"')]).state == "good"
    assert [each.state for each in packages.of_base(declared[1:2])] == ["good"]


def test_every_extra_of_users_is_told() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*project["optional-dependencies"]} - {"dev", "docs", "notebooks", "release"} == {*packages.EXTRAS}


def test_kernels_are_there_or_not_yet_or_cannot_be_built() -> None:
    states = {"gemm": "there", "columns": "not yet", "operators": "c++ failed"}
    failed, waiting = computing.of_kernels((), states)
    assert failed.said == "calls of layers: c++ failed; the other kernels do without, slower"
    assert "1 of 3 not compiled yet (about 1 s" in waiting.said
    assert [each.state for each in computing.of_kernels((), {"gemm": "there"})] == ["good"]
    brought, spill = computing.of_kernels((), {"gemm": "prebuilt", "columns": "prebuilt", "spill": "no compiler"})
    assert brought.said.startswith("2 of 3 prebuilt in the wheel")
    assert spill.said == "tensors on disk: no compiler; --spill needs them"
    (none,) = computing.of_kernels((), dict.fromkeys(("gemm", "columns", "trellis"), "no compiler"))
    assert none.said == "3 libraries: no compiler; torch computes in their place"
    assert words(computing.of_kernels(("no AVX2",), {})) == "kernels: no AVX2: torch computes in their place"


def test_the_state_of_a_library_is_looked_up_and_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "candidates", lambda name: iter([tmp_path / name]))
    if not build.compilers():
        pytest.skip("no C++ compiler")
    assert build.state("columns") == "not yet"
    assert not list(tmp_path.iterdir())
    folder = tmp_path / build.PRIVATE_FOLDER
    folder.mkdir(mode=0o700)
    for compiler in build.compilers():
        path = build.path_of(folder, compiler, build.flags_for(processor.target()), "columns")
        compiled_libraries.keep_failure(path, "it was tired")
    assert "it was tired (on " in build.state("columns")
    made = tmp_path / "made"
    made.write_bytes(b"a library")
    compiled_libraries.keep(made, path)
    assert build.state("columns") == "there"
    monkeypatch.setattr(build, "compilers", list)
    assert build.state("columns").startswith("no C++ compiler")


def test_a_gpu_that_does_not_compute_is_broken_and_an_old_one_slow() -> None:
    old = {"name": "T4", "bytes": 16 * 2**30, "capability": [7, 5]}
    found = list(computing.with_gpu([old], ["cuda:1 does not compute (out of memory)"]))
    assert [each.state for each in found] == ["broken", "good", "slow"]
    assert "multiplies no float8" in found[2].said
    assert [each.state for each in computing.with_gpu([{**old, "capability": [9, 0]}], [])] == ["good"]


@pytest.mark.parametrize(("cuda", "state"), [(None, "slow"), ("13.0", "broken")])
def test_a_gpu_that_torch_cannot_use_is_told_from_none(
    cuda: str | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "NVIDIA", tmp_path)
    assert [each.state for each in computing.without_gpu(cuda)] == [state]
    monkeypatch.setattr(computing, "NVIDIA", tmp_path / "none")
    assert "everything runs on the CPU" in words(computing.without_gpu(cuda))


def test_a_container_has_less_memory_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP", (limit,))
    assert memory.container_limit(2**40) is None
    limit.write_text("max\n")
    assert memory.container_limit(2**40) is None
    limit.write_text(f"{2**31}\n")
    assert memory.container_limit(2**40) == 2**31
    monkeypatch.setattr(machine, "meminfo", {"MemTotal": 2**40, "MemAvailable": 2**39}.get)
    facts, findings = machine.memory()
    assert facts["limit"] == 2**31
    assert words(findings).startswith("memory: 2.0 GiB can be used; --spill")


def test_a_full_disk_and_a_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda path: 2**20 if "cache" in str(path) else 2**40)
    facts, findings = machine.disk(tmp_path / "cache" / "not" / "there")
    assert "caches: " in words(findings)
    assert "0.0 GiB left; COMPRESS_CACHE_DIR" in words(findings)
    assert facts["caches"]["free"] == 2**20
    monkeypatch.setattr(machine, "free_bytes", lambda path: 2**40)
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(machine.os, "access", lambda path, mode: "cache" not in str(path))
    assert "cannot be written" in words(machine.disk(tmp_path / "cache")[1])


def test_the_doctor_looks_over_this_machine() -> None:
    outcome = command("doctor", "--json", "-")
    found = outcome.json()
    assert found["facts"]["packages"]["torch"] == metadata.version("torch")
    assert found["facts"]["processor"]["cores"] >= 1
    assert bool(found["facts"]["gpu"]["devices"]) is torch.cuda.is_available()
    broken = [each for each in found["findings"] if each["state"] == "broken"]
    assert outcome.code == int(bool(broken)), broken
    assert {each["about"] for each in found["findings"]} >= {"packages", "torch", "memory", "disk", "gpu"}


def test_what_is_broken_ends_with_1_and_the_rest_is_still_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = command("doctor")
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1].startswith("compress: torch: torch cannot be imported (import of torch halted")
    assert "memory: " in outcome.out
    assert "Broken:\n- torch: " in outcome.out


def test_words_for_people_begin_with_what_is_gravest() -> None:
    findings = (
        Observation("a", "slow", "crawls", "run"),
        Observation("b", "broken", "lies there"),
        Observation("c", "good", "fine"),
    )
    assert list(examined.verdict(examined.Examination({}, findings))) == [
        *("", "Broken:", "- b: lies there", "", "Slower than it could be:", "- a: crawls; run"),
    ]
    assert list(examined.verdict(examined.Examination({}, findings[2:]))) == ["", "Nothing is broken."]
