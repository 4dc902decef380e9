"""Weights of codes that are no numbers, for the measurement: tables of levels and trellis codes, drawn at random."""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.cpu.layouts import why_not_levels
from compress.kernels.layouts.strips import NIBBLE, pack_strips
from compress.kernels.layouts.trellis import MULTIPLIERS, Code, TrellisWords
from compress.kernels.layouts.trellis_strips import TrellisStrips
from compress.kernels.layouts.words import CodeWords, LevelTable, pack_planar, planar_weight
from compress.kernels.operators.devices import runs_on_cpu
from compress.kernels.operators.trellis import lay_in_strips, trellis_product, values_by_run
from compress.kernels.operators.words import words_linear
from compress.recipes.studies.kernels.roofline import GROUPS

# Whole numbers of a half, as E2M1 has them.
MAGNITUDES = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
TRELLIS_KINDS = {"trellis 2": 2, "trellis 3": 3}
STATE_BITS, RUN = 12, 1024
NARROW_KINDS = (*GROUPS, *TRELLIS_KINDS)


class NarrowWeights(NamedTuple):
    """The weights by kind. laid: words and scales of levels, and trellis: both as `compress.load` lays them out."""

    levels: dict[str, CodeWords]
    laid: dict[str, tuple[Tensor, Tensor]]
    trellis: dict[str, TrellisWords | TrellisStrips]

    def values(self, kind: str, columns: int) -> Tensor:
        """fp64 [N, K] the weight of a kind."""
        if kind in self.levels:
            weight = self.levels[kind]
            return planar_weight(weight._replace(scale=weight.scale.float()), columns).double()
        return torch.cat([part for _, part in values_by_run(self.trellis[kind], torch.float64)])

    def product(self, kind: str, x: Tensor) -> Tensor:
        """[M, N] x times that weight."""
        if kind in self.levels:
            (words, scale), weight = self.laid[kind], self.levels[kind]
            table = weight.table
            assert table is not None
            sizes = (NIBBLE, weight.group_size, None, False)
            return words_linear(x, words, scale, None, None, *sizes, table.values, table.signed)
        return trellis_product(x, self.trellis[kind])


def narrow(N: int, K: int, dtype: torch.dtype, g: torch.Generator) -> NarrowWeights:
    """Weights of all kinds, drawn by g."""
    device = g.device
    levels, laid = {}, {}
    for kind, group in GROUPS.items():
        signed = kind != "nf4"
        quantiles = torch.special.ndtri(torch.linspace(0.03, 0.97, 2**NIBBLE)).tolist()
        values = [*MAGNITUDES, *(-level for level in MAGNITUDES)] if signed else quantiles
        codes = torch.randint(0, 2**NIBBLE, (N, K), generator=g, device=device, dtype=torch.uint8)
        scale = (torch.rand(K // group, N, generator=g, device=device) * 0.01 + 0.005).to(dtype)
        table = LevelTable(torch.tensor([*values, 0.5], device=device), signed)
        levels[kind] = CodeWords(pack_planar(codes, NIBBLE), scale, None, group, NIBBLE, table)
        strips = runs_on_cpu(device) and not why_not_levels(N, K, group)
        found = pack_strips(levels[kind], K) if strips else levels[kind]
        laid[kind] = (found.words, found.scale)
    return NarrowWeights(levels, laid, {kind: _trellis(N, K, bits, dtype, g) for kind, bits in TRELLIS_KINDS.items()})


def _trellis(N: int, K: int, bits: int, dtype: torch.dtype, g: torch.Generator) -> TrellisWords | TrellisStrips:
    code = Code(bits, STATE_BITS, MULTIPLIERS[STATE_BITS], RUN)
    size = (code.stored_rows(N), K * bits // 32)
    words = torch.randint(-(2**31), 2**31, size, generator=g, device=g.device, dtype=torch.int64).to(torch.int32)
    weight = TrellisWords(words, (torch.rand(N, generator=g, device=g.device) * 0.01 + 0.005).to(dtype), code)
    return lay_in_strips(weight) or weight
