"""A sample's embedding, and those of all samples of a step, from which a student's is told apart.

Negatives are the other samples of the step, on whatever rank and in whatever micro-batch they are: the teacher, which
has no gradient, is shown the whole step first. So the loss depends on neither ranks nor micro-batches.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.train.inputs.samples import NUMBER, Batch, Rows, micro_batches, token_mask
from compress.train.losses.contrastive import Candidates


def pool(hidden_BTD: Tensor, batch: Batch) -> Tensor:
    """[B, D] the mean over the tokens that are no padding; over all, of samples that are no text."""
    mask = token_mask(batch).to(hidden_BTD.device)
    if mask.ndim == 1:
        return hidden_BTD.flatten(1, -2).mean(1)
    # Not hidden * mask: padding may hold NaN.
    total_BD = hidden_BTD.masked_fill(~mask.unsqueeze(-1), 0).sum(1)
    return total_BD / mask.sum(1, keepdim=True).clamp(min=1)


class StepEmbeddings:
    """The embeddings of a step's samples: rows_CD, in the order of numbers_C, their numbers in the training set."""

    def __init__(self, rows_CD: Tensor, numbers_C: Tensor) -> None:
        numbers_C, order = numbers_C.sort(stable=True)
        first = torch.ones_like(numbers_C, dtype=torch.bool)
        first[1:] = numbers_C[1:] != numbers_C[:-1]  # a sample that occurs twice in a step is not its own negative
        self.rows_CD, self.numbers_C = rows_CD[order][first], numbers_C[first]

    def candidates(self, batch: Batch) -> Candidates:
        """The candidates for the samples of a batch."""
        return Candidates(self.rows_CD, torch.searchsorted(self.numbers_C, batch[NUMBER].to(self.numbers_C.device)))


def embeddings_of_step(
    of: Callable[[Batch], Tensor], rows: Rows, indices: Sequence[int], micro: int, comm: Comm
) -> StepEmbeddings:
    """The embeddings of all samples of a step, on every rank. of: computes those of a batch. A collective."""
    embeddings, numbers = [], []
    for part, counting in micro_batches(indices, micro, comm):
        batch = rows.take(part)
        rows_BD = of(batch)
        kept = len(part) if counting else 0
        embeddings.append(rows_BD[:kept])
        numbers.append(batch[NUMBER][:kept].to(rows_BD.device))
    lengths = comm.gather_objects(sum(map(len, embeddings)))
    return StepEmbeddings(*(comm.gather_rows(torch.cat(each), lengths) for each in (embeddings, numbers)))
