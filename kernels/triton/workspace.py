"""Zeroed counters for kernels that let the last of several programs finish a tile.

A counter is 0 before a kernel and the kernel returns it to 0, so that nothing is cleared between calls. Two kernels
that may run at the same time must not share counters: each stream has its own slice of an arena, and so has each call
that is captured into a CUDA graph, because graphs may be replayed side by side. Beyond SLICES users a call gets a
freshly zeroed tensor: correct, one memset slower.
"""

import torch
from torch import Tensor

SLICE = 512
SLICES = 2048

_arenas: dict[torch.device, Tensor] = {}
_taken: dict[torch.device, int] = {}
_of_stream: dict[tuple[torch.device, int], Tensor] = {}


def prepare(device: torch.device) -> None:
    """Allocate the arena of a device (4 MiB, once). Call it before capturing a graph: memory that is allocated during
    a capture belongs to the graph, and is zeroed only when the graph runs."""
    if device not in _arenas:
        _arenas[device] = torch.zeros(SLICES, SLICE, dtype=torch.int32, device=device)
        _taken[device] = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def stream_of(device: torch.device) -> int | None:
    """The current stream of a device; None while it is being captured; 0 without streams."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).cuda_stream


def counters(device: torch.device) -> Tensor:
    """int32 [SLICE] zeros that no concurrent kernel uses."""
    stream = stream_of(device)
    if stream is None:
        return _fresh(device)
    prepare(device)
    if (device, stream) not in _of_stream:
        _of_stream[device, stream] = _fresh(device)
    return _of_stream[device, stream]


def _fresh(device: torch.device) -> Tensor:
    if _taken.get(device, SLICES) >= SLICES:
        return torch.zeros(SLICE, dtype=torch.int32, device=device)
    _taken[device] += 1
    return _arenas[device][_taken[device] - 1]
