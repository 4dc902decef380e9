"""Embeddings: round the token embedding to nearest, and the output head with it.

Needs no calibration data. The rows of an embedding are looked up, not multiplied, so there are no outputs whose error
could be weighed. They are rounded before the blocks are run: what calibrates the blocks is what they will be given.
"""

from dataclasses import dataclass
from typing import ClassVar

from compress.base.errors import InputError
from compress.passes.options.k_mixes import K_SCHEMES
from compress.passes.options.weight_format import WeightFormat
from compress.passes.protocol.base import Treats
from compress.passes.protocol.round_to_nearest import round_to_nearest
from compress.passes.protocol.sites import Site
from compress.weights.decision import Decision
from compress.weights.number_formats import SCHEMES


@dataclass(frozen=True, kw_only=True)
class Embeddings(WeightFormat):
    """Round the token embedding and the output head, weights only."""

    name: ClassVar[str] = "embeddings"
    treats: ClassVar[Treats] = "embeddings"

    scheme: str = "w8a16"
    """w2a16 ... w8a16: bits of a weight."""

    group_size: int = -1
    """-1, 0 or a size: elements that share a scale. -1: all of a token's. 0: the usual number."""

    head: bool = True
    """Round an output head that has a weight of its own, too. One that is tied to the embedding always has its
    codes."""

    def __post_init__(self) -> None:
        if self.scheme in K_SCHEMES:
            raise InputError(
                f"scheme {self.scheme}: super-blocks have no layer that looks rows up, so an embedding takes integer "
                "codes alone; give w8a16 (in GGUF Q8_0) or w5a16 (Q5_0), in groups of 32"
            )
        if self.scheme in SCHEMES and self.numbers.of_levels:
            raise InputError(
                f"scheme {self.scheme}: no layer looks rows of such codes up, so embeddings take integers alone; "
                "give w8a16 or w4a16"
            )
        super().__post_init__()
        if self.numbers.rounds_inputs:
            allowed = ", ".join(name for name, of in SCHEMES.items() if of.has_groups and not of.rounds_inputs)
            raise InputError(
                f"scheme {self.scheme} rounds inputs, and an embedding is given token ids; allowed: {allowed}"
            )

    @property
    def treats_heads(self) -> bool:
        return self.head

    def apply(self, site: Site) -> dict[str, Decision]:
        return round_to_nearest(site, self.weight_grid(), {})
