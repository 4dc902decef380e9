"""The ranks of the sharded test of losses: losses_worker.py FOLDER. Ranks are forked from one process."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.train.losses.chunked_logits import Head, HiddenTeacher, chunked_logits_loss
from compress.train.losses.contrastive import Candidates, info_nce
from compress.train.losses.logits import LogitsLoss
from compress.train.losses.loss_sum import Summed

WORLD, TOKENS, D, V = 2, 6, 8, 12
HOW = LogitsLoss(temperature=2.0, alpha=0.5)


class LossHead(nn.Linear):
    """A head whose forward is the loss, as FSDP needs it: its weight is whole only here."""

    def forward(self, hidden: Tensor, teacher: HiddenTeacher, labels: Tensor) -> Summed:
        head = Head(self.weight, self.bias)
        return chunked_logits_loss(hidden, head, teacher, labels_T=labels, how=HOW, chunk_values=2 * V)


def made() -> nn.ModuleDict:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    return nn.ModuleDict({"body": body, "head": LossHead(D, V)}).double()


def batch() -> tuple[Tensor, HiddenTeacher, Tensor]:
    """Of both ranks; all that the second one has is padding."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (WORLD * TOKENS, V))
    labels = torch.arange(WORLD * TOKENS) % V
    labels[TOKENS - 2 :] = -100
    return x, HiddenTeacher(x.roll(1, 0), Head(weight)), labels


def gradients(model: nn.ModuleDict, part: slice, ranks: int) -> dict[str, Tensor]:
    """Of one step: the sum of all losses of all ranks over all counts, and how alike the embeddings are."""
    x, teacher, labels = batch()
    hidden = model["body"](x[part])
    found = model["head"](hidden, HiddenTeacher(teacher.hidden_TE[part], teacher.head), labels[part])
    alike = info_nce(hidden, Candidates(x, torch.arange(len(x))[part]))
    counts = torch.stack([found.count, alike.count])
    if ranks > 1:
        Comm().all_reduce(counts)
    # FSDP takes the mean over ranks, a step the sum.
    (ranks * (found.total / counts[0] + alike.total / counts[1])).backward()
    return {name: each.grad.full_tensor() if ranks > 1 else each.grad for name, each in model.named_parameters()}


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model = made()
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model["body"], mesh=mesh)
    fully_shard(model["head"], mesh=mesh, reshard_after_forward=True)
    found = gradients(model, slice(rank * TOKENS, (rank + 1) * TOKENS), WORLD)
    try:
        chunked_logits_loss(torch.zeros(1, D).double(), Head(model["head"].weight), labels_T=torch.zeros(1).long())
        refused = ""
    except InputError as error:
        refused = str(error)
    if rank == 0:
        torch.save((found, refused), folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(run, (Path(sys.argv[1]),), nprocs=WORLD, start_method="fork")
