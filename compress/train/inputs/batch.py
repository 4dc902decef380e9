"""What a batch says about its samples: which tokens count, and what is to be predicted."""

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.errors import InputError
from compress.train.inputs.rows import LABELS, NUMBER
from compress.train.losses.summed import IGNORED

Batch = Mapping[str, Tensor]


def inputs_of(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """What a model is called with."""
    return {name: tensor.to(device) for name, tensor in batch.items() if name not in (LABELS, NUMBER)}


def samples_of(batch: Batch) -> int:
    """How many samples a batch has."""
    return len(next(iter(batch.values())))


def is_text(batch: Batch) -> bool:
    """Whether every token of a batch has a next one to be predicted: token ids without labels of another kind."""
    return "input_ids" in batch and (LABELS not in batch or batch[LABELS].shape == batch["input_ids"].shape)


def token_mask(batch: Batch) -> Tensor:
    """[B, T] which tokens are no padding; [B] of samples that are no text."""
    if "attention_mask" in batch:
        return batch["attention_mask"] != 0
    if "input_ids" in batch:
        return torch.ones_like(batch["input_ids"], dtype=torch.bool)
    return torch.ones(samples_of(batch), dtype=torch.bool)


def labels_of(batch: Batch) -> Tensor:
    """[B, T - 1] the next token, where neither it nor the one before it is padding, and its label does not say -100."""
    labels = batch.get(LABELS, batch["input_ids"])
    mask = token_mask(batch)
    return labels[:, 1:].masked_fill(~(mask[:, 1:] & mask[:, :-1]), IGNORED)


def needed_labels(batch: Batch) -> Tensor:
    """[B] the class of every sample."""
    if LABELS not in batch:
        raise InputError("task is the cross entropy with labels, and the batches have none; give `labels` in each")
    return batch[LABELS]
