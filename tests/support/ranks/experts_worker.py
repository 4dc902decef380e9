"""Ranks that share out the experts of a mixture, two and then three: experts_worker.py FOLDER."""

import json
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from commands import DRIFT_GPTQ, PLAIN_GPTQ, StopAfterOne
from forked import fork, join, part
from mixtures import MadeDense, tokens

import compress
from compress.base.collectives import Comm
from compress.inference.load import dense_model
from compress.model.experts import Experts

# By inputs, by nothing, with masks and values that stay dense, and by ranges that all experts of a block share.
METHODS = {
    "gptq": compress.GPTQ(scheme="w4a16", group_size=-1, statistics="float64", **DRIFT_GPTQ),
    "rtn": compress.RTN(scheme="w4a16", group_size=16),
    "pruned": [compress.SparseGPT(pattern="2:4", statistics="float64"), compress.only(compress.RTN(), "*.experts.*")],
    "ranges": compress.RTN(scheme="fp8", activations="static"),
}
COMMON = {"calibration": tokens(6), "batch_size": 2, "verify": False}


class Damaged(compress.GPTQ):
    """Fails at one expert, which one rank holds."""

    def apply(self, site):
        if "model.layers.1.mlp.experts.0.down_proj" in site.weights:
            raise compress.CompressError("the first expert is damaged")
        return super().apply(site)


def damage(folder: Path) -> str:
    """What a rank says of a failure at an expert, be it its own or not."""
    try:
        compress.quantize(
            folder / "model",
            Damaged(scheme="w4a16", group_size=-1, **PLAIN_GPTQ),
            output=folder / "damaged",
            fsdp=True,
            overwrite=True,
            **COMMON,
        )
    except compress.CompressError as error:
        return str(error)
    return ""


def run(rank: int, world: int, folder: Path) -> None:
    join(rank, world, folder)
    computed: set[str] = set()
    expert = Experts._expert
    Experts._expert = lambda self, i, x: computed.add(str(i)) or expert(self, i, x)
    for name, passes in METHODS.items():
        compress.quantize(folder / "model", passes, output=folder / f"{name}-{world}", fsdp=True, **COMMON)
    experts = Comm().gather_objects(sorted(computed))
    Experts._expert = expert
    dense_model._values = made = MadeDense()
    compress.quantize(folder / "float8", METHODS["gptq"], output=folder / f"float8-{world}", fsdp=True, **COMMON)
    most = Comm().gather_objects(made.most)
    dense_model._values = made.make
    how = {"output": folder / f"copies-{world}", "fsdp": f"{world}x1", **COMMON}
    compress.quantize(folder / "model", METHODS["gptq"], **how)
    # The three go on with what one process began, and with what the two have begun.
    for name in ("one", "two"):
        how = {"output": folder / name, "fsdp": True, "resume": True, **COMMON}
        if world == 3:
            compress.quantize(folder / "model", METHODS["gptq"], **how)
        elif name == "two":
            with suppress(KeyboardInterrupt):
                compress.quantize(folder / "model", METHODS["gptq"], reporter=StopAfterOne(), **how)
    said = Comm().gather_objects(damage(folder))
    if rank == 0:
        (folder / f"found-{world}.json").write_text(json.dumps({"experts": experts, "said": said, "dense": most}))
    dist.barrier()
    part()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork(run)
