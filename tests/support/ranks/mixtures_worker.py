"""Two ranks that compress mixtures: mixtures_worker.py FOLDER. The models lie in FOLDER, one folder for each family."""

from pathlib import Path

import torch.distributed as dist
from commands import DRIFT_GPTQ
from forked import fork, join, part
from mixtures import FAMILIES, tokens

import compress

EXACT = {
    "gptq": compress.GPTQ(scheme="w4a16", group_size=-1, statistics="float64", **DRIFT_GPTQ),
    "smoothquant": compress.SmoothQuant(),
}


def run(rank: int, world: int, folder: Path) -> None:
    join(rank, world, folder)
    for family in FAMILIES:
        for name, method in EXACT.items():
            compress.quantize(
                folder / family,
                method,
                calibration=tokens(8),
                batch_size=2,
                fsdp=True,
                verify=False,
                output=folder / f"{family}-{name}-{world}",
            )
    dist.barrier()
    part()


if __name__ == "__main__":
    fork(run, (2,))
