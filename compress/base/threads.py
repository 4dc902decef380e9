"""The number of threads that torch works with, lowered for what is too small for several.

Threads that have little to do wait for each other: on a machine that other programs share, for longer than one of them
would take.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
# The number of `one_thread` that are entered, and that of threads before the first was.
_entered = {"count": 0, "before": 1}


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Let torch work with one thread, in the whole process; as before once all that asked for it have left. wanted:
    False changes nothing."""
    if not wanted:
        yield
        return
    with _lock:
        if _entered["count"] == 0:
            _entered["before"] = torch.get_num_threads()
            torch.set_num_threads(1)
        _entered["count"] += 1
    try:
        yield
    finally:
        with _lock:
            _entered["count"] -= 1
            if _entered["count"] == 0:
                torch.set_num_threads(_entered["before"])
