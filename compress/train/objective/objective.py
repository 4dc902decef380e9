"""The training objective of a student: like its teacher in logits, hidden states and attention, and right about its
task.

Every loss is a sum over tokens or samples, divided by their number in the whole step, over all ranks and micro-batches:
the gradient does not depend on how samples are spread over these.

Where logits are plainly those of a head (`heads.py`), neither those of the student nor those of a teacher are ever
whole: losses on them are taken where the head is reached, a few tokens at a time (`losses/chunked.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.model.vocabulary import over_vocabulary, padded_alike
from compress.train.inputs.samples import (
    Batch,
    Rows,
    inputs_of,
    is_text,
    labels_of_places,
    needed_labels,
    next_tokens,
    predicts_next,
    samples_of,
    token_mask,
)
from compress.train.inputs.teacher_predictions import TopKRows, check_offline
from compress.train.losses.chunked_logits import HiddenTeacher, chunked_logits_loss
from compress.train.losses.contrastive import info_nce
from compress.train.losses.logits import LogitsLoss, Teacher, logits_loss
from compress.train.losses.loss_sum import IGNORED, Summed
from compress.train.objective import states
from compress.train.objective.heads import OutputHead, output_head
from compress.train.objective.outputs import ModelOutputs, look
from compress.train.objective.sample_embeddings import StepEmbeddings, embeddings_of_step, pool
from compress.train.options import TrainingOptions

Totals = dict[str, Tensor]
Of = Callable[..., Summed]  # a loss on logits that lacks a teacher and labels


class Objective(nn.Module):
    """options: the losses and their weights. student, teacher: models that are called with a batch's inputs, or, for
    the teacher, its cached top k; the teacher is not changed. Its own parameters are projectors, where widths of hidden
    states differ. notes: remarks for the user, filled by `begin`."""

    def __init__(self, options: TrainingOptions, student: nn.Module, teacher: nn.Module | TopKRows | None) -> None:
        super().__init__()
        self.options, self.weights = options, options.weights
        self.offline = teacher if isinstance(teacher, TopKRows) else None
        # A tuple: they are no parts of this module.
        self.models = (student, teacher if isinstance(teacher, nn.Module) else None)
        self.projectors = nn.ModuleList()
        self.embedder: nn.Module = nn.Identity()
        self.heads: tuple[OutputHead | None, OutputHead | None] = (None, None)
        self.vocabulary: int | None = None  # the student's, where the teacher's is padded to another length
        self.length: int | None = None  # predictions of a sample, where these are of positions and not of next tokens
        self.step: StepEmbeddings | None = None
        self.notes: list[str] = []

    def counts(self, batch: Batch) -> dict[str, int]:
        """The number of tokens or samples that each loss counts in a batch, without calling the models."""
        labels = self._labels(batch)
        predicted = samples_of(batch) if labels is None else int((labels != IGNORED).sum())
        labelled = int((self._task_labels(batch, labels) != IGNORED).sum()) if "task" in self.weights else 0
        found = dict.fromkeys(self.weights, int(token_mask(batch).sum()))
        found |= {"logits": predicted, "task": labelled, "contrastive": samples_of(batch)}
        return {name: found[name] for name in self.weights}

    def is_by_token(self, batch: Batch) -> bool:
        """True if losses on logits are of tokens or positions, False if they are of samples."""
        return self._labels(batch) is not None

    def _labels(self, batch: Batch) -> Tensor | None:
        """The label of each prediction of a token or position, -100 where it does not count; None for samples."""
        if predicts_next(self.models[0], batch):
            return next_tokens(batch)
        return None if self.length is None else labels_of_places(batch, self.length)

    def _task_labels(self, batch: Batch, labels: Tensor | None) -> Tensor:
        """The labels that cross entropy takes. labels: those of tokens or positions."""
        if not predicts_next(self.models[0], batch):
            given = needed_labels(batch, (samples_of(batch), *([] if self.length is None else [self.length])))
            return given if labels is None else labels
        assert labels is not None
        return labels

    def forward(self, batch: Batch) -> Totals:
        """The sum of each loss over a batch."""
        theirs, says = self._taught(batch)
        totals: Totals = {}
        student, head = self.models[0], self.heads[0]

        def take(hidden: Tensor) -> None:
            assert head is not None
            chosen = predicting(student, hidden, batch)
            totals.update(self._on_logits(partial(chunked_logits_loss, chosen, head.whole), batch, says, chosen.device))

        own = look(student, batch, self.options, head, take)
        if head is not None and own.logits is not None:
            # Adds 0, whose gradient tells FSDP's root to go backward.
            totals = {name: total + 0 * own.logits.sum() for name, total in totals.items()}
        elif own.logits is not None:
            logits = predicting(student, own.logits, batch)
            totals.update(self._on_logits(partial(logits_loss, logits), batch, says, logits.device))
        if theirs is not None:
            totals.update(self._on_states(own, theirs, batch))
        return {name: totals[name] for name in self.weights}

    @torch.no_grad()
    def _taught(self, batch: Batch) -> tuple[ModelOutputs | None, Teacher | HiddenTeacher | None]:
        """(The teacher's outputs for a batch, its logits or a stand-in for them); None where there are none."""
        teacher, head = self.models[1], self.heads[1]
        if self.offline is not None:
            return None, self.offline.of(batch, next(self.models[0].parameters()).device)
        if teacher is None:
            return None, None
        stand_ins: list[HiddenTeacher] = []

        def take(hidden: Tensor) -> None:
            assert head is not None
            stand_ins.append(HiddenTeacher(predicting(self.models[0], hidden, batch), head.whole, self.vocabulary))

        theirs = look(teacher, batch, self.options, head, take)
        if stand_ins:
            return theirs, stand_ins[0]
        if theirs.logits is None:
            return theirs, None
        logits = predicting(self.models[0], theirs.logits, batch)
        return theirs, logits if self.vocabulary is None else over_vocabulary(logits, self.vocabulary)

    def _on_logits(self, loss: Of, batch: Batch, says: Teacher | HiddenTeacher | None, device: torch.device) -> Totals:
        """The losses on logits. loss: `logits_loss` on the student's logits, or a function that needs none."""
        options, totals = self.options, Totals()
        labels = self._labels(batch)
        if "logits" in self.weights:
            how = LogitsLoss(kind=options.divergence, temperature=options.temperature, tail=options.tail)
            totals["logits"] = loss(says, labels_T=None if labels is None else labels.to(device), how=how).total
        if "task" in self.weights:
            wanted = self._task_labels(batch, labels).to(device)
            totals["task"] = loss(labels_T=wanted, how=LogitsLoss(alpha=0.0)).total
        return totals

    def _on_states(self, own: ModelOutputs, theirs: ModelOutputs, batch: Batch) -> Totals:
        """The losses on hidden states, attention maps and vectors."""
        options, totals = self.options, Totals()
        mask = token_mask(batch).to(next(self.models[0].parameters()).device)
        if "features" in self.weights:
            totals["features"] = states.features(own, theirs, mask, options, list(self.projectors))
        if "attention" in self.weights:
            totals["attention"] = states.attention(own, theirs, mask, options)
        if "relations" in self.weights:
            totals["relations"] = states.relations(own, theirs, mask, options)
        if "contrastive" in self.weights:
            assert self.step is not None
            embedding_ND = self.embedder(pool(own.hidden[-1], batch))
            candidates = self.step.candidates(batch)
            totals["contrastive"] = info_nce(embedding_ND, candidates, temperature=options.contrast).total
        return totals

    def total(self, losses: Mapping[str, float | int]) -> float:
        """The weighted sum of the mean of each loss."""
        return math.fsum(weight * losses[name] for name, weight in self.weights.items())

    def of_outputs(self, losses: Mapping[str, float | int]) -> float:
        """Weighted sum of losses on outputs, which a model is judged by; of all losses where those weigh nothing."""
        outputs = {name: weight for name, weight in self.weights.items() if name in ("logits", "task")}
        return math.fsum(weight * losses[name] for name, weight in (outputs or self.weights).items())

    @torch.no_grad()
    def begin_step(self, rows: Rows, indices: Sequence[int], micro: int, comm: Comm) -> None:
        """Compute the teacher's embeddings of a whole step, where the contrastive loss needs them. A collective."""
        teacher = self.models[1]
        if "contrastive" in self.weights:
            assert teacher is not None

            def embedding(batch: Batch) -> Tensor:
                return pool(look(teacher, batch, self.options).hidden[-1], batch)

            self.step = embeddings_of_step(embedding, rows, indices, micro, comm)

    @torch.no_grad()
    def begin(self, rows: Rows) -> None:
        """Look at a sample: find heads, and make projectors where the widths of hidden states differ. rows: all that
        are trained on. A collective."""
        student, teacher = self.models
        batch = rows.take([0])
        device = next(student.parameters()).device
        if ("attention" in self.weights or "relations" in self.weights) and not is_text(batch):
            raise InputError("attention and relations are of tokens of text; leave them out")
        if {"logits", "task"} & self.weights.keys():
            self._find_heads(batch, inputs_of(batch, device))
        if teacher is None or not {"features", "contrastive"} & self.weights.keys():
            return
        own, theirs = (look(model, batch, self.options) for model in (student, teacher))
        if own.hidden[-1].shape[-1] != theirs.hidden[-1].shape[-1]:
            made = states.make_projectors(self.options, own, theirs)
            self.embedder = made.pop() if self.options.contrastive else self.embedder
            self.projectors = nn.ModuleList(made)

    def _find_heads(self, batch: Batch, inputs: Mapping[str, Tensor]) -> None:
        """See whether logits are of positions, and find the heads of both models, whose logits then need not be
        computed. Raises InputError for other vocabularies."""
        student, teacher = self.models
        head, why, logits = output_head(student, inputs)
        if logits is not None and self.offline is not None:
            check_offline(self.offline, logits.shape[-1])
        if logits is None or logits.ndim != len("BTV"):
            return  # of samples
        size = logits.shape[-1]
        self.length = None if predicts_next(student, batch) else logits.shape[1]
        theirs, other, logits = None, "", None
        if teacher is not None and "logits" in self.weights:
            theirs, other, logits = output_head(teacher, inputs)
            if logits is not None and logits.shape[-1] != size:
                self.vocabulary = size if padded_alike(size, logits.shape[-1]) else None
        if head is None:
            self.notes.append(f"logits of {type(student).__name__} are made as a whole: {why}")
            return
        if other:
            self.notes.append(f"the teacher's logits ({type(teacher).__name__}) are made as a whole: {other}")
        self.heads = (head, theirs)


def predicting(model: nn.Module, values: Tensor, batch: Batch) -> Tensor:
    """The logits, or the hidden states that these are made of, that predict a label of the model's: of next tokens all
    but the last one's, [B, T - 1, ...]."""
    return values[:, :-1] if values.ndim == len("BTV") and predicts_next(model, batch) else values
