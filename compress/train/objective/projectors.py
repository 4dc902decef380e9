"""Projectors from the student's hidden states to the teacher's, where their widths differ."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from compress.base.collectives import Comm
from compress.train.inputs.batch import Batch, token_mask
from compress.train.inputs.samples import Rows, micro_batches
from compress.train.losses.options import LossOptions
from compress.train.losses.projector import ProjectorFit, projector
from compress.train.objective import states
from compress.train.objective.outputs import ModelOutputs

Both = tuple[ModelOutputs, ModelOutputs]  # the student's outputs, and the teacher's


def make_projectors(
    options: LossOptions,
    outputs: Callable[[Batch], Both],
    seed: int,
    rows: Rows,
    indices: Sequence[int],
    micro: int,
    comm: Comm,
) -> list[nn.Linear]:
    """A projector for each pair of layers that the features loss compares, then one for embeddings. A collective.

    outputs: of both models on a batch. rows, indices: the samples that fitted projectors are fitted to.
    """
    own, theirs = outputs(rows.take([0]))
    last = own.hidden[-1]
    layers = range(1, len(own.hidden)), range(1, len(theirs.hidden))
    pairs = states.pairs_of(*layers, options) if options.features else []
    # An embedding is a mean over tokens: a linear map of it is the mean of the mapped tokens.
    pairs += [(-1, -1)] if options.contrastive else []
    widths = last.shape[-1], theirs.hidden[-1].shape[-1]
    if options.projector == "orthogonal":
        generator = torch.Generator().manual_seed(seed)
        made = [projector(*widths, generator=generator) for _ in pairs]
    else:
        sums = [ProjectorFit(*widths, last) for _ in pairs]
        for part, counting in micro_batches(indices, micro, comm):
            batch = rows.take(part)
            own, theirs = outputs(batch)
            mask = token_mask(batch).to(last.device) * counting
            for each, (s, t) in zip(sums, pairs, strict=True):
                each.add(own.hidden[s], theirs.hidden[t], mask)
        made = [each.projector(comm=comm) for each in sums]
    return [each.to(last.device, last.dtype) for each in made]
