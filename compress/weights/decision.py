"""What a pass decides for a layer, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compress.weights.grid import Quantized
from compress.weights.rounding import ActivationCodes


@dataclass(frozen=True)
class Decision:
    """What a pass decided for one layer, as data: the codes of its weight, how its input and its output are rounded
    (None: they are not), and the figures that its report shows. kept: bool [N, K], which weights are not pruned (None:
    all of them); later passes leave the others at zero."""

    weight: Quantized
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    inputs: ActivationCodes | None = None
    outputs: ActivationCodes | None = None
    kept: Tensor | None = None


def joined(parts: Sequence[Decision]) -> Decision:
    """The decisions about the groups of a layer as one about the layer: rows below each other, figures averaged."""
    if len(parts) == 1:
        return parts[0]
    weights = [part.weight for part in parts]
    zeros = [w.zero_point for w in weights if w.zero_point is not None]
    weight = Quantized(
        torch.cat([w.codes for w in weights]),
        torch.cat([w.scale for w in weights]),
        torch.cat(zeros) if zeros else None,
        weights[0].grid,
    )
    figures: dict[str, float | int | str] = {}
    for key, first in parts[0].figures.items():
        values = [part.figures[key] for part in parts]
        numbers = [value for value in values if isinstance(value, int | float)]
        figures[key] = sum(numbers) / len(numbers) if isinstance(first, float) and numbers else first
        if isinstance(first, str):
            figures[key] = ", ".join(sorted({str(value) for value in values}))
    if "dead_channels" in figures:
        figures["dead_channels"] = sum(int(part.figures["dead_channels"]) for part in parts)
    return Decision(weight, {**figures, "groups": len(parts)}, parts[0].inputs)
