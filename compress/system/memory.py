"""Gives freed memory back to the system, and says what a process holds."""

import ctypes
from functools import cache
from pathlib import Path


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


def anonymous_bytes(process: int | None = None) -> int | None:
    """Anonymous memory of a process, or of this one; None where the system does not say, or of one that is gone."""
    try:
        lines = Path(f"/proc/{'self' if process is None else process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)
