"""Passes that decide about layers of a block in the same forward."""

from collections.abc import Collection, Sequence

from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Decide


def together(passes: Sequence[Pass], layers: Collection[str]) -> list[list[Pass]]:
    """Passes in a row that can share a forward of the block: they only decide, by what they see of a layer's input, and
    no two of them about the same layer. Every site then sees the compressed prefix of its block, whoever it is for."""
    groups: list[list[Pass]] = []
    for p in passes:
        if groups and _can_share(p, groups[-1], layers):
            groups[-1].append(p)
        else:
            groups.append([p])
    return groups


def _only_decides(p: Pass) -> bool:
    decides = p.stage(Decide)
    # Needs, so that whoever is not calibrated stays by itself: a group has a forward.
    return len(p.stages) == 1 and decides is not None and bool(decides.needs)


def _can_share(p: Pass, group: Sequence[Pass], layers: Collection[str]) -> bool:
    return all(map(_only_decides, (p, *group))) and not any(
        p.wants(name) and other.wants(name) for other in group for name in layers
    )
