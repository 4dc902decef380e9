"""Pruning while a model is trained: ever more of the smallest weights become zero, and the others make up for them.

    s_t = s (1 - (1 - (t - t_0) / (t_n - t_0))^3)     t = t_0, t_0 + dt, ..., t_n     (Zhu & Gupta 2017, equation 1)

of a share s, from no zeros on (s_i = 0 in arXiv 1710.01878). Of a pattern N:M, floor((M - N) s_t / s) of every M inputs
in a row are zero, so that the last step on the way to 2:4 is 3:4 (Kao et al. 2022, arXiv 2209.07617).

Departs from the paper: pruned weights stay zero (there a masked weight keeps its number, and may come back), and masks
of earlier passes are extended.

Masks are whole on every rank and the same on all, as they would be in one process: of each layer in its turn the weight
is gathered from its shards and the same best are counted out.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compress.base.collectives import Comm
from compress.model.layers import Layer
from compress.train.rounding.sparsity_options import Per, SparsityOptions
from compress.weights.masks import Choice, Pattern, pruned_before, share_of
from compress.weights.ranking import histogram, lowest

CUBIC = 3


@dataclass(frozen=True)
class Prunable:
    """A layer that is pruned. parameter: the weight as it is trained, which may be a shard. kept: bool [N, K], True for
    weights that stay; changed in place."""

    layer: Layer
    parameter: Tensor
    kept: Tensor

    @torch.no_grad()
    def sizes(self) -> Tensor:
        """[N, K] absolute values of the whole weight, 0 where it is pruned. A collective."""
        weight = self.parameter.detach()
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return torch.where(self.kept, self.layer.matrix(whole).abs(), 0.0)


def last_pruning(steps: int, options: SparsityOptions) -> int:
    """The step, counted from 0, before which the last pruning takes place: masks do not change after it."""
    return min(steps - 1, round(options.prune_until * steps))


def progress_at(step: int, steps: int, options: SparsityOptions) -> float | None:
    """Progress of pruning before a step, counted from 0: 0 to 1, by the cubic schedule; None where masks stay as they
    are."""
    last = last_pruning(steps, options)
    first = min(last, round(options.prune_from * steps))
    if not first <= step <= last or ((step - first) % options.prune_every and step != last):
        return None
    gone = 1.0 if first == last else (step - first) / (last - first)
    return 1 - (1 - gone) ** CUBIC


def pattern_at(pattern: Pattern, progress: float) -> Pattern | None:
    """A pattern on the way to the final one; None while nothing is pruned."""
    pruned = int(progress * (pattern.length - pattern.kept))
    return Pattern(pattern.length - pruned, pattern.length) if pruned else None


def prune_to(layers: Mapping[str, Prunable], share: float, per: Per, comm: Comm) -> None:
    """Make the smallest weights zero, of all layers together or in each, until so many are. A collective."""
    shares = _shares(layers, share, comm) if per == "model" else dict.fromkeys(layers, share)
    for name, each in layers.items():
        each.kept.copy_(Choice(None, shares[name], per != "row").kept(each.sizes(), each.kept))


def _shares(layers: Mapping[str, Prunable], share: float, comm: Comm) -> dict[str, float]:
    """The share that each layer loses where the weights of all are ranked together; each rank counts some rows."""
    sizes = {name: each.kept.numel() for name, each in layers.items()}
    pruned = pruned_before(sum(sizes.values()), share)
    if not pruned:
        return dict.fromkeys(layers, 0.0)
    found = {name: histogram(each.sizes()[comm.rows_of(len(each.kept))].float(), comm) for name, each in layers.items()}
    counts = lowest(found, pruned)
    return {name: share_of(counts[name], size) for name, size in sizes.items()}


def zeros_of(masks: Collection[Tensor]) -> float:
    """The share of weights that masks make zero."""
    return 1 - sum(int(kept.sum()) for kept in masks) / sum(kept.numel() for kept in masks)


@dataclass(frozen=True)
class Pruning:
    """Prunes layers of a model that is trained for so many steps."""

    layers: Mapping[str, Prunable]
    steps: int
    options: SparsityOptions
    comm: Comm

    def __call__(self, step: int) -> dict[str, float]:
        """Prune before a step, counted from 0; {"sparsity": the share of zeros}, where that may have changed."""
        progress = progress_at(step, self.steps, self.options)
        if progress is None:
            return {}
        pattern = self.options.final_pattern
        if pattern is None:
            prune_to(self.layers, progress * self.options.sparsity, self.options.prune_per, self.comm)
        elif (now := pattern_at(pattern, progress)) is not None:
            for each in self.layers.values():
                each.kept.copy_(Choice(now, 0.0, together=False).kept(each.sizes(), each.kept))
        return {"sparsity": zeros_of([each.kept for each in self.layers.values()])}
