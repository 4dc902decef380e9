"""Memory that was freed, given back to the system."""

import ctypes
from functools import cache


@cache
def _library() -> ctypes.CDLL | None:
    """The C library of this process, where it has what is needed (glibc)."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return library if hasattr(library, "malloc_trim") else None


def give_back() -> None:
    """Give free memory back. glibc keeps what was freed in pieces below 32 MiB, a size that many weights have: block
    after block leaves some of it in pieces into which the next tensor does not fit."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)
