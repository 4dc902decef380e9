"""What a student is to be: like its teacher, in logits and hidden states, and right about its task.

Every loss is a sum over what it counts (tokens, samples), divided by how many there are in the whole step, over all
ranks and micro-batches: how samples are spread over these has no say in the gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.errors import InputError
from compress.train.losses.features import features_loss
from compress.train.losses.layers import layer_pairs
from compress.train.losses.logits import LogitsLoss, logits_loss
from compress.train.losses.projector import projector
from compress.train.losses.summed import IGNORED, Summed
from compress.train.options import TrainingOptions
from compress.train.rows import LABELS

Totals = dict[str, Tensor]


@dataclass(frozen=True)
class Seen:
    """What a model made of a batch. logits: [..., V], those that predict a label; hidden: of every layer, [B, T, D],
    the embedding's first."""

    logits: Tensor
    hidden: tuple[Tensor, ...]


class Objective(nn.Module):
    """options: which losses, and their weights. student, teacher: models that are called with a batch's inputs; the
    teacher is left as it is. Its own parameters are projectors, where widths of hidden states differ."""

    def __init__(self, options: TrainingOptions, student: nn.Module, teacher: nn.Module | None) -> None:
        super().__init__()
        self.options = options
        self.models = (student, teacher)  # a tuple: they are no parts of this module
        self.weights = {
            name: weight
            for name, weight in (("logits", options.logits), ("task", options.task), ("features", options.features))
            if weight
        }
        self.projectors = nn.ModuleList()

    def counts(self, batch: Mapping[str, Tensor]) -> dict[str, int]:
        """How much of each loss a batch has, without a look at the models."""
        predicted = int((labels_of(batch) != IGNORED).sum()) if is_text(batch) else samples_of(batch)
        if is_text(batch) or "task" not in self.weights:
            labelled = predicted
        else:
            labelled = int((needed_labels(batch) != IGNORED).sum())
        found = {"logits": predicted, "task": labelled, "features": int(token_mask(batch).sum())}
        return {name: found[name] for name in self.weights}

    def forward(self, batch: Mapping[str, Tensor]) -> Totals:
        """The sum of each loss over a batch."""
        student, teacher = self.models
        own = self._seen(student, batch)
        theirs = None
        if teacher is not None:
            with torch.no_grad():
                theirs = self._seen(teacher, batch)
        totals: Totals = {}
        labels = labels_of(batch).to(own.logits.device) if is_text(batch) else None
        if "logits" in self.weights:
            assert theirs is not None
            how = LogitsLoss(kind=self.options.divergence, temperature=self.options.temperature)
            totals["logits"] = logits_loss(own.logits, theirs.logits, labels_T=labels, how=how).total
        if "task" in self.weights:
            wanted = needed_labels(batch).to(own.logits.device) if labels is None else labels
            totals["task"] = logits_loss(own.logits, labels_T=wanted, how=LogitsLoss(alpha=0.0)).total
        if "features" in self.weights:
            assert theirs is not None
            totals["features"] = self._features(own, theirs, token_mask(batch)).total
        return totals

    def _seen(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Seen:
        device = next(model.parameters()).device
        inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != LABELS}
        options = {"output_hidden_states": True} if "features" in self.weights else {}
        output = model(**inputs, **options)
        logits = getattr(output, "logits", output if isinstance(output, Tensor) else None)
        if logits is None and self.weights.keys() != {"features"}:
            raise InputError(
                f"{type(model).__name__} returns no logits ({type(output).__name__}); give logits=0 task=0 features=1"
            )
        if logits is not None and is_text(batch) and logits.ndim == 3:
            logits = logits[:, :-1]
        hidden = getattr(output, "hidden_states", None) or ()
        if options and not hidden:
            raise InputError(f"{type(model).__name__} returns no hidden states; leave features out")
        return Seen(torch.empty(0) if logits is None else logits, tuple(hidden))

    def _features(self, own: Seen, theirs: Seen, mask: Tensor) -> Summed:
        pairs = layer_pairs(len(own.hidden) - 1, len(theirs.hidden) - 1, self.options.layer_map)
        found = []
        for i, (s, t) in enumerate(pairs):
            hidden = own.hidden[s + 1]
            if self.projectors:
                hidden = self.projectors[i](hidden)
            found.append(
                features_loss(
                    hidden, theirs.hidden[t + 1], mask_T=mask.to(hidden.device), distance=self.options.distance
                )
            )
        return Summed(torch.stack([each.total for each in found]).mean(), found[0].count)

    @torch.no_grad()
    def begin(self, batch: Mapping[str, Tensor]) -> None:
        """Look at a batch once: make projectors where the widths of hidden states differ."""
        student, teacher = self.models
        if "features" not in self.weights or teacher is None:
            return
        own, theirs = self._seen(student, batch), self._seen(teacher, batch)
        width, wider = own.hidden[-1].shape[-1], theirs.hidden[-1].shape[-1]
        if width == wider:
            return
        generator = torch.Generator().manual_seed(self.options.seed)
        count = len(layer_pairs(len(own.hidden) - 1, len(theirs.hidden) - 1, self.options.layer_map))
        made = [projector(width, wider, generator=generator) for _ in range(count)]
        self.projectors = nn.ModuleList(made).to(own.hidden[-1].device, own.hidden[-1].dtype)


def samples_of(batch: Mapping[str, Tensor]) -> int:
    """How many samples a batch has."""
    return len(next(iter(batch.values())))


def is_text(batch: Mapping[str, Tensor]) -> bool:
    """Whether every token of a batch has a next one to be predicted: token ids without labels of another kind."""
    return "input_ids" in batch and (LABELS not in batch or batch[LABELS].shape == batch["input_ids"].shape)


def token_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """[B, T] which tokens are no padding; [B] of samples that are no text."""
    if "attention_mask" in batch:
        return batch["attention_mask"] != 0
    if "input_ids" in batch:
        return torch.ones_like(batch["input_ids"], dtype=torch.bool)
    return torch.ones(samples_of(batch), dtype=torch.bool)


def labels_of(batch: Mapping[str, Tensor]) -> Tensor:
    """[B, T - 1] the next token, where neither it nor the one before it is padding, and its label does not say -100."""
    labels = batch.get(LABELS, batch["input_ids"])
    mask = token_mask(batch)
    return labels[:, 1:].masked_fill(~(mask[:, 1:] & mask[:, :-1]), IGNORED)


def needed_labels(batch: Mapping[str, Tensor]) -> Tensor:
    """[B] the class of every sample."""
    if LABELS not in batch:
        raise InputError("task is the cross entropy with labels, and the batches have none; give `labels` in each")
    return batch[LABELS]
