"""A teacher that is not there: what it said of every sample, kept as its k most probable tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.train.inputs.rows import NUMBER
from compress.train.losses.top_k import TopK


@dataclass(frozen=True)
class TopKRows:
    """log_probs_NTk: of N samples' tokens that have a next one; indices_NTk: integers, in a vocabulary of that size."""

    log_probs_NTk: Tensor
    indices_NTk: Tensor
    temperature: float
    vocabulary: int

    def of(self, batch: Mapping[str, Tensor], device: torch.device) -> TopK:
        """Of the samples of a batch, by their numbers in the training set."""
        numbers = batch[NUMBER]
        indices = self.indices_NTk[numbers].long()
        return TopK(self.log_probs_NTk[numbers].to(device), indices.to(device), self.temperature)
