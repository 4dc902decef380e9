"""Zeroed counters for kernels that let the last of several programs finish a tile.

A counter is 0 before a kernel and the kernel returns it to 0, so that nothing is cleared between calls. Two kernels
that may run at the same time must not share counters, so whatever is ordered within itself has a slice of an arena of
its own: each stream, and each stream within the capture of a CUDA graph, because graphs may be replayed side by side.
The calls of one graph share: they run one after the other. Beyond SLICES owners a call gets a freshly zeroed tensor:
correct, one memset slower.

Torch does not say when a graph is gone, so its slice stays taken, unless the graph was made inside of `borrowed`.
"""

import ctypes
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

SLICE = 512
SLICES = 2048
# The status of a stream that is being captured, and the first field of what the driver answers.
CAPTURE_ACTIVE = 1


class Owner(NamedTuple):
    """The owner of a slice: a stream, and the capture that it is part of (0: none)."""

    device: torch.device
    capture: int
    stream: int


_arenas: dict[torch.device, Tensor] = {}
_free: dict[torch.device, list[int]] = {}
_taken: dict[Owner, int] = {}
_unknown = itertools.count(-1, -1)


def prepare(device: torch.device) -> None:
    """Allocate the arena of a device (4 MiB, once). Call it before capturing a graph: memory that is allocated during
    a capture belongs to the graph, and is zeroed only when the graph runs."""
    if device not in _arenas:
        _arenas[device] = torch.zeros(SLICES, SLICE, dtype=torch.int32, device=device)
        _free[device] = list(range(SLICES))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@cache
def _driver() -> ctypes.CDLL | None:
    """The CUDA driver, where it can be asked about captures."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if hasattr(driver, "cuStreamGetCaptureInfo_v2") else None


def _capture_of(stream: int) -> int:
    """The driver's number of the capture that a stream is part of; where it cannot be asked, a number that no other
    call gets."""
    driver, status, number = _driver(), ctypes.c_int(), ctypes.c_uint64()
    if driver is not None:
        rest = (None, None, None)
        answered = ctypes.byref(status), ctypes.byref(number)
        failed = driver.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *answered, *rest)
        if not failed and status.value == CAPTURE_ACTIVE and number.value:
            return number.value
    return next(_unknown)


def owner_of(device: torch.device) -> Owner:
    """The owner of the counters for a kernel that is launched now: the current stream, within its capture."""
    if device.type != "cuda":
        return Owner(device, 0, 0)
    stream = torch.cuda.current_stream(device).cuda_stream
    captured = torch.cuda.is_current_stream_capturing()
    return Owner(device, _capture_of(stream) if captured else 0, stream)


def counters(device: torch.device) -> Tensor:
    """int32 [SLICE] zeros that no concurrent kernel uses."""
    owner = owner_of(device)
    if not owner.capture:
        prepare(device)
    if owner not in _taken:
        free = _free.get(device)
        if not free:
            return torch.zeros(SLICE, dtype=torch.int32, device=device)
        _taken[owner] = free.pop(0)
    return _arenas[device][_taken[owner]]


def owners() -> set[Owner]:
    """All that have slices."""
    return set(_taken)


def give_back(those: Iterable[Owner]) -> None:
    """Free slices of graphs that have run to their end and never run again."""
    for owner in those:
        _free[owner.device].append(_taken.pop(owner))


@contextmanager
def borrowed() -> Iterator[None]:
    """Slices that graphs take inside are free afterwards: they must have run to their end and never run again."""
    before = owners()
    try:
        yield
    finally:
        give_back(owner for owner in owners() - before if owner.capture)
