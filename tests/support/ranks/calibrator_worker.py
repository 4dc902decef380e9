"""One of several gloo processes that calibrate together: calibrator_worker.py FOLDER RANK WORLD."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.solvers.statistics.calibrators import OPTIONS, calibrator
from compress.solvers.statistics.observers import Range
from compress.weights.grid import Grid

CHANNELS = 5
GRIDS = [Grid(bits=8, granularity="tensor"), Grid(bits=4, granularity="channel", symmetric=False)]


def micro_batches() -> list[torch.Tensor]:
    """Seven of different sizes, one without a token; the range grows from the first to the last."""
    generator = torch.Generator().manual_seed(0)
    sizes = [40, 7, 0, 33, 1, 60, 21]
    parts = [torch.randn(n, CHANNELS, generator=generator) * 4.0**i for i, n in enumerate(sizes)]
    return [part * torch.tensor([1.0, 1e-30, 1e20, 3.0, 0.0]) for part in parts]


def calibrated(comm: Comm, batches: list[torch.Tensor]) -> list[Range]:
    """The range of every method on every grid, from this rank's share of the micro-batches."""
    found = []
    for grid in GRIDS:
        for name in OPTIONS:
            statistic = calibrator(name, grid, keep_histogram=True)(CHANNELS, torch.device("cpu"))
            for batch in batches[comm.rank :: comm.world]:
                statistic.update(batch, None)
            statistic.sync(comm)
            found.append(statistic.result())
    return found


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    comm = Comm()
    torch.save([vars(found) for found in calibrated(comm, micro_batches())], folder / f"found-{rank}.pt")
    damaged = micro_batches()
    damaged[1][3, 2] = float("nan")  # rank 1 alone sees it
    try:
        calibrated(comm, damaged)
    except CompressError as error:
        (folder / f"error-{rank}.txt").write_text(str(error))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
