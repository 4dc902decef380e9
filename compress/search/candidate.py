"""Candidates: sequences of passes that `search.layer_costs` compares on every layer."""

from dataclasses import dataclass

from compress.base.errors import InputError
from compress.passes.protocol.base import Pass


@dataclass(frozen=True)
class Candidate:
    """Passes to try on a layer, one after the other, which only decide about weights layer by layer. name: as tables
    show it; passes: without `only` or `but`."""

    name: str
    passes: tuple[Pass, ...]

    def suits(self, layer: str, shape: tuple[int, int]) -> str | None:
        """The reason why it cannot treat a layer of this shape (N, K); None where it can."""
        try:
            for p in self.passes:
                p.fitted({shape[1]}).check({layer: shape})
        except InputError as error:
            return str(error)
        return None
