"""A teacher known by a file: its k most probable tokens for every sample."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.model.vocabulary import padded_alike
from compress.train.inputs.samples import NUMBER
from compress.train.losses.top_k import TopK


@dataclass(frozen=True)
class TopKRows:
    """log_probs_NTk: of N samples' tokens that have a next one; indices_NTk: integers, ids in a vocabulary of
    `vocabulary` tokens."""

    log_probs_NTk: Tensor
    indices_NTk: Tensor
    temperature: float
    vocabulary: int

    def of(self, batch: Mapping[str, Tensor], device: torch.device) -> TopK:
        """The teacher's top k for the samples of a batch, looked up by their numbers in the training set."""
        numbers = batch[NUMBER]
        indices = self.indices_NTk[numbers].long()
        return TopK(self.log_probs_NTk[numbers].to(device), indices.to(device), self.temperature)


def check_offline(said: TopKRows, vocabulary: int) -> None:
    """Raises InputError for a teacher whose tokens are not those of a student's vocabulary, however far each is
    padded."""
    last = int(said.indices_NTk.max())
    if not padded_alike(said.vocabulary, vocabulary) or last >= vocabulary:
        raise InputError(
            f"tokens of the vocabulary: {vocabulary} of the student, {said.vocabulary} of the cached teacher (up to id "
            f"{last}); cache the logits of a teacher with the same tokens"
        )
