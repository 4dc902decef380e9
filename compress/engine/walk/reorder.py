"""Putting the channels between the layers of a block in another order before anything in it is decided.

One suspended forward collects a pass's statistics without changing a weight; then channels that may change places
(`model.structure.orders`) get the order that the pass finds for them. The function of the block stays what it was.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.engine.walk.rewrite import Observed
from compress.model.known_edits import Edit
from compress.model.open_block import Opened
from compress.model.structure.orders import Orders
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Reorder
from compress.weights.decision import Figures

FIXED = "an earlier pass has decided about it, or about what it reads"
NOBODY = "no rows that make its inputs can change places with them"


@dataclass(frozen=True)
class Reordered:
    """The edits of a block; figures of the layers whose inputs have another order, and why others have theirs."""

    edits: list[Edit]
    figures: Mapping[str, Figures]
    stayed: Mapping[str, str]


def reorder(
    opened: Opened,
    prefix: str,
    stage: Reorder,
    orders: Orders,
    observed: Mapping[str, Observed],
    decided: Collection[str],
    comm: Comm,
) -> Reordered:
    """Ask a pass for the order of all channels that may change places, and apply it. observed: the layers of the pass,
    with the statistics of their inputs; decided: those that nothing may touch any more."""
    edits: list[Edit] = []
    sums: dict[str, Tensor] = {}
    stayed = dict.fromkeys(observed, NOBODY) | {
        prefix + name: why for name, why in orders.rejected.items() if prefix + name in observed
    }
    for places in orders.found:
        readers = {prefix + name: each for name, each in places.consumers.items() if prefix + name in observed}
        members = {prefix + name for _, name in places.of}
        if not readers:
            continue
        problem = FIXED if not members.isdisjoint(decided) else why_torn(readers, stage.group)
        if problem is not None:
            stayed |= dict.fromkeys(readers, problem)
            continue
        score_RU = torch.cat([_scores(stage, observed[n], n, each, opened, comm) for n, each in readers.items()])
        order_U = stage.order(score_RU)
        edit = places.permuted(order_U.cpu())
        edit.apply(opened.block, opened.dtypes)
        edits.append(edit)
        ordered = score_RU[:, order_U]
        kept = torch.tensor([stage.kept(score_RU), stage.kept(ordered), float(score_RU.sum(dtype=torch.float64))])
        for name in readers:
            stayed.pop(name, None)
            sums[name] = sums.get(name, 0) + kept
    figures = {
        name: {"kept_in_order": float(before / whole), "kept_permuted": float(after / whole)}
        for name, (before, after, whole) in sums.items()
        if whole > 0
    }
    return Reordered(edits, figures, stayed)


def why_torn(readers: Mapping[str, Tensor], group: int) -> str | None:
    """The reason why channels cannot fill whole groups of inputs in a row; None where they do."""
    for places_RU in readers.values():
        width = places_RU.shape[1]
        if width % group:
            return f"{width} inputs may change places, which are no whole groups of {group}"
        steps = places_RU.view(len(places_RU), -1, group)
        if bool((steps[..., 0] % group != 0).any()) or bool((steps.diff(dim=-1) != 1).any()):
            return "inputs that may change places do not lie side by side"
    return None


def _scores(stage: Reorder, seen: Observed, name: str, places_RU: Tensor, opened: Opened, comm: Comm) -> Tensor:
    """[R N, U] of a layer, each copy of the channels below the other."""
    layer, statistics = seen
    site = Site({layer.name: layer.weight}, statistics, {layer.name: opened.dtype_of(layer.parameter)}, comm)
    score_NK = stage.score(site, name)
    return torch.cat([score_NK[:, each.to(score_NK.device)] for each in places_RU])
