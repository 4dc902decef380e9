"""Times calls: candidates in turns, with CUDA graphs and events on a GPU.

On a GPU a round of a candidate is one CUDA graph with one call per copy of the weight, timed by events, so that the
launch from Python is not measured (calls that cannot be captured are launched eagerly, and marked so). The candidates
take turns round by round: otherwise changes while they run, such as the clock of a GPU that gets warm or another
process on a CPU, would be charged to one of them.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compress.evaluation.speed.timing import elapsed_ms, summary
from compress.kernels import workspace

Call = Callable[[], Tensor]
Times = dict[str, dict[str, Any]]
SETTLE_SECONDS = 4e-3
# A GPU that was idle takes tenths of a second to reach the clock that it then holds.
WARM_SECONDS = 0.3


def capture(calls: list[Call], pool: Any = None) -> tuple[Callable[[], object], str]:
    """One round of all calls, as a CUDA graph where they can be captured. pool: memory shared by graphs whose results
    are not read, as `torch.cuda.graph_pool_handle` names it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return (lambda: [call() for call in calls]), "eager"
    return graph.replay, "graph"


def time_gpu(calls: dict[str, list[Call]], rounds: int) -> Times:
    """Times of one call of each candidate, one candidate after the other in every round."""
    device, pool = torch.device("cuda"), torch.cuda.graph_pool_handle()
    with workspace.borrowed():
        ready = {name: capture(copies, pool) for name, copies in calls.items()}
        times = take_turns({name: run for name, (run, _) in ready.items()}, rounds, device)
        torch.cuda.synchronize()
        launches = {name: launch for name, (_, launch) in ready.items()}
        ready.clear()
    return {
        name: summary([ms / len(calls[name]) for ms in found], device) | {"launch": launches[name]}
        for name, found in times.items()
    }


def take_turns(runs: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of every round of each candidate, on a device that has been at work for WARM_SECONDS.

    In its turn a candidate runs once untimed, so that neither the cache contents nor the clock that the one before has
    left affect its time.
    """
    warm = time.perf_counter() + WARM_SECONDS
    for run in itertools.cycle(runs.values()):
        elapsed_ms(run, device)
        if time.perf_counter() >= warm:
            break
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            times[name].append(elapsed_ms(run, device))
    return times


def time_cpu(calls: dict[str, list[Call]], rounds: int) -> Times:
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
