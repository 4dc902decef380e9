"""Building the compiled CPU kernels: once, by one process, where nobody else can write, and what is said about it."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from compress.base.errors import CompressError
from compress.kernels import private_folders
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import compiled_libraries, compiling, gemm
from compress.kernels.cpu.libraries import HERE, PARTS, CompileUnit

pytestmark = pytest.mark.usefixtures("notes")
FLAGS = ("-fPIC",)
SOMEBODY = 12345


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A source that compiles at once, so that a test can afford to build it."""
    if not cpu.compilers():
        pytest.skip("no C++ compiler")
    source = tmp_path / "small.cpp"
    source.write_text(
        'extern "C" int answer() { return 42; }\nextern "C" const char* instructions() { return "none"; }\n'
        'extern "C" void ask_for_parts(void*) {}\n'
    )
    monkeypatch.setattr(cpu, "sources", lambda name: [source])
    monkeypatch.setattr(cpu, "units", lambda name: [CompileUnit(source)])
    return source


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The only compiler is a script that first writes down that it was called; counts these lines."""
    log = tmp_path / "log"

    def use(script: str) -> list[str]:
        path = tmp_path / "compiler"
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo 1; exit 0; fi\necho >> {log}\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setattr(cpu, "COMPILERS", ())
        monkeypatch.setenv("CXX", str(path))
        return [str(path)]

    use.count = lambda: len(log.read_text()) if log.exists() else 0
    return use


def the_compiler() -> str:
    return f'exec {cpu.compilers()[0][0]} "$@"'


# --- compilers -----------------------------------------------------------------------------------------------------


def test_a_broken_compiler_is_a_reason(calls, tmp_path):
    calls("echo warning; echo 'x.cpp:1: error: no such thing' >&2; exit 1")
    library, (reason,) = cpu.build_and_load(tmp_path / "cache", cpu.FLAGS)
    assert library is None
    assert reason.endswith("failed: x.cpp:1: error: no such thing")


def test_a_failure_is_remembered_until_something_changes(small, calls, monkeypatch, tmp_path):
    calls("echo 'error: no such thing' >&2; exit 1")

    def tried() -> str:
        library, (reason,) = cpu.build_and_load(tmp_path / "cache", FLAGS)
        assert library is None
        return reason

    assert tried().endswith("error: no such thing")
    assert calls.count() == 1
    assert "no such thing (on 20" in tried()
    assert "COMPRESS_CPU_KERNELS=retry" in tried()
    assert calls.count() == 1
    monkeypatch.setenv("COMPRESS_CPU_KERNELS", "retry")
    assert tried().endswith("error: no such thing")
    assert calls.count() == 2
    monkeypatch.delenv("COMPRESS_CPU_KERNELS")
    small.write_text(small.read_text() + "\n")
    assert tried().endswith("error: no such thing")
    assert calls.count() == 3


def test_a_machine_without_memory_is_tried_again(small, calls, tmp_path):
    calls("echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1")
    for times in (1, 2):
        _, (reason,) = cpu.build_and_load(tmp_path / "cache", FLAGS)
        assert reason.endswith("Killed signal terminated program cc1plus")
        assert calls.count() == times


def test_a_library_that_does_not_load_is_a_failure(small, calls, tmp_path):
    calls('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"')
    for _ in range(2):
        library, (reason,) = cpu.build_and_load(tmp_path / "cache", FLAGS)
        assert library is None
        assert "cannot be loaded" in reason
    assert calls.count() == 2  # compiled and linked, once


def test_a_compiler_that_stands_still_is_given_up(small, calls, monkeypatch, tmp_path):
    calls("exec sleep 60")
    monkeypatch.setattr(compiling, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(compiling, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(compiling, "cpu_seconds", lambda group: 0.0)
    _, (reason,) = cpu.build_and_load(tmp_path / "cache", FLAGS)
    assert reason.endswith("stood still for 0.2 s")
    used = iter(range(1, 1000))
    monkeypatch.setattr(compiling, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(compiling, "cpu_seconds", lambda group: next(used))
    monkeypatch.setattr(compiling, "CPU_SECONDS", 3.0)
    monkeypatch.setenv("COMPRESS_CPU_KERNELS", "retry")
    _, (reason,) = cpu.build_and_load(tmp_path / "cache", FLAGS)
    assert reason.endswith("used more than 3 s of CPU time")


def test_a_slow_compiler_is_waited_for(monkeypatch):
    """However little of a busy machine it gets: any CPU time will do."""
    used = iter(range(1, 1000))
    monkeypatch.setattr(compiling, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(compiling, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(compiling, "cpu_seconds", lambda group: next(used))
    beats = []
    assert compiling.run_all([["sh", "-c", "sleep 0.3; echo done"]], 1, beats.append) == ["done\n"]
    assert beats[0] == 0


def test_the_cpu_time_of_a_group_is_that_of_all_its_processes():
    script = "(i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done); exec sleep 60"
    process = subprocess.Popen(["sh", "-c", script], process_group=0)
    try:
        end = time.monotonic() + 60
        while compiling.cpu_seconds(process.pid) == 0 and time.monotonic() < end:
            time.sleep(0.02)
        assert 0 < compiling.cpu_seconds(process.pid) < 60
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert compiling.cpu_seconds(2**30) == 0


def test_units_are_as_many_at_a_time_as_cores_and_memory_allow(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert 1 <= compiling.jobs() <= compiling.MOST_JOBS
    monkeypatch.setattr(compiling, "_available_bytes", lambda: 2 * compiling.JOB_BYTES)
    assert compiling.jobs() == 2
    monkeypatch.setattr(compiling, "_available_bytes", lambda: 0)
    assert compiling.jobs() == 1


# --- one process compiles ------------------------------------------------------------------------------------------


def test_several_may_build_at_the_same_time_and_one_does(small, calls, notes, tmp_path):
    command = calls(the_compiler())
    with ThreadPoolExecutor(4) as pool:
        (path,) = set(pool.map(lambda _: cpu.built(tmp_path / "cache", command, FLAGS), range(4)))
    assert calls.count() == 2  # compiled and linked
    left = {each.name for each in (tmp_path / "cache").iterdir()}
    assert left == {path.with_suffix(ending).name for ending in (".so", ".json", ".lock")}
    assert cpu.build_and_load(tmp_path / "cache", FLAGS)[0].answer() == 42
    assert sum(note.startswith("compiling for this CPU, once: ") for note in notes()) == 1
    small.write_text('extern "C" int answer() { return 43; }\n')
    assert cpu.built(tmp_path / "cache", command, FLAGS) != path


@pytest.fixture
def holder(small, tmp_path):
    """Another process, which holds the lock of the library."""
    cache = tmp_path / "cache"
    cache.mkdir()
    path = cpu.path_of(cache, cpu.compilers()[0], FLAGS, "gemm")
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True)"
    words = [sys.executable, "-S", "-c", f"{hold}; time.sleep(60)", path.with_suffix(".lock")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_killed_process_lets_go_of_the_lock(small, holder, notes, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(cpu.build_and_load, tmp_path / "cache", FLAGS)
        while not notes():
            time.sleep(0.01)
        assert notes() == ["another process compiles kernels for this CPU: waiting for it"]
        assert not found.done()
        holder.kill()
        assert found.result()[0].answer() == 42


def test_a_process_that_stands_still_is_not_waited_for(small, holder, monkeypatch, tmp_path):
    monkeypatch.setattr(compiled_libraries, "STILL_SECONDS", 0.1)
    assert cpu.build_and_load(tmp_path / "cache", FLAGS)[0].answer() == 42
    assert holder.poll() is None


def test_a_file_system_without_locks_is_no_obstacle(small, monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert cpu.build_and_load(tmp_path / "cache", FLAGS)[0].answer() == 42


def test_what_a_killed_build_left_goes(small, tmp_path):
    old = tmp_path / "cache" / "build-old"
    old.mkdir(parents=True)
    (old / "0.o").write_text("")
    os.utime(old, (0, 0))
    new = tmp_path / "cache" / "build-new"
    new.mkdir()
    cpu.build_and_load(tmp_path / "cache", FLAGS)
    assert not old.exists()
    assert new.exists()


# --- what lies in the cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["empty", "truncated", "changed", "no checksum", "checksum of another", "foreign"])
def test_a_damaged_library_is_built_again(small, calls, monkeypatch, tmp_path, damage):
    command = calls(the_compiler())
    path = cpu.built(tmp_path / "cache", command, FLAGS)
    content = path.read_bytes()
    told = path.with_suffix(".json")
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        path.write_bytes(content[:-1] + b"x")
    elif damage == "no checksum":
        told.unlink()
    elif damage == "checksum of another":
        told.write_text('["sha256"]')
    else:
        path.chmod(0o722)
    assert cpu.build_and_load(tmp_path / "cache", FLAGS)[0].answer() == 42
    assert calls.count() == 4  # compiled and linked, twice
    assert len(path.read_bytes()) == len(content)
    assert path.stat().st_mode & 0o777 == 0o700
    assert cpu.built(tmp_path / "cache", command, FLAGS) == path
    assert calls.count() == 4


def of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a file away; a user who cannot becomes another one."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


def test_a_file_of_another_user_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "file"
    path.touch(mode=0o600)
    assert private_folders.why_not_ours(path) is None
    of_another_user(path, monkeypatch)
    assert f"{path} belongs to user" in private_folders.why_not_ours(path)


def test_a_folder_that_others_can_write_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "cache" / "kernels"
    private_folders.make_private(folder)
    assert [each.stat().st_mode & 0o777 for each in (folder, folder.parent)] == [0o700, 0o700]
    monkeypatch.setattr(private_folders, "OTHERS_ENTER", 0o777)  # as if the folders of tests were open to others
    if reason := private_folders.why_not_private(folder):
        pytest.skip(f"the folder of temporary files is not private: {reason}")
    for mode, refused in ((0o777, True), (0o1777, False), (0o755, False)):
        folder.parent.chmod(mode)
        reason = private_folders.why_not_private(folder)
        assert (reason is not None) is refused, (oct(mode), reason)
        assert reason is None or f"{folder.parent}, in which it lies, can be written" in reason
    for mode in (0o770, 0o1777, 0o702):
        folder.chmod(mode)
        assert f"{folder} can be written by other users" in private_folders.why_not_private(folder)


def test_a_group_of_ones_own_may_write_the_folder_around(monkeypatch, tmp_path):
    folder = tmp_path / "cache" / "kernels"
    private_folders.make_private(folder)
    monkeypatch.setattr(private_folders, "OTHERS_ENTER", 0o777)
    if reason := private_folders.why_not_private(folder):
        pytest.skip(f"the folder of temporary files is not private: {reason}")
    folder.parent.chmod(0o770)
    for own in (True, False):
        monkeypatch.setattr(private_folders, "_own_group", lambda gid, own=own: own)
        assert (private_folders.why_not_private(folder) is None) is own


@pytest.mark.parametrize("looseness", ["writable", "another user's"])
def test_kernels_go_elsewhere_where_the_cache_is_not_private(small, monkeypatch, notes, tmp_path, looseness):
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    other = tmp_path / "tmp"
    other.mkdir()
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    if looseness != "writable":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        folder.chmod(0o700)
        os.chown(folder, SOMEBODY, -1)
    library, reasons = cpu.load_from_a_place("gemm", FLAGS)
    assert library.answer() == 42, reasons
    assert not any(folder.iterdir())
    (made,) = other.glob("*/kernels/*.so")
    (said,) = (note for note in notes() if "instead" in note)
    assert said.startswith(f"{folder} ")
    assert str(made.parent) in said
    made.parent.chmod(0o777)
    library, reasons = cpu.load_from_a_place("gemm", FLAGS)
    assert library is None
    assert [str(folder) in reasons[0], str(made.parent) in reasons[1]] == [True, True]


def test_a_cache_that_cannot_be_written_is_a_reason(small, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    library, reasons = cpu.build_and_load(tmp_path / "file", FLAGS)
    assert library is None
    assert all("file" in reason for reason in reasons)
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    library, reasons = cpu.load_from_a_place("gemm", FLAGS)
    assert library is None
    assert len(reasons) == 2


def test_a_fallback_is_said_once(fresh, calls, notes, tmp_path):
    if cpu.machine_reasons():
        pytest.skip("; ".join(cpu.machine_reasons()))
    fresh.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    calls("echo 'error: no such thing' >&2; exit 1")
    for name in ("gemm", "gemm", "columns"):
        assert cpu.why_not(name)
    slow = [note for note in notes() if note.startswith("no compiled kernels: ")]
    assert len(slow) == 1
    assert slow[0].endswith("torch computes instead, which is slower")


def test_a_part_that_cannot_be_built_is_said_by_the_product_that_needs_it(fresh, calls, tmp_path):
    """The script compiles what chooses among products, and no part of them."""
    if cpu.machine_reasons():
        pytest.skip("; ".join(cpu.machine_reasons()))
    script = the_compiler()
    fresh.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    calls(f"case \"$*\" in *-DUNIT=*) echo 'error: no such thing' >&2; exit 1;; esac\n{script}")
    assert cpu.why_not() == ()
    x_MK, weight_NK, scale_N = torch.ones(1, 64), torch.ones(16, 64, dtype=torch.int8), torch.ones(16)
    with pytest.raises(CompressError, match=r"int8 weights, int8 inputs: .*no such thing.*COMPRESS_CPU_KERNELS=0"):
        gemm.w8a8(x_MK, weight_NK, scale_N, None, None, None, None, True)
    cpu._lacking.clear()
    fresh.setattr(cpu, "load_from_a_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        gemm.w8a8(x_MK, weight_NK, scale_N, None, None, None, None, True)


def test_parts_are_those_that_the_products_choose_from():
    header = (HERE / "cpu_products.h").read_text().split("#define EACH_PART(DO)")[1]
    both = re.findall(r"BOTH\(DO, (\w+)\)", header)
    names = {*re.findall(r" DO\((\w+)\)", header), *both, *(f"{name}_entries" for name in both)}
    assert names == set(PARTS)


def test_where_libraries_lie(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("COMPRESS_CACHE_DIR", raising=False)
    assert next(private_folders.candidates("kernels")) == Path("/x/compress/kernels")
    monkeypatch.setenv("COMPRESS_CACHE_DIR", "/y")
    assert next(private_folders.candidates("kernels")) == Path("/y/kernels")


def test_importing_builds_nothing(tmp_path):
    environment = os.environ | {"COMPRESS_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", "import compress.kernels.operators.words"], env=environment, check=True)
    assert not (tmp_path / "cache").exists()
