"""Ternary weights: -s, 0 and s, by GPTQ (Ternary Weight Networks, arXiv 1605.04711; GPTQ, arXiv 2210.17323).

Shapes: N outputs, K inputs, g inputs of a group. Of each group, with h the diagonal of H, H = X^T X,

    minimise over s and codes of -1, 0, 1      sum over j of h_j (w_j - s q_j)^2

when the sweep comes to it, of weights that carry all feedback so far: exactly, by one sort (`weights.ternary_scale`).
From there on this is GPTQ: columns are rounded to the nearest code one by one, each makes up for those before it, then
scales are refitted and codes descend (`compress methods gptq`).

Paper -> code: W^t -> codes; alpha -> scale; the threshold, which is alpha / 2 at the optimum -> the nearest code.

Departs from the paper:
- it trains; here are no labels and no gradients. The threshold 0.7 mean |w| is an approximation for normal weights;
  ours is searched, exactly.
- scales per group of inputs, errors weighed by what the inputs are.
What it costs: ternary weights are for models that are trained with them. Rounded afterwards, small models diverge one
and a half times to twice as far as by GPTQ's w2a16, which has a fourth level (docs/figures/methods.md). Where groups
are small and scales wide, w2a16 with one scale per channel is even smaller. With packing=words the bytes are those of
w2a16, and there is nothing to show for them but zeros.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from compress.base.errors import one_of
from compress.passes.gptq import GPTQ
from compress.passes.options.few_levels import FewLevels
from compress.passes.protocol.sites import Site
from compress.weights.decision import Decision
from compress.weights.formats import ternary as formats
from compress.weights.formats.codes import CodesFormat
from compress.weights.grid import Quantized
from compress.weights.matrix import Matrix, added
from compress.weights.scheme import Scheme

Packing = Literal["bytes", "words"]


@dataclass(frozen=True, kw_only=True)
class Ternary(FewLevels, GPTQ):
    """GPTQ to three levels."""

    name: ClassVar[str] = "ternary"

    packing: Packing = "bytes"
    """Five codes in a byte, 1.6 bits each; or in words of 2 bits, as w2a16, which other readers of compressed-tensors
    know."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("packing", self.packing, get_args(Packing))

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        scheme = super().stored(layer, shape, table)
        if self.packing == "words" or scheme is None:
            return scheme
        first, *others = scheme.terms
        assert isinstance(first, CodesFormat)
        return replace(scheme, terms=(formats.TernaryCodes(grid=first.grid), *others))

    def apply(self, site: Site) -> dict[str, Decision]:
        decisions = super().apply(site)
        if self.packing == "words":
            return decisions
        return {name: replace(d, weight=in_bytes(d.weight)) for name, d in decisions.items()}


def in_bytes(weight: Matrix) -> Matrix:
    """A weight whose ternary codes are stored five in a byte."""
    return added(*(formats.TernaryCodes(grid=t.grid).term(t) if isinstance(t, Quantized) else t for t in weight.terms))
