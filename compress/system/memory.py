"""Gives freed memory back to the system."""

import ctypes
from functools import cache


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
