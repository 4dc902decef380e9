"""The second moments of the gradient of the loss by a layer's outputs, summed over tokens and ranks."""

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.solvers.statistics.hessian import shrinkage_of, symmetric_blocks

# Outputs of a run, at most: moments are kept of outputs of one run.
LONGEST = 1024


def run_length(outputs: int) -> int:
    """The length of the runs of so many outputs: about equal, at most `LONGEST`."""
    return -(-outputs // -(-outputs // LONGEST))


class OutputMoments:
    """Sums of g g^T over tokens, [N, S] in runs of S outputs: the square of each run below that of the one before it,
    columns beyond the last output being zero. Products of a micro-batch are float32, their sums float64: these do not
    depend on the order of micro-batches, or on ranks. Blocks below the diagonal are filled in the result alone."""

    def __init__(self, outputs: int, device: torch.device) -> None:
        self.outputs, self.run = outputs, run_length(outputs)
        runs = -(-outputs // self.run)
        self.total = torch.zeros(runs, self.run, self.run, dtype=torch.float64, device=device)
        self.products = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = 0

    def update(self, gradient_MN: Tensor) -> None:
        """Count the gradients of some tokens."""
        beyond = len(self.total) * self.run - self.outputs
        runs = torch.nn.functional.pad(gradient_MN.float(), (0, beyond))
        runs_RMS = runs.view(len(runs), -1, self.run).transpose(0, 1)
        for part in symmetric_blocks(self.run):
            self.total[:, part, part.start :] += runs_RMS[..., part].transpose(1, 2) @ runs_RMS[..., part.start :]
        squares = runs_RMS.square()
        self.products += squares.sum(2).double().square().sum() - squares.square().sum(dtype=torch.float64)
        self.tokens += len(gradient_MN)

    def add(self, other: "OutputMoments") -> None:
        """Count what another has counted, on any device."""
        self.total += other.total.to(self.total.device)
        self.products += other.products.to(self.products.device)
        self.tokens += other.tokens

    def sync(self, comm: Comm, device: torch.device) -> None:
        """Combine with the other ranks, by a device that ranks exchange tensors of."""
        if not comm.active:
            return
        self.total.copy_(comm.all_reduce(self.total.to(device)))
        self.products.copy_(comm.all_reduce(self.products.to(device)))
        self.tokens = int(comm.all_reduce(torch.tensor(self.tokens, device=device)))

    def result(self) -> tuple[Tensor, float]:
        """(The moments [N, S], float32, of mean diagonal 1, without the expected noise off their diagonal, as `Hessian`
        has it; zeros where every gradient was. The share of that noise, 0 to 1.)"""
        moments = self.total / max(self.tokens, 1)
        for part in symmetric_blocks(self.run):
            moments[:, part.stop :, part] = moments[:, part, part.stop :].transpose(1, 2)
        diagonal = moments.diagonal(dim1=1, dim2=2)
        mean = diagonal.sum() / self.outputs
        noise = shrinkage_of(moments, self.tokens, self.products)
        relied = moments * (1 - noise)
        relied.diagonal(dim1=1, dim2=2).copy_(diagonal)
        scale = 1 / mean if bool(mean > 0) else 0.0
        return (relied * scale).float().view(-1, self.run)[: self.outputs].contiguous(), noise
