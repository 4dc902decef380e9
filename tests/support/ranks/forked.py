"""Ranks of the sharded tests, forked from one process that has imported everything."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import build

from compress.cli.exit_codes import leave


def join(rank: int, world: int, folder: Path) -> None:
    """Become a rank of a group on gloo."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world}", rank=rank, world_size=world)


def part() -> None:
    """Leave the group, and the process, when all ranks do."""
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


def fork(run: Callable[[int, int, Path], None], worlds: Sequence[int] = (2, 3)) -> None:
    """So many ranks, two and then three, of a worker's `run(rank, world, folder)`; the folder is its first argument."""
    torch.set_num_threads(1)
    build("llama")  # its classes, too, are imported once
    for world in worlds:
        mp.start_processes(run, (world, Path(sys.argv[1])), nprocs=world, start_method="fork")
