"""Standard output without the lines that native libraries print to it."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def drop_native_output() -> Iterator[None]:
    """Drops what anything prints to standard output inside the context. HiGHS has a line that no option silences, and
    that would stand in the JSON that a command prints."""
    if sys.stdout is not None:
        sys.stdout.flush()
    _flush()
    try:
        stdout = os.dup(1)
    except OSError:  # closed: nothing is printed
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        yield
    finally:
        _flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _flush() -> None:
    """Write what the C library holds back of its streams."""
    with suppress(OSError, AttributeError, TypeError):  # no C library of this process to be found
        ctypes.CDLL(None).fflush(None)
