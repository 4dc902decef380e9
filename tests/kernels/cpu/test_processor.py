"""Processors of described systems: the instructions found on them, and the flags to compile with."""

import pytest

from compress.base.errors import InputError
from compress.kernels.cpu import build, compiling, processor

M1 = "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\nhw.optional.arm.FEAT_BF16: 0\n"
M2 = M1.replace(": 0", ": 1")
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16 sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Describes a system: its name, its architecture, what /proc/cpuinfo and sysctl say."""

    def describe(system: str, architecture: str, cpuinfo: str = "", sysctl: str = "") -> None:
        processor._apple_flags.cache_clear()
        monkeypatch.setattr(processor, "machine", lambda: (system, architecture))
        monkeypatch.setattr(processor, "_cpuinfo", cpuinfo.splitlines)
        monkeypatch.setattr(processor, "_sysctl", lambda *words: sysctl.splitlines())

    monkeypatch.delenv("COMPRESS_CPU", raising=False)
    yield describe
    processor._apple_flags.cache_clear()


@pytest.mark.parametrize(
    ("described", "target"),
    [
        (("Linux", "aarch64", GRAVITON), "neon-i8mm"),
        (("Linux", "aarch64", GRAVITON.replace(" bf16", "")), "neon-dotprod"),
        (("Linux", "aarch64", "Features : fp asimd"), "neon"),
        (("Darwin", "arm64", "", M1), "neon-dotprod"),
        (("Darwin", "arm64", "", M2), "neon-i8mm"),
        (("Darwin", "arm64"), "neon"),  # sysctl says nothing
        (("Linux", "x86_64", "flags : avx2 fma f16c"), "native"),
    ],
)
def test_native_is_the_best_that_the_processor_has(on, described, target):
    on(*described)
    assert processor.target() == target
    assert build.machine_reasons() == ()


def test_another_target_can_be_chosen_where_it_runs(on, monkeypatch):
    on("Linux", "aarch64", "Features : asimd asimddp")
    monkeypatch.setenv("COMPRESS_CPU", "neon")
    assert processor.target() == "neon"
    monkeypatch.setenv("COMPRESS_CPU", "neon-i8mm")
    assert build.machine_reasons() == ("the CPU has no i8mm, bf16",)
    monkeypatch.setenv("COMPRESS_CPU", "avx2")
    with pytest.raises(InputError, match="COMPRESS_CPU=avx2; allowed: native, neon, neon-dotprod, neon-i8mm, or leave"):
        processor.target()


def test_systems_without_kernels_say_so(on):
    on("Windows", "AMD64")
    (reason,) = build.machine_reasons()
    assert reason.endswith("Linux on x86_64, Linux on aarch64, Darwin on arm64; this is Windows on AMD64")
    on("Linux", "x86_64", "flags : avx2")
    assert build.machine_reasons() == ("the CPU has no fma, f16c",)


def test_macos_has_neither_openmp_nor_proc(on, monkeypatch, tmp_path):
    on("Darwin", "arm64", "", M2)
    assert "-fopenmp" not in build.flags_for(processor.target())
    assert "spill" not in build.names_here()
    assert build.torch_of("operators")[1].endswith("libtorch_cpu.dylib")
    monkeypatch.setattr(compiling, "PROC", tmp_path / "absent")
    assert compiling.run_all([["sh", "-c", "sleep 1.2; echo done"]], 1) == ["done\n"]
    assert compiling.cpu_seconds(1) == 0


def test_names(on):
    on("Linux", "x86_64", "model name\t: A: B\nmodel name : other")
    assert processor.cpu_name() == "A: B"
    on("Linux", "aarch64", GRAVITON)
    assert processor.cpu_name() == "ARM processor (implementer 0x41, part 0xd40)"
    on("Darwin", "arm64", "", "Apple M2")
    assert processor.cpu_name() == "Apple M2"
    on("Linux", "riscv64")
    assert processor.cpu_name() == "cpu"
