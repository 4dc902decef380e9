"""What may become of a layer: passes, one after the other, that are tried beside others (`run.swaps`)."""

from dataclasses import dataclass

from compress.errors import InputError
from compress.passes.base import Pass
from compress.passes.prune import Prune
from compress.passes.stages import Decide


@dataclass(frozen=True)
class Candidate:
    """What may become of a layer. name: how tables call it; passes: one after the other, without `only` or `but`."""

    name: str
    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        for p in self.passes:
            if p.where or p.treats != "layers" or p.rounds_inputs or not all(isinstance(s, Decide) for s in p.stages):
                raise InputError(
                    f"candidate {self.name!r}: {p.name} does more than decide about weights layer by layer; allowed "
                    "are passes without `only` and `but`, folds, training and rounded inputs, like gptq or rtn of w3a16"
                )
        if not self.passes:
            raise InputError(f"candidate {self.name!r} has no pass; give at least one, like gptq")

    @property
    def halved(self) -> bool:
        """Whether a layer is stored without the zeros that a pass makes."""
        return any(isinstance(p, Prune) and p.store for p in self.passes)

    def suits(self, layer: str, shape: tuple[int, int], has_format: bool = True) -> str | None:
        """Why it cannot treat a layer of this shape (N, K); None where it can. has_format: of codes or fewer numbers,
        in which the layer can be stored."""
        if self.halved and not has_format:
            return f"{layer} has no form without its zeros"
        try:
            for p in self.passes:
                p.fitted({shape[1]}).check({layer: shape})
        except InputError as error:
            return str(error)
        return None
