"""2:4 weights for the measurement: two of every four weights of the other candidates."""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.layouts.pairs24 import KEPT, QUAD, Pairs, pack_positions, pairs_weight, positions_of, take
from compress.kernels.layouts.strips import BYTE, NIBBLE
from compress.kernels.layouts.strips24 import NUMBERS, Strips24
from compress.kernels.layouts.words import CodeWords, planar_weight, to_planar
from compress.kernels.operators.sparse24 import lay_in_strips24, sparse24_linear
from compress.kernels.operators.words import words_linear

# {candidate: the same bits of a weight without zeros}: their ratio is the gain of 2:4.
HALVED = {"2:4": "dense", "2:4 w8a16": "w8a16", "2:4 w4a16": "w4a16"}
MIDDLE = 128


class Halved(NamedTuple):
    """Numbers, codes of 8 bits with one scale per output, codes of 4 bits in groups, by the kinds of
    `roofline.HALVED_KINDS`."""

    rows: dict[str, Pairs | CodeWords]
    laid: dict[str, Strips24]  # the same in strips, as `compress.load` lays them out on a CPU

    def values(self, kind: str, columns: int) -> Tensor:
        """[N, K] the dequantized weight of a kind."""
        weight = self.rows[kind]
        return planar_weight(weight, columns) if isinstance(weight, CodeWords) else pairs_weight(weight)

    def product(self, kind: str, x: Tensor) -> Tensor:
        """[M, N] x times that weight."""
        laid, weight = self.laid.get(kind), self.rows[kind]
        if laid is not None:
            return sparse24_linear(x, *laid[:4], None, *laid[4:])
        if isinstance(weight, CodeWords):
            return words_linear(x, *weight[:3], None, NIBBLE, weight.group_size)
        bits = NUMBERS if weight.scale is None else BYTE
        return sparse24_linear(x, *weight[:4], None, weight.group_size, bits)


def halve(
    dense_NK: Tensor, codes8_NK: Tensor, scale8_N1: Tensor, codes4_NK: Tensor, scale4_NG: Tensor, g: torch.Generator
) -> Halved:
    """Two of every four weights, drawn by g. codes int8, symmetric; the scales in the dtype of the dense weight."""
    N, K = dense_NK.shape
    kept = (torch.rand(N, K // QUAD, QUAD, generator=g, device=g.device).argsort(-1) < KEPT).flatten(1)
    position = positions_of(kept)
    words, dtype = pack_positions(position), dense_NK.dtype
    scale8_1N = scale8_N1.to(dtype).t().contiguous()
    middle = torch.full_like(scale8_1N, MIDDLE, dtype=torch.uint8)
    unsigned = codes8_NK.view(torch.uint8) ^ MIDDLE
    rows: dict[str, Pairs | CodeWords] = {
        "2:4": Pairs(take(dense_NK, position), words, None, None, -1),
        "2:4 w8": Pairs(take(unsigned, position), words, scale8_1N, middle, -1),
        "2:4 w4": to_planar(codes4_NK * kept, scale4_NG, None, NIBBLE, dtype),
    }
    laid = {kind: found for kind, weight in rows.items() if (found := lay_in_strips24(weight, K)) is not None}
    return Halved(rows, laid)
