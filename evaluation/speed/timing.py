"""Times of calls.

The figure that is quoted is the median on a GPU and the minimum on a CPU: a GPU is ours alone and its clocks vary,
a CPU is shared and everything that disturbs it makes it slower. One thread is timed by its CPU time, several by
the wall clock.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def elapsed_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one run, to its end on the device."""
    if device.type != "cuda":
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        began = clock()
        run()
        return (clock() - began) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def summary(times_ms: list[float], device: torch.device) -> dict[str, Any]:
    """`time_ms` is the figure to quote; the others say how far it can be trusted."""
    median, least = statistics.median(times_ms), min(times_ms)
    quoted = median if device.type == "cuda" else least
    return {"time_ms": quoted, "median_ms": median, "min_ms": least, "rounds": len(times_ms)}
