"""Float8 weights for the measurement, drawn at random: one scale per output, or one per 128 x 128 weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.layouts.scale_blocks import INPUT_BLOCK, WEIGHT_BLOCK, blocks_of, spread
from compress.kernels.operators import fp8, fp8_blocks
from compress.recipes.studies.kernels.roofline import FLOAT8_KINDS


class Floats8(NamedTuple):
    """Codes [N, K], and the scales by kind: [N], or [N / 128, K / 128]."""

    codes: Tensor
    scales: dict[str, Tensor]

    def values(self, kind: str) -> Tensor:
        """fp64 [N, K] the weight of a kind."""
        scale = self.scales[kind].double()
        return self.codes.double() * (
            scale[:, None] if scale.ndim == 1 else spread(scale, self.codes.shape, WEIGHT_BLOCK)
        )

    def product(self, kind: str, x: Tensor) -> Tensor:
        """[M, N] x, rounded to float8 per token or per 128 columns of it, times that weight."""
        codes, scale = self.codes.view(torch.uint8), self.scales[kind]
        if scale.ndim == 1:
            return fp8.fp8_linear(x, codes, scale, None, None)
        return fp8_blocks.fp8_block_linear(x, codes, scale, None)

    def rounded(self, kind: str, x: Tensor) -> Tensor:
        """fp64 [M, K] x as that product rounds it."""
        if self.scales[kind].ndim == 1:
            codes, scale = fp8.quantize_tokens(x)
            return codes.double() * scale.double()[:, None]
        codes, scale = fp8_blocks.quantize_token_blocks(x)
        return codes.double() * spread(scale.double(), codes.shape, INPUT_BLOCK)


def floats8(N: int, K: int, g: torch.Generator) -> Floats8:
    """Weights of both kinds, drawn by g."""
    wide = torch.randn(N, K, generator=g, device=g.device).mul(100).clamp(-fp8.E4M3_MAX, fp8.E4M3_MAX)
    sizes = (N,), blocks_of((N, K), WEIGHT_BLOCK)
    scales = [torch.rand(size, generator=g, device=g.device) * 1e-3 + 1e-4 for size in sizes]
    return Floats8(wide.to(fp8.E4M3), dict(zip(FLOAT8_KINDS, scales, strict=True)))
