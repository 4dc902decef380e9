"""What methods of two and three levels share: GPTQ whose grid leaves nothing to choose but its groups.

An option of GPTQ that such a method settles is a `ClassVar` here: it has that value, and is no option any more.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from compress.passes.gptq import GPTQ
from compress.passes.options.activation_format import ActivationGrid, Activations, Outputs
from compress.passes.options.fixed_ranges import PERCENTILE
from compress.passes.options.weight_format import GridName
from compress.passes.protocol.sites import Site
from compress.passes.rtn import nearest
from compress.weights.grid import Quantized
from compress.weights.terms import Weight


@dataclass(frozen=True, kw_only=True)
class FewLevelsGPTQ(GPTQ):
    """GPTQ of weights alone, on a grid of two or three levels whose scale is the best there is."""

    scheme: ClassVar[str] = "w2a16"  # type: ignore[misc]
    grid: ClassVar[GridName] = "narrow"  # type: ignore[misc]
    per_tensor: ClassVar[bool] = False  # type: ignore[misc]
    clip: ClassVar[bool] = True  # type: ignore[misc]
    activations: ClassVar[Activations] = "dynamic"  # type: ignore[misc]
    activation_grid: ClassVar[ActivationGrid] = "symmetric"  # type: ignore[misc]
    outputs: ClassVar[Outputs] = "none"  # type: ignore[misc]
    per_channel_inputs: ClassVar[bool] = False  # type: ignore[misc]
    calibrator: ClassVar[str] = "minmax"  # type: ignore[misc]
    percentile: ClassVar[float] = PERCENTILE  # type: ignore[misc]
    histograms: ClassVar[bool] = False  # type: ignore[misc]

    @property
    def wording(self) -> tuple[str, str]:
        return self.name, ""

    def nearest(self, site: Site, name: str, dtype: torch.dtype) -> Quantized | Weight:
        """By the best scales: the range of all of a group is far too wide for so few levels."""
        return nearest(site.weights[name].to(dtype), self.weight_grid(), site.scale_dtypes[name], self.outliers)
