"""The options of GPTQ that two or three levels settle: a grid that leaves nothing to choose but its groups.

A settled option is a `ClassVar`: it has that value, and is no option any more.
"""

from dataclasses import dataclass
from typing import ClassVar

from compress.passes.options.activation_format import ActivationGrid, Activations, InputRange, Outputs
from compress.passes.options.fixed_ranges import PERCENTILE
from compress.passes.options.weight_format import GridName


@dataclass(frozen=True, kw_only=True)
class FewLevels:
    """Weights alone, on a grid of two or three levels whose scale is the best there is."""

    name: ClassVar[str]
    scheme: ClassVar[str] = "w2a16"
    grid: ClassVar[GridName] = "narrow"
    per_tensor: ClassVar[bool] = False
    clip: ClassVar[bool] = True
    objective: ClassVar[str] = "layer"
    activations: ClassVar[Activations] = "dynamic"
    activation_grid: ClassVar[ActivationGrid] = "symmetric"
    outputs: ClassVar[Outputs] = "none"
    per_channel_inputs: ClassVar[bool] = False
    input_range: ClassVar[InputRange] = "minmax"
    calibrator: ClassVar[str] = "minmax"
    percentile: ClassVar[float] = PERCENTILE
    histograms: ClassVar[bool] = False
    # The range of all of a group is far too wide for so few levels.
    nearest_by_whole_range: ClassVar[bool] = False

    @property
    def wording(self) -> tuple[str, str]:
        """(scheme, grid) as the record of a run has them."""
        return self.name, ""
