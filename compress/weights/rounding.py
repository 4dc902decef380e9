"""The rounding of a layer's input or output to 8 bits, as data. A fixed range is stored as

input_scale        model dtype [1]    and output_scale of an output
input_zero_point   int8 [1]           asymmetric integers; may be absent otherwise

and the global scale of e4m3 scales, which are fitted to every group of a token, as

input_global_scale float32 [1]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.weights.grid import Grid, decode, encode, quantize, working_dtype
from compress.weights.roles import Role
from compress.weights.terms import FLOATS, Part

Side = Literal["input", "output"]


@dataclass(frozen=True)
class ActivationCodes:
    """The rounding of a layer's input or output to 8 bits: by a fixed scale and zero point, [1, 1] or per channel
    [1, K], or (None) fitted to every token.

    scale is in its stored dtype, zero_point int8 or None where symmetric.
    """

    grid: Grid
    scale: Tensor | None = None
    zero_point: Tensor | None = None

    @property
    def dynamic(self) -> bool:
        return self.scale is None

    def fake_quantize(self, x: Tensor) -> Tensor:
        """x [..., K] rounded, in its own dtype: the values that the kernels multiply, up to that dtype's rounding."""
        if self.scale is None:
            rows = x.reshape(-1, x.shape[-1])
            return quantize(rows, self.grid, torch.float32).dequantize(x.dtype).reshape(x.shape)
        work = x.to(working_dtype(x))
        scale = self.scale.flatten().to(work)
        zero_point = torch.zeros_like(scale) if self.zero_point is None else self.zero_point.flatten().to(work)
        codes = encode(work, scale, zero_point, self.grid)
        return decode(codes, scale, zero_point, torch.float32).to(x.dtype)

    def parts(self, side: Side) -> dict[str, Tensor]:
        """Its tensors in a checkpoint; none where the range is fitted to every token and there is no global scale."""
        if self.grid.global_scale is not None:
            return {f"{side}_global_scale": torch.tensor([self.grid.global_scale])}
        if self.scale is None:
            return {}
        zero_point = {} if self.zero_point is None else {f"{side}_zero_point": self.zero_point.reshape(1)}
        return {f"{side}_scale": self.scale.reshape(1), **zero_point}


def fixed_parts(side: Side, grid: Grid) -> dict[str, Part]:
    """The parts that hold a fixed range."""
    parts = {f"{side}_scale": Part((1,), FLOATS, role=Role.RANGES)}
    if not grid.floating:
        parts[f"{side}_zero_point"] = Part((1,), (torch.int8,), optional=grid.symmetric, role=Role.RANGES)
    return parts


def read_fixed(side: Side, grid: Grid, parts: Mapping[str, Tensor]) -> ActivationCodes:
    """Inverse of `ActivationCodes.parts` for a fixed range."""
    zero_point = None if grid.symmetric else parts.get(f"{side}_zero_point")
    return ActivationCodes(
        grid, parts[f"{side}_scale"].reshape(1, 1), None if zero_point is None else zero_point.reshape(1, 1)
    )
