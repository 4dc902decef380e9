"""How a layer's input or output is rounded to 8 bits, as data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.weights.grid import Grid, decode, encode, quantize, working_dtype


@dataclass(frozen=True)
class ActivationCodes:
    """How a layer's input or output is rounded to 8 bits: by fixed scales and zero points, [1, 1] or per channel
    [1, K], or (None) for every token anew.

    scale is in its stored dtype, zero_point int8 or None where symmetric.
    """

    grid: Grid
    scale: Tensor | None = None
    zero_point: Tensor | None = None

    @property
    def dynamic(self) -> bool:
        return self.scale is None

    def fake_quantize(self, x: Tensor) -> Tensor:
        """x [..., K] rounded, in its own dtype: what the kernels multiply, up to that dtype's rounding."""
        if self.scale is None:
            rows = x.reshape(-1, x.shape[-1])
            return quantize(rows, self.grid, torch.float32).dequantize(x.dtype).reshape(x.shape)
        work = x.to(working_dtype(x))
        scale = self.scale.flatten().to(work)
        zero_point = torch.zeros_like(scale) if self.zero_point is None else self.zero_point.flatten().to(work)
        codes = encode(work, scale, zero_point, self.grid)
        return decode(codes, scale, zero_point, torch.float32).to(x.dtype)
