"""Four ranks with a model in two replicas of two shards (HSDP): hsdp_worker.py FOLDER."""

from contextlib import suppress
from pathlib import Path

from commands import DRIFT_GPTQ, StopAfterOne
from forked import fork, join, part
from models import build, tokens
from torch.distributed.device_mesh import init_device_mesh

import compress
from compress.engine.residency import shard
from compress.model.layers import find_stacks

EXACT = compress.GPTQ(group_size=16, statistics="float64", **DRIFT_GPTQ)
COMMON = {"calibration": tokens(8), "batch_size": 2, "verify": False}


def run(rank: int, world: int, folder: Path) -> None:
    join(rank, world, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, how in (("four", {}), ("stopped", {"reporter": StopAfterOne()})):
        shard(model := build("llama"), find_stacks(model), mesh)
        with suppress(KeyboardInterrupt):
            compress.quantize(model, EXACT, output=folder / name, **how, **COMMON)
    # As asked of the command line: replicas of shards, and the whole model on every rank.
    how = {"output": folder / "asked", "fsdp": "2x2", **COMMON}
    compress.quantize(folder / "model", EXACT, **how)
    with suppress(KeyboardInterrupt):
        compress.quantize(folder / "model", EXACT, reporter=StopAfterOne(), **{**how, "output": folder / "left"})
    how = {"output": folder / "copies", "fsdp": "4x1", **COMMON}
    with suppress(KeyboardInterrupt):
        compress.quantize(folder / "model", EXACT, reporter=StopAfterOne(), **how)
    compress.quantize(folder / "model", EXACT, resume=True, **how)
    part()


if __name__ == "__main__":
    fork(run, (4,))
