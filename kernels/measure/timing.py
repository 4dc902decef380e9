"""How long calls take: CUDA graphs and events on a GPU, rounds in turns on a CPU.

On a GPU a round is one CUDA graph with one call per copy of the weight, timed by events, so that the launch from Python
is not what is measured (what cannot be captured is launched eagerly, and says so). On a CPU the candidates take turns
round by round, because another process on the machine would otherwise be charged to whichever was running.

The figure that is quoted is the median on a GPU and the minimum on a CPU: a GPU is ours alone and its clocks vary,
a CPU is shared and everything that disturbs it makes it slower. One thread is timed by what it took of the CPU, several
are by the wall clock.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Tensor]
SETTLE_SECONDS = 4e-3


def capture(calls: list[Call]) -> tuple[Callable[[], object], str]:
    """One round of all calls, as a CUDA graph where they can be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return (lambda: [call() for call in calls]), "eager"
    return graph.replay, "graph"


def elapsed_ms(run: Callable[[], object], device: torch.device) -> float:
    """One run of something, to its end on the device."""
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


def time_gpu(calls: list[Call], rounds: int) -> dict[str, Any]:
    """Times of one call, from rounds of all of them."""
    run, launch = capture(calls)
    run()
    device = torch.device("cuda")
    return summary([elapsed_ms(run, device) / len(calls) for _ in range(rounds)], device) | {"launch": launch}


def time_cpu(calls: dict[str, list[Call]], rounds: int) -> dict[str, dict[str, Any]]:
    """Times of one call of each candidate, one candidate after the other in every round.

    In its turn a candidate runs untimed until the threads of the one before have stopped spinning (there may be more
    than one pool) and its own are awake. Every call takes the copy that was not used for longest: candidates that share
    a weight would otherwise find it in the cache.
    """
    device = torch.device("cpu")
    times: dict[str, list[float]] = {name: [] for name in calls}
    turns = {name: itertools.cycle(copies) for name, copies in calls.items()}
    for _ in range(rounds):
        for name, turn in turns.items():
            settled = time.perf_counter() + SETTLE_SECONDS
            while time.perf_counter() < settled:
                next(turn)()
            times[name].append(elapsed_ms(next(turn), device))
    return {name: summary(values, device) for name, values in times.items()}


def summary(times_ms: list[float], device: torch.device) -> dict[str, Any]:
    """`time_ms` is the figure to quote; the others say how far it can be trusted."""
    median, least = statistics.median(times_ms), min(times_ms)
    quoted = median if device.type == "cuda" else least
    return {"time_ms": quoted, "median_ms": median, "min_ms": least, "rounds": len(times_ms)}
