"""The ranks of the sharded tests, two and then three: sharded_worker.py FOLDER. All checks of a launch share it.

Ranks are forked from one process that has imported everything.
"""

import json
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from commands import DRIFT_GPTQ, PLAIN_GPTQ
from experts import Experts, routed, shown
from forked import fork, join, part
from models import build, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from vision import calibration, net

import compress
from compress.base.collectives import Comm
from compress.base.progress import Silent
from compress.checkpoint.write import writer
from compress.engine.plan.existing_zeros import _count_zeros
from compress.engine.residency import Sharded, shard
from compress.model.layers import find_stacks, layers_of
from compress.solvers.statistics.hessian import Hessian
from compress.solvers.statistics.input_statistics import MinMax

EXACT = compress.GPTQ(group_size=16, statistics="float64")
PLAIN = compress.GPTQ(group_size=16, statistics="float64", **PLAIN_GPTQ)
FLOAT32 = compress.GPTQ(group_size=16, **DRIFT_GPTQ)
FLOAT8 = compress.GPTQ(scheme="fp8", activations="static", statistics="float64", **DRIFT_GPTQ)
CONVOLUTIONS = compress.GPTQ(scheme="w3a16", group_size=-1, statistics="float64", **DRIFT_GPTQ)
EXPERTS = compress.GPTQ(group_size=8, statistics="float64", **PLAIN_GPTQ)
EMBEDDINGS = [compress.Embeddings(scheme="w4a16", group_size=16), CONVOLUTIONS]
PAIRS = [{"input_ids": tokens(2, 16, i), "decoder_input_ids": tokens(2, 12, i + 5)} for i in range(4)]
DYNAMIC_CACHES = [compress.RTN(scheme="w8a16", group_size=-1), compress.KVCache()]
# What folds scales and rounds inputs, with statistics that do not depend on the number of ranks.
FOLDING = {
    "awq-gptq": [
        compress.AWQ(group_size=16, statistics="float64", rounding="none"),
        compress.GPTQ(group_size=16, statistics="float64", **DRIFT_GPTQ),
    ],
    "kv-cache": [
        compress.RTN(scheme="w8a16", group_size=-1),
        compress.KVCache(granularity="head", calibrator="percentile", percentile=99.0, histograms=True),
    ],
    "smoothquant": [compress.SmoothQuant(activations="static", calibrator="kl", histograms=True)],
    "outputs": [
        compress.SmoothQuant(
            alpha=0.5,
            activations="static",
            activation_grid="asymmetric",
            outputs="static",
            calibrator="mse",
            histograms=True,
        )
    ],
    "w8a8": [
        compress.GPTQ(
            scheme="w8a8",
            statistics="float64",
            activations="static",
            activation_grid="asymmetric",
            calibrator="moving-average",
            histograms=True,
            **DRIFT_GPTQ,
        )
    ],
}
SOME = ("*.[qk]_proj", "*.o_proj", "*.down_proj")  # beside another at its site, alone, and of other widths
# Sums of terms, their ranks shared out between layers; 8 bits hold no last place of a decomposition.
SUMS = {
    "spqr": compress.only(compress.SpQR(group_size=16, outliers=0.02, sweeps=1, statistics="float64"), *SOME),
    "low-rank": compress.LowRank(share=0.5, factor_bits=8, allocate="layer-loss", statistics="float64"),
    "lqs": compress.only(
        compress.LQS(
            scheme="w2a16",
            group_size=16,
            rank=3,
            factor_bits=8,
            allocate="layer-loss",
            **{"outliers": 0.02, "iterations": 1, "statistics": "float64", **DRIFT_GPTQ},
        ),
        *SOME,
    ),
}
# Masks that ask for more than a layer before they begin: two runs for all of them.
MASKS = {
    "ranked": [
        compress.only(compress.Wanda(pattern="2:4", permute=3), "*.down_proj"),
        compress.but(compress.Magnitude(per="layer", sparsity=0.25), "*.down_proj"),
        compress.but(compress.Wanda(allocate="layer-loss"), "*.down_proj"),
    ],
    "by-gradients": [
        compress.only(compress.Taylor(per="layer"), "*.self_attn.*"),
        compress.only(compress.Wanda(per="layer", sparsity=0.7), "*.down_proj"),
        compress.only(
            compress.SparseGPT(allocate="layer-loss", statistics="float64", shrink=False), "*.gate_proj", "*.up_proj"
        ),
    ],
}

# Before the model is sharded, every rank cuts its own copy.
STRUCTURE = {
    "structure": [
        compress.Structure(heads=0.5, channels=0.25, hidden=0.5, layers=1, statistics="float64"),
        compress.GPTQ(group_size=16, statistics="float64", **DRIFT_GPTQ),
    ],
    "structure-alone": [compress.Structure(channels=0.25, importance="magnitude", compensate=False)],
    "rotate": [
        compress.Rotation(seed=2, online=True),
        compress.GPTQ(group_size=16, statistics="float64", objective="loss", **DRIFT_GPTQ),
    ],
}


def train(model, steps=3):
    """Losses of a few steps, the same data on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        ids = tokens(seed=10 + step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def statistics(comm):
    """Statistics of one stream of rows, each rank its share, and the same in one go."""
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    device = torch.device("cpu")
    parts = [Hessian(8, device, dtype=torch.float64), MinMax(8, device)]
    whole = [Hessian(8, device, dtype=torch.float64), MinMax(8, device)]
    for statistic in parts:
        for piece in rows.split(7)[comm.rank :: comm.world]:
            statistic.update(piece, None)
        statistic.sync(comm)
    for statistic in whole:
        statistic.update(rows, None)
    hessian = (parts[0].result().hessian - whole[0].result().hessian).abs().max().item()
    bounds = all(torch.equal(a, b) for a, b in zip(parts[1].result(), whole[1].result(), strict=True))
    return {"hessian": hessian, "bounds": bounds, "tokens": parts[0].result().tokens}


def residency(mesh):
    """An edit inside `open` is kept in the shards; outside, every rank holds its share only."""
    model = build("llama")
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    total = sum(p.numel() for p in model.parameters())
    shard(model, find_stacks(model), mesh)
    mine = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    block = model.model.layers[1]
    sharded = Sharded(model, torch.device("cpu"), torch.float64)
    with sharded.open(block) as opened:
        inside = {n: (tuple(p.shape), str(p.dtype), isinstance(p, DTensor)) for n, p in block.named_parameters()}
        with torch.no_grad():
            block.mlp.up_proj.weight.data = block.mlp.up_proj.weight.data * 2
        stored = {n: str(v.dtype) for n, v in opened.stored()}
    expected["model.layers.1.mlp.up_proj.weight"] *= 2
    after = all(torch.equal(p.full_tensor(), expected[n]) for n, p in model.named_parameters())
    return {
        "share": mine / total,
        "plain": all(d == "torch.float64" and not s for _, d, s in inside.values()),
        "stored": set(stored.values()) == {"torch.float32"},
        "kept": after,
        "resharded": all(isinstance(p, DTensor) for p in model.parameters()),
    }


class StopAfterTwo(Silent):
    """Interrupts a run when its second step is finished."""

    def step(self, done: int, total: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt


def restored(mesh):
    """What a run that is stopped leaves of a model that somebody else sharded: everything, and it can be trained."""
    model = build("llama")
    shard(model, find_stacks(model), mesh)
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    passes = (compress.Embeddings(scheme="w4a16"), *FOLDING["awq-gptq"])
    with suppress(KeyboardInterrupt):
        compress.quantize(model, passes, calibration=tokens(8), batch_size=2, reporter=StopAfterTwo())
    same = all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())
    with suppress(compress.InputError):
        compress.quantize(model, STRUCTURE["structure-alone"])
        same = False
    return {"same": same, "losses": train(model)}


def run(rank: int, world: int, folder: Path) -> None:
    join(rank, world, folder)
    comm, found = Comm(), {}
    mesh = init_device_mesh("cpu", (comm.world,))
    common = {"calibration": tokens(8), "batch_size": 2, "fsdp": True, "verify": False}
    written: list[int] = []
    write_tensors = writer.write_tensors
    writer.write_tensors = lambda path, tensors, buffers: (
        written.append(sum(t.nbytes for t in tensors.values())) or write_tensors(path, tensors, buffers)
    )
    compress.quantize(folder / "model", EXACT, output=folder / f"exact-{comm.world}", **common)
    found["written"] = comm.gather_objects(sum(written))
    writer.write_tensors = write_tensors
    for name, passes in MASKS.items():
        compress.quantize(folder / "model", passes, output=folder / f"{name}-{comm.world}", **common)
    if comm.world == 2:
        found["statistics"] = statistics(comm)
        found["residency"] = residency(mesh)
        found["restored"] = restored(mesh)
        compress.quantize(folder / "model", FLOAT32, output=folder / "float32-2", **common)
        compress.quantize(folder / "model", FLOAT8, output=folder / "float8-2", **common)
        rtn = compress.RTN(group_size=16, grid="asymmetric")
        for name, passes in FOLDING.items():
            compress.quantize(folder / "model", passes, output=folder / f"{name}-2", **common)
        for name, passes in STRUCTURE.items():
            compress.quantize(folder / "model", passes, output=folder / f"{name}-2", **common)
        for name, method in SUMS.items():
            compress.quantize(folder / "model", method, output=folder / f"{name}-2", **common)
        compress.quantize(folder / "model", FOLDING["awq-gptq"], output=folder / "refolded", resume=True, **common)
        for name in ("model", "tied"):
            compress.quantize(folder / name, EMBEDDINGS, output=folder / f"embeddings-{name}-2", **common)
        compress.quantize(folder / "tied", EMBEDDINGS, output=folder / "embeddings-resumed", resume=True, **common)
        rest = {k: v for k, v in common.items() if k != "calibration"}
        compress.quantize(folder / "model", rtn, output=folder / "rtn-2", **rest)
        # A model that somebody else sharded, compressed in place, then trained on.
        model = build("llama")
        shard(model, find_stacks(model), mesh)
        compress.quantize(model, PLAIN, calibration=tokens(8), batch_size=2)
        found["losses"] = train(model)
        shard(other := build("llama"), find_stacks(other), mesh)
        compress.quantize(other, DYNAMIC_CACHES, output=folder / "caches-2", verify=False)
        compress.quantize(cnn := net(), CONVOLUTIONS, calibration=calibration(), fsdp=True)
        values = {name: p.full_tensor() for name, p in cnn.named_parameters() if isinstance(p, DTensor)}
        if comm.rank == 0:
            torch.save(values, folder / "cnn-2.pt")
        compress.quantize(folder / "t5", EXACT, output=folder / "t5-2", **{**common, "calibration": PAIRS})
        shard(several := routed(Experts), find_stacks(several), mesh)
        layers = [
            layer for name, block in find_stacks(several)[0].blocks for layer in layers_of(block, name, experts=True)
        ]
        found["zeros"] = {layer.name: _count_zeros(layer, 8) for layer in layers}
        compress.quantize(several, EXPERTS, calibration=shown(), experts=True)
        values = {name: p.full_tensor() for name, p in several.named_parameters() if isinstance(p, DTensor)}
        if comm.rank == 0:
            torch.save(values, folder / "experts-2.pt")
    else:
        compress.quantize(folder / "model", FOLDING["w8a8"], output=folder / f"w8a8-{comm.world}", **common)
    dist.barrier()
    if comm.rank == 0:
        (folder / f"found-{comm.world}.json").write_text(json.dumps(found))
    part()


if __name__ == "__main__":
    fork(run)
