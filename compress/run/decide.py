"""Asking a pass about the layers of a site."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compress.comm import Comm
from compress.errors import CompressError
from compress.model.layers import Layer
from compress.model.opened import Opened
from compress.passes.base import Pass, Site
from compress.weights.decision import Decision, joined


def decide(
    p: Pass, site: Sequence[Layer], opened: Opened, comm: Comm, statistics: Sequence[Mapping[str, Any]] = ({},)
) -> dict[str, Decision]:
    """What the pass decides about the layers of a site; with several sets of statistics, it is asked about as many
    parts of each layer. Raises CompressError for weights that are not finite."""
    weights = {layer.name: layer.weight for layer in site}
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise CompressError(f"{name} has non-finite weights; the model is damaged")
    scale_dtypes = {layer.name: opened.dtype_of(layer.parameter) for layer in site}
    parts = []
    for i, seen in enumerate(statistics):
        rows = {name: weight.unflatten(0, (len(statistics), -1))[i] for name, weight in weights.items()}
        fitted = p.fitted({weight.shape[1] for weight in rows.values()})
        parts.append(fitted.apply(Site(rows, seen, scale_dtypes, comm)))
    return {name: joined([part[name] for part in parts]) for name in parts[0]}
