"""Embeddings: round the token embedding to nearest, and the output head with it.

Needs no calibration data. The rows of an embedding are looked up, not multiplied, so there are no outputs whose error
could be weighed. They are rounded before the blocks are run: what calibrates the blocks is what they will be given.
"""

from dataclasses import dataclass
from typing import ClassVar

from compress.errors import InputError
from compress.passes.base import Site, Treats
from compress.passes.quantize import SCHEMES, QuantizeWeights
from compress.passes.rtn import round_to_nearest
from compress.weights.decision import Decision


@dataclass(frozen=True, kw_only=True)
class Embeddings(QuantizeWeights):
    """Round the token embedding, one scale per token unless group_size says otherwise; weights only. head: an output
    head with a weight of its own, too. One that is tied to the embedding has the codes of the embedding, always."""

    name: ClassVar[str] = "embeddings"
    treats: ClassVar[Treats] = "embeddings"

    scheme: str = "w8a16"
    group_size: int = -1
    head: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scheme.endswith("a16"):
            allowed = ", ".join(s for s in SCHEMES if s.endswith("a16"))
            raise InputError(
                f"scheme {self.scheme} rounds inputs, and an embedding is given token ids; allowed: {allowed}"
            )

    def apply(self, site: Site) -> dict[str, Decision]:
        return round_to_nearest(site, self)
