"""The samples of a batch: the tokens that count, and the labels to predict."""

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.train.inputs.samples import LABELS, NUMBER
from compress.train.losses.loss_sum import IGNORED

Batch = Mapping[str, Tensor]


def inputs_of(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The model's keyword arguments: the batch without labels and sample numbers, on the device."""
    return {name: tensor.to(device) for name, tensor in batch.items() if name not in (LABELS, NUMBER)}


def samples_of(batch: Batch) -> int:
    """The number of samples in a batch."""
    return len(next(iter(batch.values())))


def is_text(batch: Batch) -> bool:
    """True for batches of text, where every token predicts the next: token ids without labels, or with one label per
    token."""
    return "input_ids" in batch and (LABELS not in batch or batch[LABELS].shape == batch["input_ids"].shape)


def token_mask(batch: Batch) -> Tensor:
    """[B, T], True for tokens that are not padding; [B] for samples that are not text."""
    if "attention_mask" in batch:
        return batch["attention_mask"] != 0
    if "input_ids" in batch:
        return torch.ones_like(batch["input_ids"], dtype=torch.bool)
    return torch.ones(samples_of(batch), dtype=torch.bool)


def labels_of(batch: Batch) -> Tensor:
    """[B, T - 1] the next token; -100 where it or the token before it is padding, or where its label is -100."""
    labels = batch.get(LABELS, batch["input_ids"])
    mask = token_mask(batch)
    return labels[:, 1:].masked_fill(~(mask[:, 1:] & mask[:, :-1]), IGNORED)


def needed_labels(batch: Batch) -> Tensor:
    """[B] the class of every sample."""
    if LABELS not in batch:
        raise InputError("task is the cross entropy with labels, and the batches have none; give `labels` in each")
    return batch[LABELS]
