"""Candidates out of a method and lists of its options: bits x group size x outliers x pattern of zeros."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from compress.errors import InputError
from compress.passes.base import Pass
from compress.passes.candidate import Candidate
from compress.recipe import describe, make_pass, options_of, pass_class
from compress.weights.sparse24 import TWO_OF_FOUR

BITS = (2, 3, 4, 5, 6, 8)
NO_PATTERN = "none"


def grid_of_candidates(
    method: str = "gptq",
    *,
    bits: Sequence[int] = BITS,
    group_sizes: Sequence[int] = (0,),
    outliers: Sequence[float] = (0.0,),
    patterns: Sequence[str] = (NO_PATTERN,),
    options: Mapping[str, Any] | None = None,
) -> tuple[Candidate, ...]:
    """Every combination. method: a pass with a scheme, like gptq, rtn or spqr; options: what all of them have. group
    size 0: the usual one of the model, -1: a scale per output channel. patterns: N:M of zeros that sparsegpt makes
    first, or none; those of 2:4 are not stored. Raises InputError for what the method has not."""
    lists: dict[str, Sequence[Any]] = {"bits": bits, "group sizes": group_sizes, "outliers": outliers}
    for what, values in {**lists, "patterns": patterns}.items():
        if not values or len(set(values)) < len(values):
            raise InputError(f"{what} {', '.join(map(str, values)) or 'missing'}; give one or more, each once")
    known = options_of(pass_class(method))
    if "scheme" not in known:
        raise InputError(f"method {method!r} has no scheme, whose bits could differ; allowed: gptq, rtn, spqr")
    if any(outliers) and "outliers" not in known:
        raise InputError(f"method {method!r} has no outliers; leave them out, or take gptq")
    found = []
    for pattern, width, size, share in product(patterns, bits, group_sizes, outliers):
        chosen: dict[str, Any] = {**(options or {}), "scheme": f"w{width}a16"}
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
    return tuple(found)


def described(candidates: Sequence[Candidate]) -> dict[str, list[dict[str, Any]]]:
    """{name: passes} of candidates, every option spelled out. Raises InputError where two have one name."""
    found = {each.name: describe(each.passes)["passes"] for each in candidates}
    if len(found) < len(candidates):
        raise InputError("two candidates have one name; give each its own")
    return found
