"""Ranks of a sharded run as threads of this process: collectives on the CPU without a process group."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from compress.base.collectives import Comm

MERGES = {"sum": lambda o: o.sum(0), "max": lambda o: o.amax(0), "min": lambda o: o.amin(0)}


class ThreadComm(Comm):
    """One rank. Fails where the ranks do not offer the same kind of tensor to the same reduction."""

    def __init__(self, rank: int, world: int, board: dict, barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.world, self.board, self.meet = rank, world, board, barrier

    def all_reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        self.board[self.rank] = tensor.clone(), reduction
        self.meet.wait()
        offers, reductions = zip(*(self.board[r] for r in range(self.world)), strict=True)
        assert set(reductions) == {reduction}
        assert {(o.shape, o.dtype) for o in offers} == {(tensor.shape, tensor.dtype)}
        self.meet.wait()
        return tensor.copy_(MERGES[reduction](torch.stack(offers)))


def synced(statistics: Sequence[Any]) -> None:
    """Sync statistics with each other, one a rank: what a rank offers may depend on what it got before."""
    board: dict = {}
    barrier = threading.Barrier(len(statistics), timeout=60)
    with ThreadPoolExecutor(len(statistics)) as threads:
        done = [
            threads.submit(statistic.sync, ThreadComm(rank, len(statistics), board, barrier))
            for rank, statistic in enumerate(statistics)
        ]
        for each in done:
            each.result()


class TwoRanks(Comm):
    """One of two ranks that are threads of this process."""

    def __init__(self, rank: int, desk: list, barrier: threading.Barrier) -> None:
        super().__init__()
        self.active, self.rank, self.world = True, rank, 2
        self.desk, self.barrier = desk, barrier

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.desk[self.rank] = tensor.clone()
        self.barrier.wait(timeout=60)
        both = list(self.desk)
        self.barrier.wait(timeout=60)
        return both

    def all_reduce(self, tensor, reduction="sum"):
        first, second = self.exchange(tensor)
        return tensor.copy_({"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[reduction](first, second))

    def gather_rows(self, part, lengths):
        assert len(part) == lengths[self.rank]
        return torch.cat(self.exchange(part))
