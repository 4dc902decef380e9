"""Layers that a block calls several times in one forward pass, like those of ALBERT, whose layers share one block.

A forward that waits before such a layer (`engine.walk.forward`) would decide by its first call alone. Here the block
runs once for each site instead: all that its layers are given, at every call, is shown to them together. They are
decided after the layers that are called once, one site after the other, each behind those before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.engine.layer_versions import Versions
from compress.engine.plan.batches import running
from compress.engine.walk.sites import BlockSites
from compress.engine.walk.state import Run
from compress.model.calls import Arrival, Arrivals, Call, arrival_of, pair_with_original
from compress.model.layers import Layer
from compress.model.online_rotation import as_read
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Survey


def decides_repeated(p: Pass) -> bool:
    """True for a pass that can decide about a layer from all its calls: it has looked at nothing before."""
    return p.stage(Survey) is None


def name_unseen(run: Run, structure: BlockSites, wanted: Mapping[str, Pass]) -> None:
    """Say which layers of a pass no statistic can be about, and what it cost to find out."""
    decided = {name for site in structure.again for name in site if name in wanted and decides_repeated(wanted[name])}
    for name in wanted:
        if name in structure.unreached:
            run.record.left_alone[name] = "never called during calibration"
        elif name in structure.repeated and name not in decided:
            run.record.left_alone[name] = "called several times in one forward pass"
    if not structure.traced:
        run.record.note(
            run.reporter,
            "blocks could not be traced without data: one more forward pass of one "
            "micro-batch per block shows which layers share inputs",
        )


def arrivals_of(
    block: nn.Module,
    layer: Layer,
    calls: Sequence[Call],
    reference: Sequence[Call],
    versions: Versions,
) -> Arrivals:
    """The arrivals at a site, by one of its layers: of each micro-batch the rows of all calls, one after the other.
    reference: the same micro-batches in the original model, which `versions` knows; none where nothing compares."""

    def walk() -> Iterator[Arrival | None]:
        for i, call in enumerate(calls):
            here, other = _inputs_of(block, layer, call, i), None
            if reference:
                with versions.original():
                    other = _inputs_of(block, layer, reference[i], i)
            if not here:
                yield None
                continue
            rows = [arrival_of(layer, call, x, None).x_MK for x in here]
            others = None if other is None else [arrival_of(layer, call, x, None).x_MK for x in other]
            arrival = Arrival(torch.cat(rows), torch.cat(others) if others else None)
            yield pair_with_original(arrival) if reference else arrival

    return Arrivals(walk)


@torch.no_grad()
def _inputs_of(block: nn.Module, layer: Layer, call: Call, index: int) -> list[Tensor]:
    """The inputs of a layer at each of its calls, before anything rounds them."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(as_read(module, args[0]))

    with layer.module.register_forward_pre_hook(note, prepend=True), running(call, index):
        block(*call.args, **call.kwargs)
    return seen
