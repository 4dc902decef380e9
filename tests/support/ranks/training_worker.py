"""The ranks of the sharded tests of training, two and then three: training_worker.py FOLDER.

Ranks are forked from one process that has imported everything.
"""

import json
from contextlib import suppress
from pathlib import Path

import torch
from forked import fork, join, part
from models import tokens
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import compress
from compress.base.collectives import Comm
from compress.base.progress import Silent
from compress.engine.residency import shard
from compress.model.layers import find_stacks
from compress.passes.train import Train

# 10 samples a step on three ranks, in micro-batches of 2, leave one of them idle for a while.
OPTIONS = {"steps": 5, "rows": 10, "learning_rate": 1e-3, "held_out": 0.1, "save_every": 2}
ZEROS = {"sparsity": 0.8, "prune_per": "model", "prune_every": 2}
ZEROS |= {"l1": 0.1, "group_lasso": 0.1, "lasso_groups": "inputs"}
PASSES = [
    compress.SparseGPT(pattern="2:4", statistics="float64"),
    Train(**OPTIONS, sparsity=0.7, prune_every=1, prune_from=0.2, prune_until=0.8),
    compress.RTN(scheme="w3a16", group_size=16, grid="asymmetric"),
    # The output head is the root's, and not whole outside of its forward; a step's embeddings are of all ranks.
    Train(**OPTIONS, **ZEROS, features=0.1, task=0.1, relations=0.1, contrastive=0.1),
]
# What is no layer of a block: the embedding, which is the root's, with its head, and keys and values.
TABLES = [
    compress.Embeddings(scheme="w4a16", group_size=16),
    compress.RTN(scheme="w4a16", group_size=16),
    Train(steps=2, rows=4, learning_rate=1e-3, scale_rate=1e-2, held_out=0.0, task=0.1),
    compress.KVCache(granularity="head"),
]
# Nothing runs before it: FSDP has not seen the layers yet when they begin to prune.
FIRST = [Train(steps=2, rows=4, learning_rate=1e-4, sparsity=0.5, on_policy=0.5)]
# A rate that is chosen, and one that does harm, of which nothing is kept.
CHOSEN = [
    compress.RTN(scheme="w2a16", group_size=16),
    Train(steps=2, rows=4),
    Train(steps=1, rows=4, learning_rate=1.0),
]
DATA = {"calibration": tokens(8), "training": tokens(20, seed=4), "batch_size": 2, "verify": False}


class StopAfterThree(Silent):
    """Interrupts a run when the third step of a training is finished."""

    def step(self, done: int, total: int, what: str) -> None:
        if what.startswith("step 3"):
            raise KeyboardInterrupt


def own_loop(model_at: Path, output: Path, sharded: str = "never") -> None:
    """A loop of one's own, of a model that is sharded before or after it is prepared, or never."""
    model = AutoModelForCausalLM.from_pretrained(model_at)
    comm = Comm()

    def sharded_now() -> None:
        shard(model, find_stacks(model), init_device_mesh("cpu", (comm.world,)))

    if sharded == "before":
        sharded_now()
    passes = compress.RTN(scheme="w3a16", group_size=16, grid="asymmetric")
    prepared = compress.prepare_qat(model, passes, batch_size=2)
    if sharded == "after":
        sharded_now()
    optimizer = torch.optim.AdamW(prepared.groups(1e-3))
    for step in range(3):
        for half in range(2):  # gradients add up over backward passes
            ids = tokens(8, seed=40 + step)[4 * half + comm.rank : 4 * half + 4 : comm.world]
            (model(input_ids=ids, labels=ids).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared.convert(output, verify=False)


def keep_history(folder: Path, name: str, result: compress.Result) -> None:
    """Write the history that the first rank has seen. Ranks that write one file write into each other's text."""
    if Comm().rank == 0:
        (folder / f"losses-{name}.json").write_text(json.dumps(result.record.training))


def run(rank: int, world: int, folder: Path) -> None:
    join(rank, world, folder)
    common = {**DATA, "fsdp": True}
    model = folder / "model"
    if world == 2:
        result = compress.quantize(model, PASSES, output=folder / "out-2", **common)
        keep_history(folder, "2", result)
        with suppress(KeyboardInterrupt):
            compress.quantize(model, PASSES, output=folder / "resumed", reporter=StopAfterThree(), **common)
        compress.quantize(model, FIRST, output=folder / "first-2", **common)
        result = compress.quantize(model, CHOSEN, output=folder / "chosen-2", **common)
        keep_history(folder, "chosen", result)
        result = compress.quantize(folder / "tied", TABLES, output=folder / "tables-2", **common)
        keep_history(folder, "tables", result)
        result = compress.quantize(folder / "narrow", PASSES[2:], output=folder / "narrow-2", **common)
        compress.quantize(model, PASSES[2:], output=folder / "copies-2", **{**common, "fsdp": "2x1"})
        for when in ("before", "after"):
            own_loop(folder / "model", folder / f"own-{when}", when)
    else:
        result = compress.quantize(model, PASSES, output=folder / "resumed", resume=True, **common)
        keep_history(folder, "3", result)
    part()


if __name__ == "__main__":
    fork(run)
