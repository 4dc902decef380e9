"""Runs compilers side by side. One is given up when it stands still, or uses more CPU time than any needs: the clock
says nothing about a compiler on a machine that is busy with other work.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from compress.kernels.cpu.processor import usable_cores

IDLE_SECONDS = 300.0  # without any CPU time
CPU_SECONDS = 900.0  # of one command; a unit takes about 5
LOOK_SECONDS = 0.05
BEAT_SECONDS = 1.0
MOST_JOBS = 4
JOB_BYTES = 400 * 2**20  # the largest unit, with g++ 12
TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")  # where there is none, as on macOS, time by the clock stands for CPU time


# Words of a compiler about the machine, which another try may find in a better state.
PASSING = ("No space left", "Killed", "Cannot allocate memory", "out of memory")


class CompileError(Exception):
    """A compiler that failed or was given up. The message says which and why, in one line."""

    @property
    def passes(self) -> bool:
        """True where the machine was at fault, not the sources or the compiler: it is tried again next time."""
        return any(words in str(self) for words in PASSING)


def jobs() -> int:
    """Compilers to run at a time: one per core of this process, as far as memory goes."""
    return max(1, min(usable_cores(), MOST_JOBS, _available_bytes() // JOB_BYTES))


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []  # a system that does not say
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return JOB_BYTES * MOST_JOBS if found is None else int(found) * 1024


def run_all(
    commands: Sequence[Sequence[str]], at_once: int, beat: Callable[[int], None] = lambda done: None
) -> list[str]:
    """Standard output of each command. beat(commands that are done): called about once a second. Raises CompileError
    for the first that fails; none runs on after that."""
    outputs = [""] * len(commands)
    running: list[_Running] = []
    begun, done, beaten = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while done < len(commands):
                while begun < len(commands) and len(running) < at_once:
                    running.append(_Running(commands[begun], begun, Path(folder)))
                    begun += 1
                running[0].wait(LOOK_SECONDS)
                looks = time.monotonic() - beaten >= BEAT_SECONDS
                for each in list(running):
                    if each.ended():
                        running.remove(each)
                        outputs[each.number] = each.output()
                        done += 1
                    elif looks:
                        each.check()
                if looks:
                    beat(done)
                    beaten = time.monotonic()
        finally:
            for each in running:
                each.kill()
    return outputs


class _Running:
    """A command in a process group of its own, and the CPU time that it was last seen to have used."""

    def __init__(self, words: Sequence[str], number: int, folder: Path) -> None:
        self.words, self.number = words, number
        self.out, self.errors = folder / f"{number}.out", folder / f"{number}.err"
        with self.out.open("wb") as out, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, process_group=0)
        self.used, self.since = 0.0, time.monotonic()
        self.begun = self.since

    def wait(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def ended(self) -> bool:
        return self.process.poll() is not None

    def output(self) -> str:
        """Standard output of a command that has ended. Raises CompileError where it failed."""
        if self.process.returncode:
            raise CompileError(f"{self.words[0]} failed: {first_error(_text(self.errors))}")
        return _text(self.out)

    def check(self) -> None:
        """Raise CompileError for a command that stands still or does not end."""
        now = time.monotonic()
        used = cpu_seconds(self.process.pid) if PROC.is_dir() else now - self.begun
        if used > self.used:
            self.used, self.since = used, now
        if now - self.since > IDLE_SECONDS:
            raise CompileError(f"{self.words[0]} stood still for {IDLE_SECONDS:.3g} s")
        if used > CPU_SECONDS:
            raise CompileError(f"{self.words[0]} used more than {CPU_SECONDS:.3g} s of CPU time")

    def kill(self) -> None:
        """End the command and its child processes."""
        if not self.ended():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def cpu_seconds(group: int) -> float:
    """CPU time of the processes of a group, and of those that they have waited for."""
    ticks = 0
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            # After the name, which is in parentheses and may hold anything: state, parent, group, ...
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[2]) == group:
            ticks += sum(map(int, fields[11:15]))
    return ticks / TICKS


def first_error(output: str) -> str:
    """The line of a compiler's output that names the error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
