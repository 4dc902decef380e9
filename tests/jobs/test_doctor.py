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

from compress.base import memory
from compress.cli.commands.doctor import verdict
from compress.jobs import doctor
from compress.jobs.doctor import Examination, Observation
from compress.kernels.cpu import build, compiled_libraries, processor


def words(findings: object) -> str:
    return "\n".join(map(str, findings))


def test_a_package_of_another_version_breaks_and_an_extra_is_only_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.0.0", "numpy": "2.1.0", "gguf": "0.19.0"}
    monkeypatch.setattr(doctor, "installed_version", there.get)
    lines = ("torch>=2.11", "numpy>=2", "scipy>=1", 'onnx>=1; extra == "onnx"', 'gguf>=0.19; extra == "gguf"')
    found = list(doctor.of_packages([Requirement(line) for line in lines]))
    assert [(each.about, each.state, each.said) for each in found] == [
        ("packages", "broken", "torch 2.0.0 is installed, and >=2.11 needed"),
        ("packages", "broken", "scipy is not installed"),
        ("extra onnx", "missing", "onnx is not installed (for `compress export --to onnx`, `--for ort`)"),
    ]
    assert found[0].advice == "pip install 'torch>=2.11'"


def test_every_extra_of_users_is_told() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*project["optional-dependencies"]} - {"all", "dev", "docs", "notebooks", "release"} == {*doctor.EXTRAS}


def test_kernels_are_there_or_not_yet_or_cannot_be_built() -> None:
    states = {"gemm": "there", "columns": "not yet", "operators": "c++ failed"}
    failed, waiting = doctor.of_kernels((), states)
    assert failed.said == "not compiled (c++ failed), so that torch computes in their place: operators"
    assert "1 of 3 not compiled yet" in waiting.said
    assert not list(doctor.of_kernels((), {"gemm": "there", "columns": "prebuilt"}))
    (none,) = doctor.of_kernels((), dict.fromkeys(("gemm", "columns", "trellis"), "no compiler"))
    assert none.said.endswith("gemm, columns, trellis")
    assert words(doctor.of_kernels(("no AVX2",), {"gemm": "off"})) == "kernels: no AVX2: torch computes in their place"


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


def test_a_gpu_that_does_not_compute_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> tuple[int, int]:
        raise RuntimeError(f"CUDA error: out of memory\nof {number}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    facts, (problem,) = doctor.gpu()
    assert facts["devices"] == []
    assert (problem.state, problem.said) == ("broken", "cuda:0 does not compute (CUDA error: out of memory)")


@pytest.mark.parametrize(("cuda", "state"), [(None, "slow"), ("13.0", "broken")])
def test_a_gpu_that_torch_cannot_use_is_told_from_none(
    cuda: str | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path)
    assert [each.state for each in doctor.without_gpu(cuda)] == [state]
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "none")
    assert doctor.without_gpu(cuda) == []


def test_a_container_has_less_memory_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP", (limit,))
    assert memory.container_limit(2**40) is None
    limit.write_text("max\n")
    assert memory.container_limit(2**40) is None
    limit.write_text(f"{2**31}\n")
    assert memory.container_limit(2**40) == 2**31


def test_the_doctor_looks_over_this_machine() -> None:
    outcome = command("doctor", "--json", "-")
    found = outcome.json()
    assert found["facts"]["packages"]["torch"] == metadata.version("torch")
    assert found["facts"]["processor"]["cores"] >= 1
    assert bool(found["facts"]["gpu"]["devices"]) is torch.cuda.is_available()
    broken = [each for each in found["findings"] if each["state"] == "broken"]
    assert outcome.code == int(bool(broken)), broken
    assert {*found["facts"]} == {"packages", "processor", "kernels", "gpu", "memory", "cache"}
    assert found["facts"]["cache"]["free"] > 0
    assert found["facts"]["memory"]["total"] == memory.meminfo("MemTotal")


def test_what_is_broken_ends_with_1_and_the_rest_is_still_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = command("doctor")
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1].startswith("compress: torch: torch cannot be imported (import of torch halted")
    assert "memory: " in outcome.out
    assert "Broken:\n- torch: " in outcome.out


def test_words_for_people_begin_with_what_is_gravest() -> None:
    findings = [Observation("a", "slow", "crawls", "run"), Observation("b", "broken", "lies there")]
    assert list(verdict(Examination({}, findings))) == [
        *("", "Broken:", "- b: lies there", "", "Slower than it could be:", "- a: crawls; run"),
    ]
    assert list(verdict(Examination({}, []))) == ["", "Nothing is broken."]
