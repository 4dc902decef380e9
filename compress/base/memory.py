"""Gives freed memory back to the system or keeps it, and says what a process holds and what it may have."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Of a container: the limit, and what counts against it that cannot be dropped.
CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@cache
def _library() -> ctypes.CDLL | None:
    """The C library of this process; None where it has no `malloc_trim` (it is not glibc)."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return library if hasattr(library, "malloc_trim") else None


def give_back() -> None:
    """Give free memory back to the system. glibc keeps freed pieces below 32 MiB, a size that many weights have. They
    become fragments into which the next tensor does not fit, more of them after every block."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


@contextmanager
def keeping_freed() -> Iterator[None]:
    """Keeps freed memory for the next tensors inside a context, for work that takes the same sizes again and again in
    the main thread. glibc gives pieces of more than 32 MiB back to the system, which clears them before they are taken
    again."""
    library = _library()
    if library is None:
        yield
        return
    library.mallopt(MMAP_THRESHOLD, 2**30)
    library.mallopt(TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        library.mallopt(MMAP_THRESHOLD, 2**25)  # the most that glibc chooses by itself
        library.mallopt(TRIM_THRESHOLD, 2**26)
        give_back()


def anonymous_bytes(process: int | None = None) -> int | None:
    """Anonymous memory of a process, or of this one; None where the system does not say, or of one that is gone."""
    return _entry(Path(f"/proc/{'self' if process is None else process}/status"), "RssAnon")


def peak_bytes() -> int:
    """The most memory that this process has had, of any kind."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes(device: "torch.device") -> int | None:
    """Bytes that this process can have on a device beside those that it holds; None where the system does not say, and
    for a GPU that is not here.

    On a CPU the least of: the system's estimate, what is left of the container's limit and of RLIMIT_DATA; a part of
    it, where several ranks share a machine.
    """
    if device.type == "cuda":
        import torch

        if not torch.cuda.is_available():
            return None
        number = torch.cuda.current_device() if device.index is None else device.index
        free, total = torch.cuda.mem_get_info(number)
        allowed = total * torch.cuda.get_per_process_memory_fraction(number)
        free = min(free + torch.cuda.memory_reserved(device), int(allowed))
        return max(0, free - torch.cuda.memory_allocated(device))
    available = meminfo("MemAvailable")
    if device.type != "cpu" or available is None:
        return None
    left = [available]
    limit, stat = container_limit(meminfo("MemTotal")), CGROUP[0].with_name("memory.stat")
    if limit is not None:
        left.append(limit - (_number_after(stat, "anon") or anonymous_bytes() or 0))
    data, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if data != resource.RLIM_INFINITY:
        left.append(data - (_entry(Path("/proc/self/status"), "VmData") or 0))
    return max(0, min(left)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def meminfo(key: str) -> int | None:
    """An entry of Linux's /proc/meminfo in bytes; None elsewhere."""
    return _entry(Path("/proc/meminfo"), key)


def container_limit(total: int | None) -> int | None:
    """The memory that a container may use, where that is less than there is."""
    for path in CGROUP:
        try:
            said = path.read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if said.isdigit() and (total is None or int(said) < total):
            return int(said)
    return None


def _entry(path: Path, key: str) -> int | None:
    """An entry of kilobytes, in bytes, of one of Linux's tables; None where there is none."""
    found = _number_after(path, f"{key}:")
    return None if found is None else found * 1024


def _number_after(path: Path, key: str) -> int | None:
    """The number behind a word at the beginning of a line; None where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), None)
