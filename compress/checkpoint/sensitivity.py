"""What each layer of a model loses by each of several candidates, as a table that can be kept.

A candidate is what may become of a layer: passes, one after the other. A unit is the layers that are treated alike:
those that read one tensor (q, k and v of an attention, gate and up of a gated MLP), which readers fuse to one, or a
layer by itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
FAR = 10**9  # an offset in a weight file: no longer as a word than any in 10 GB


@dataclass(frozen=True)
class Tried:
    """A unit by a candidate. loss: |X W^T - X Q^T|^2, a mean over tokens, summed over the outputs of its layers;
    relative_loss: over |X W^T|^2 of the same. kl: nats per token between the original and the original with this unit
    replaced, None where that was not measured. bytes: of all tensors that the checkpoint holds of it; header_bytes: at
    most, of what the file's header says of these."""

    loss: float
    relative_loss: float
    bytes: int
    header_bytes: int
    kl: float | None = None


@dataclass(frozen=True)
class Unit:
    """Layers that are treated alike, of `weights` weights. kind: their names inside the block. tried: by the names of
    the candidates that suit them."""

    name: str
    block: str
    kind: str
    layers: list[str]
    weights: int
    tried: dict[str, Tried]


@dataclass(frozen=True)
class Sensitivity:
    """What was measured of one model.

    candidates: {name: passes, as a recipe has them}. uniform_kl: of the model in which every layer is what a candidate
    makes of it, all at once; run_kl: of what `quantize` makes of one of these, where every layer is decided behind the
    others, which it makes up for. other_bytes: of the checkpoint, without the units. left_out: {layer: why it has no
    unit}.
    """

    model: dict[str, Any]
    calibration: dict[str, Any]
    held_out: dict[str, Any] | None
    candidates: dict[str, list[dict[str, Any]]]
    units: list[Unit]
    uniform_kl: dict[str, float]
    run_kl: dict[str, float] = field(default_factory=dict)
    other_bytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    format: int = FORMAT

    @property
    def weights(self) -> int:
        """Of all units."""
        return sum(unit.weights for unit in self.units)


def header_bytes(name: str, shape: Sequence[int]) -> int:
    """What the header of a weight file has of a tensor, at most."""
    entry = {name: {"dtype": "F8_E4M3", "shape": list(shape), "data_offsets": [FAR, FAR]}}
    return len(json.dumps(entry, separators=(",", ":")).encode()) - 1  # of two braces, and a comma
