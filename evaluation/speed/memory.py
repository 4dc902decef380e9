"""Bytes that a model holds, and the most that running it takes.

On a GPU the peak is what torch allocated (`torch.cuda.max_memory_allocated`), other models included. On a CPU it is the
anonymous memory of the process (files that are mapped do not count) above its level before the model was made, read
every few milliseconds; Linux only.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from compress.base.memory import anonymous_bytes, give_back

PAUSE_S = 0.005


def held_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers; shared ones are counted once."""
    tensors = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def read_bytes(model: nn.Module) -> int:
    """Bytes that one decode step reads: all but embedding tables, of which it reads a row, unless the head shares
    them."""
    tables = [m.weight.untyped_storage() for m in model.modules() if isinstance(m, nn.Embedding)]
    heads = {m.weight.untyped_storage().data_ptr() for m in model.modules() if isinstance(m, nn.Linear)}
    return held_bytes(model) - sum(t.nbytes() for t in tables if t.data_ptr() not in heads)


class Peak:
    """The largest memory seen so far; None where it cannot be measured."""

    bytes: int | None = None


def settled_bytes(device: torch.device) -> int | None:
    """Bytes in use when nothing runs: the level that a CPU's peak is counted from. None where they cannot be
    measured."""
    gc.collect()
    give_back()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else anonymous_bytes()


@contextmanager
def watched_memory(device: torch.device, base: int | None) -> Iterator[Peak]:
    """Measures the peak of the device's memory (GPU), or of the process's above `base` (CPU), inside a context; set at
    its end."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    if base is None:
        yield peak
        return
    seen = [anonymous_bytes() or 0]
    done = threading.Event()

    def look() -> None:
        while not done.wait(PAUSE_S):
            seen.append(anonymous_bytes() or 0)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
    peak.bytes = max(0, max(*seen, anonymous_bytes() or 0) - base)
