"""The decision of a pass about a layer, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compress.weights.formats.dense import Dense
from compress.weights.matrix import Matrix, Weight, moved, tensors_changed
from compress.weights.rounding import ActivationCodes
from compress.weights.scheme import Scheme, parts_of, scheme_of
from compress.weights.terms import StoredTerm

Figures = Mapping[str, float | int | str]


@dataclass(frozen=True)
class Decision:
    """The decision of a pass about one layer.

    weight: codes, another term, or a sum of several (`compress.weights.matrix`). figures: numbers for the report.
    inputs, outputs: the rounding of the layer's input and output (None: not rounded). kept: bool [N, K], True for
    weights that are not pruned (None: all of them); later passes leave the others at zero.
    """

    weight: Matrix
    figures: Figures = field(default_factory=dict)
    inputs: ActivationCodes | None = None
    outputs: ActivationCodes | None = None
    kept: Tensor | None = None

    def scheme(self, table: bool = False) -> Scheme:
        """The scheme in which the layer is stored. table: it is a token embedding."""
        return scheme_of(self.weight, self.inputs, self.outputs, table)

    def parts(self, table: bool = False) -> dict[str, Tensor]:
        """The tensors that `scheme` names, on the CPU."""
        return parts_of(self.weight, self.inputs, self.outputs, table)

    def moved(self, device: torch.device) -> "Decision":
        """The decision with its tensors on a device, but for the mask of what is kept."""
        inputs, outputs = (
            None if codes is None else tensors_changed(codes, lambda tensor: tensor.to(device))
            for codes in (self.inputs, self.outputs)
        )
        return replace(self, weight=moved(self.weight, device), inputs=inputs, outputs=outputs)

    @property
    def dense(self) -> bool:
        """True for a weight of plain numbers and no rounding, which a checkpoint stores as an ordinary weight."""
        first, *others = self.weight.terms
        rounds = self.inputs is not None or self.outputs is not None
        return not others and not rounds and isinstance(first, StoredTerm) and isinstance(first.format, Dense)


def joined(parts: Sequence[Decision]) -> Decision:
    """One decision about a layer from those about its groups: rows are stacked, figures averaged."""
    if len(parts) == 1:
        return parts[0]
    keys = dict.fromkeys(key for part in parts for key in part.figures)  # each once, in order
    figures = {key: _together([part.figures[key] for part in parts if key in part.figures]) for key in keys}
    if "dead_channels" in figures:
        figures["dead_channels"] = sum(int(part.figures.get("dead_channels", 0)) for part in parts)
    mask = next((part.kept for part in parts if part.kept is not None), None)
    return Decision(
        Weight.stacked([part.weight for part in parts]),
        {**figures, "groups": len(parts)},
        parts[0].inputs,
        kept=None if mask is None else torch.cat([_kept(part, mask) for part in parts]),
    )


def _kept(decision: Decision, like: Tensor) -> Tensor:
    """Bool [N, K], True for weights that are not pruned; on the device of `like` where the decision has no mask."""
    return (
        torch.ones_like(decision.weight.dequantize(), dtype=torch.bool, device=like.device)
        if decision.kept is None
        else decision.kept
    )


def _together(values: Sequence[float | int | str]) -> float | int | str:
    """One figure from several: the mean where any is a float, the first where all are whole numbers; with words among
    them, all different values, joined by commas."""
    words = [value for value in values if isinstance(value, str)]
    if words:
        return ", ".join(sorted({str(value) for value in values}))
    numbers = [value for value in values if not isinstance(value, str)]
    return sum(numbers) / len(numbers) if any(isinstance(number, float) for number in numbers) else numbers[0]
