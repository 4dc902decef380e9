"""The samples that are trained on: which of them belong to which step, rank and micro-batch, and what of a batch
counts.

Every rank has all of them (they are token ids and the like). A step's samples are the same whatever the number of ranks
and the size of a micro-batch are: `rows` of a shuffled order, epoch after epoch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.train.losses.loss_sum import IGNORED

LABELS = "labels"
APART = 0x9E3779B1  # Knuth's odd multiplier: seeds are far from each other's epochs
NUMBER = "compress.number"  # of a sample in the training set, beside its inputs


Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """Samples: the model's inputs by name (and `labels`), tensors whose first dimension counts samples."""

    tensors: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def take(self, indices: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """Some samples, as a batch."""
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return {name: tensor[chosen] for name, tensor in self.tensors.items()}

    def numbered(self) -> "Rows":
        """These samples with their numbers, by which a cache or a step identifies them."""
        return Rows({**self.tensors, NUMBER: torch.arange(len(self))})

    def split(self, held_out: float) -> tuple["Rows", "Rows"]:
        """(The samples to train on, the share that is held out: every n-th sample)."""
        count = 0 if held_out == 0 else max(1, round(len(self) * held_out))
        if count >= len(self):
            raise InputError(
                f"{len(self)} samples to train on, of which {count} are held out; give more, or held_out=0"
            )
        out = self._spread(count)
        rest = sorted({*range(len(self))} - {*out})
        return Rows(self.take(rest)), Rows(self.take(out))

    def some(self, most: int) -> "Rows":
        """At most so many of these samples, every n-th."""
        return self if len(self) <= most else Rows(self.take(self._spread(most)))

    def _spread(self, count: int) -> list[int]:
        """So many indices, evenly apart."""
        return [i * len(self) // count for i in range(count)]


def rows_of(batches: Sequence[Mapping[str, Any]]) -> Rows:
    """The samples of ready-made batches. Raises InputError for those that cannot lie in one tensor."""
    names = set(batches[0])
    for batch in batches:
        if set(batch) != names:
            raise InputError(f"batches to train on differ: one has {sorted(names)}, another {sorted(batch)}")
        odd = next((n for n, value in batch.items() if not isinstance(value, Tensor) or value.ndim == 0), None)
        if odd is not None:
            raise InputError(f"{odd} of a batch to train on is no tensor of samples; leave it out")
    tensors = {}
    for name in batches[0]:
        shapes = {tuple(batch[name].shape[1:]) for batch in batches}
        if len(shapes) > 1:
            raise InputError(
                f"{name} of the batches to train on has samples of shapes {sorted(shapes)}; pad them to one length, "
                "with an attention_mask"
            )
        tensors[name] = torch.cat([batch[name] for batch in batches])
    return Rows(tensors)


@dataclass(frozen=True)
class SampleOrder:
    """Assigns samples to steps."""

    samples: int
    rows: int
    seed: int

    def of_step(self, step: int) -> list[int]:
        """The samples of a step, counted from 0."""
        wanted = range(step * self.rows, (step + 1) * self.rows)
        epochs = {place // self.samples for place in wanted}
        orders = {epoch: _shuffled(self.samples, self.seed, epoch) for epoch in epochs}
        return [orders[place // self.samples][place % self.samples] for place in wanted]


@lru_cache(maxsize=2)  # a step reaches into the next epoch
def _shuffled(samples: int, seed: int, epoch: int) -> list[int]:
    # torch's generator on a CPU reads 32 bits of a seed.
    generator = torch.Generator().manual_seed((seed * APART + epoch) % 2**32)
    order: list[int] = torch.randperm(samples, generator=generator).tolist()
    return order


def micro_batches(indices: Sequence[int], size: int, comm: Comm) -> Iterator[tuple[list[int], bool]]:
    """(The samples of a micro-batch of this rank, whether they count). Every rank has as many: where it has fewer
    samples than others, it goes through one that does not count, since collectives need its part."""
    mine = list(indices[comm.rank :: comm.world])
    most = -(-len(indices) // comm.world)
    for start in range(0, most, size):
        part = mine[start : start + size]
        yield part or [indices[0]], bool(part)


def inputs_of(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The model's keyword arguments: the batch without labels and sample numbers, on the device."""
    return {name: tensor.to(device) for name, tensor in batch.items() if name not in (LABELS, NUMBER)}


def samples_of(batch: Batch) -> int:
    """The number of samples in a batch."""
    return len(next(iter(batch.values())))


def is_text(batch: Batch) -> bool:
    """True for batches of token ids, without labels or with one label per token."""
    return "input_ids" in batch and (LABELS not in batch or batch[LABELS].shape == batch["input_ids"].shape)


def predicts_next(model: Any, batch: Batch) -> bool:
    """True where every token predicts the next: text, for a decoder or a model that does not say what it is. Encoders
    and encoder-decoders predict a label for each position."""
    generates = getattr(model, "can_generate", lambda: True)()
    return is_text(batch) and generates and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def token_mask(batch: Batch) -> Tensor:
    """[B, T], True for tokens that are not padding; [B] for samples that are not text."""
    if "attention_mask" in batch:
        return batch["attention_mask"] != 0
    if "input_ids" in batch:
        return torch.ones_like(batch["input_ids"], dtype=torch.bool)
    return torch.ones(samples_of(batch), dtype=torch.bool)


def next_tokens(batch: Batch) -> Tensor:
    """[B, T - 1] the next token; -100 where it or the token before it is padding, or where its label is -100."""
    labels = batch.get(LABELS, batch["input_ids"])
    mask = token_mask(batch)
    return labels[:, 1:].masked_fill(~(mask[:, 1:] & mask[:, :-1]), IGNORED)


def labels_of_places(batch: Batch, length: int) -> Tensor:
    """[B, length] the label of every position, the decoder's where there is one; -100 for padding, and 0 where the
    batch has no such labels."""
    shape = (samples_of(batch), length)
    labels = batch.get(LABELS)
    if labels is None or labels.shape != shape:
        labels = torch.zeros(shape, dtype=torch.int64)
    mask = batch.get("decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    return labels if mask is None or mask.shape != shape else labels.masked_fill(mask == 0, IGNORED)


def needed_labels(batch: Batch, shape: Sequence[int]) -> Tensor:
    """The labels of a batch, which must have this shape: one for every prediction. Raises InputError for others."""
    if LABELS not in batch:
        raise InputError("task is the cross entropy with labels, and the batches have none; give `labels` in each")
    if batch[LABELS].shape != torch.Size(shape):
        raise InputError(f"labels of shape {[*batch[LABELS].shape]} for predictions of shape {[*shape]}; give one each")
    return batch[LABELS]
