"""Which passes of a block share one forward of it."""

from collections.abc import Collection, Sequence

from compress.passes.base import Pass
from compress.passes.stages import Decide


def together(passes: Sequence[Pass], layers: Collection[str]) -> list[list[Pass]]:
    """Passes in a row that can share a forward of the block: they only decide, by what they see of a layer's input, and
    no two of them about the same layer. Every site then sees the compressed prefix of its block, whoever it is for."""
    groups: list[list[Pass]] = []
    for p in passes:
        if groups and all(map(_only_decides, (p, *groups[-1]))) and _disjoint(p, groups[-1], layers):
            groups[-1].append(p)
        else:
            groups.append([p])
    return groups


def _only_decides(p: Pass) -> bool:
    decides = p.stage(Decide)
    # Needs, so that whoever is not calibrated stays by itself: a group has a forward.
    return len(p.stages) == 1 and decides is not None and bool(decides.needs)


def _disjoint(p: Pass, group: Sequence[Pass], layers: Collection[str]) -> bool:
    return not any(p.wants(name) and other.wants(name) for other in group for name in layers)
