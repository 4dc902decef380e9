"""Candidates: sequences of passes that `search.layer_costs` compares on every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from compress.errors import InputError
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import describe, make_pass, options_of, pass_class
from compress.passes.protocol.stages import Decide
from compress.weights.formats.sparse24 import TWO_OF_FOUR


@dataclass(frozen=True)
class Candidate:
    """Passes to try on a layer, one after the other. name: as tables show it; passes: without `only` or `but`. Raises
    InputError for passes that do more than decide about weights layer by layer, and for none."""

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
        """True where layers are stored without the zeros that a pass makes (2:4)."""
        return any(p.halves for p in self.passes)

    def suits(self, layer: str, shape: tuple[int, int], has_format: bool = True) -> str | None:
        """The reason why it cannot treat a layer of this shape (N, K); None where it can. has_format: the layer can be
        stored in a compressed format."""
        if self.halved and not has_format:
            return f"{layer} has no form without its zeros"
        try:
            for p in self.passes:
                p.fitted({shape[1]}).check({layer: shape})
        except InputError as error:
            return str(error)
        return None


BITS = (2, 3, 4, 5, 6, 8)
NO_PATTERN = "none"
# The scheme of so many bits, of a method that has others than w4a16 and the like.
SCHEMES_OF = {"k-quants": "q{}_k"}


def grid_of_candidates(
    method: str = "gptq",
    *,
    bits: Sequence[int] = BITS,
    group_sizes: Sequence[int] = (0,),
    outliers: Sequence[float] = (0.0,),
    patterns: Sequence[str] = (NO_PATTERN,),
    trellis: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[Candidate, ...]:
    """A candidate for every combination of the lists, and for trellis codes beside them.

    method: a pass with a scheme, like gptq, k-quants, rtn or spqr. options: of all its candidates. group_sizes: 0 for
    the usual size of the model, -1 for one scale per output channel. outliers: shares of weights that stay exact.
    patterns: N:M patterns that sparsegpt prunes to first, or "none"; the zeros of 2:4 are not stored. trellis: bits of
    trellis codes, 2 to 4. Raises InputError for values that are missing or repeated, and for options that the method
    lacks.
    """
    lists: dict[str, Sequence[Any]] = {"bits": bits, "group sizes": group_sizes, "outliers": outliers}
    lists["patterns"] = patterns
    if trellis:
        lists["trellis"] = trellis
    for what, values in lists.items():
        if not values or len(set(values)) < len(values):
            raise InputError(f"{what} {', '.join(map(str, values)) or 'missing'}; give one or more, each once")
    known = options_of(pass_class(method))
    if "scheme" not in known:
        raise InputError(
            f"method {method!r} has no scheme, whose bits could differ; allowed: gptq, k-quants, rtn, spqr"
        )
    if any(outliers) and "outliers" not in known:
        raise InputError(f"method {method!r} has no outliers; leave them out, or take gptq")
    found = []
    for pattern, width, size, share in product(patterns, bits, group_sizes, outliers):
        chosen: dict[str, Any] = {**(options or {}), "scheme": SCHEMES_OF.get(method, "w{}a16").format(width)}
        chosen |= {} if size == 0 else {"group_size": size}
        chosen |= {} if not any(outliers) else {"outliers": share}
        passes: tuple[Pass, ...] = (make_pass(method, chosen),)
        words = [f"w{width}"]
        if len(group_sizes) > 1 or size:
            words.append("channel" if size == -1 else f"g{size}" if size else "usual group")
        words += [f"{share:.4g} exact"] if share else []
        if pattern != NO_PATTERN:
            zeros = {"store": pattern} if pattern == TWO_OF_FOUR else {}
            passes = (make_pass("sparsegpt", {"pattern": pattern, **zeros}), *passes)
            words.append(pattern)
        found.append(Candidate(" ".join(words), passes))
    return (*(trellis_candidate(f"w{width}a16") for width in trellis), *found)


def trellis_candidate(scheme: str) -> Candidate:
    """Trellis codes of a scheme, like w3a16, with the defaults of their pass."""
    return Candidate(f"{scheme.removesuffix('a16')}-trellis", (make_pass("trellis", {"scheme": scheme}),))


def described(candidates: Sequence[Candidate]) -> dict[str, list[dict[str, Any]]]:
    """{name: passes as recipes hold them} of candidates, every option spelled out. Raises InputError where two have one
    name."""
    found = {each.name: describe(each.passes)["passes"] for each in candidates}
    if len(found) < len(candidates):
        raise InputError("two candidates have one name; give each its own")
    return found
