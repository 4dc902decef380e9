"""Losses on the hidden layers of two models, a mean over pairs of layers of sums over tokens; and projectors from the
student's hidden states to the teacher's, where their widths differ."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from compress.train.losses.attention import attention_loss
from compress.train.losses.features import features_loss, layer_pairs
from compress.train.losses.loss_sum import Summed
from compress.train.losses.options import LossOptions
from compress.train.losses.relations import relations_loss
from compress.train.objective.outputs import ModelOutputs, Vectors
from compress.train.options import TrainingOptions

T = TypeVar("T")
Both = tuple[ModelOutputs, ModelOutputs]  # the student's outputs, and the teacher's
SIDES = {"values": ("value",), "all": ("query", "key", "value")}


def pairs_of(own: Sequence[T], theirs: Sequence[T], options: LossOptions) -> list[tuple[T, T]]:
    """Pairs of the student's and the teacher's items, by the layer map."""
    return [(own[s], theirs[t]) for s, t in layer_pairs(len(own), len(theirs), options.layer_map)]


def features(
    own: ModelOutputs, theirs: ModelOutputs, mask: Tensor, options: LossOptions, projectors: Sequence[nn.Module]
) -> Tensor:
    """Loss on hidden states. projectors: from the student's width to the teacher's, one a pair; none where widths are
    equal."""
    pairs = pairs_of(own.hidden[1:], theirs.hidden[1:], options)
    return _mean(
        features_loss(project(s), t, mask_T=mask, distance=options.distance)
        for project, (s, t) in zip(projectors or [nn.Identity()] * len(pairs), pairs, strict=True)
    )


def attention(own: ModelOutputs, theirs: ModelOutputs, mask: Tensor, options: LossOptions) -> Tensor:
    """Loss on attention maps."""
    return _mean(
        attention_loss(s, t, mask_BK=mask, measure=options.measure, heads=options.heads)
        for s, t in pairs_of(own.maps, theirs.maps, options)
    )


def relations(own: ModelOutputs, theirs: ModelOutputs, mask: Tensor, options: LossOptions) -> Tensor:
    """Loss on the relations of the vectors that attention is called with."""
    return _mean(
        _related(s, t, side, mask, options.relation_heads)
        for s, t in pairs_of(own.vectors, theirs.vectors, options)
        for side in SIDES[options.related]
    )


def _related(own: Vectors, theirs: Vectors, side: str, mask: Tensor, heads: int) -> Summed:
    s_BHTd, t_BHTd = getattr(own, side), getattr(theirs, side)
    s_BTD, t_BTE = (each.transpose(1, 2).flatten(2) for each in (s_BHTd, t_BHTd))
    return relations_loss(s_BTD, t_BTE, heads or t_BHTd.shape[1], mask_BT=mask, causal=theirs.causal)


def _mean(found: Iterable[Summed]) -> Tensor:
    return torch.stack([each.total for each in found]).mean()


def make_projectors(options: TrainingOptions, own: ModelOutputs, theirs: ModelOutputs) -> list[nn.Linear]:
    """A projector for each pair of layers that the features loss compares, then one for embeddings. own, theirs: the
    models' outputs on a batch."""
    last = own.hidden[-1]
    layers = range(1, len(own.hidden)), range(1, len(theirs.hidden))
    count = (len(pairs_of(*layers, options)) if options.features else 0) + bool(options.contrastive)
    widths = last.shape[-1], theirs.hidden[-1].shape[-1]
    generator = torch.Generator().manual_seed(options.seed)
    projectors = [nn.Linear(*widths, bias=False) for _ in range(count)]
    for each in projectors:  # lengths are kept (the regressor of FitNets, arXiv 1412.6550, 2.2)
        nn.init.orthogonal_(each.weight, generator=generator)
    return [each.to(last.device, last.dtype) for each in projectors]
