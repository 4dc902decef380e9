"""Samples that the student writes itself, for on-policy distillation.

The second half of each sample is replaced by what the student writes behind the first, at temperature 1. The teacher is
asked about these tokens, and no gradient passes through their choice (GKD, Agarwal et al. 2024, arXiv 2306.13649).
"""

import torch
from torch import nn

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.inference.continued import continue_rows
from compress.train.inputs.samples import APART, NUMBER, Batch, Rows


def check_on_policy(rows: Rows, generates: bool) -> None:
    """Raises InputError for a student that generates nothing, and for samples that are not rows of token ids without
    padding, of two tokens or more."""
    if not generates:
        raise InputError(
            "on_policy continues what the student writes, and this one generates no text; give on_policy=0"
        )
    names, mask = sorted(set(rows.tensors) - {NUMBER, "attention_mask"}), rows.tensors.get("attention_mask")
    padded = mask is not None and not bool(mask.all())
    if names != ["input_ids"] or padded or rows.tensors["input_ids"].shape[1] < 2:
        raise InputError(
            f"on_policy continues rows of token ids without padding; these samples have {', '.join(names)}"
            f"{' and padding' if padded else ''}: give text in windows of 2 tokens or more, or on_policy=0"
        )


def written_by(student: nn.Module, batch: Batch, seed: int, comm: Comm) -> Batch:
    """The batch with second halves of the student's own. Every rank generates them all, so that collectives of a
    sharded student are in step, and takes the first rank's."""
    ids_BT = batch["input_ids"]
    length = ids_BT.shape[1] // 2
    begun = ids_BT[:, : ids_BT.shape[1] - length]
    rows = continue_rows(student, begun.tolist(), length, temperature=1.0, seed=seed * APART % 2**32, ends=False)
    own = torch.tensor(comm.gather_objects(rows)[0], dtype=ids_BT.dtype)
    return {**batch, "input_ids": torch.cat([begun, own], 1)}
