"""Survey of all layers for passes, before the first is decided: one walk over the uncompressed model."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from compress.engine.layer_versions import Versions
from compress.engine.plan.plan import Plan
from compress.engine.walk.capture import capture_stack
from compress.engine.walk.collect import collect
from compress.engine.walk.decide import in_parts, site_of
from compress.engine.walk.forward import suspended_forward
from compress.engine.walk.gradients import with_gradients
from compress.engine.walk.layer_damage import Alone
from compress.engine.walk.sites import same_on_all_ranks, structure_of
from compress.engine.walk.state import Run, Streams
from compress.model.calls import Arrival, Call
from compress.model.layers import Layer
from compress.model.open_block import Opened
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Finding, Settled, Survey

# What a pass has found out about layers so far.
Found = dict[str, Finding]
# What layers of a block become, each alone.
Changed = dict[Hashable, Mapping[Layer, Tensor]]
# The calls of the next block, and what layers of this one become.
Walked = tuple[Streams, Changed]


def survey(run: Run) -> Plan:
    """The plan with passes that know what they asked for."""
    asking = {p: stage for p in run.plan.passes if (stage := p.stage(Survey)) is not None}
    findings: dict[Pass, Found] = {p: {} for p in asking}
    for stack in run.plan.stacks if asking else ():
        forwards = any(stage.needs for stage in asking.values())
        calls: list[list[Call]] = capture_stack(run, stack) if forwards else [[] for _ in stack.blocks]
        streams = Streams(calls[0], [])
        alone = Alone(run, stack, calls) if any(stage.changed for stage in asking.values()) else None
        for index, (name, block) in enumerate(stack.blocks):
            streams = streams.called_as(calls.pop(0))
            with run.residency.open(block, keep=False) as opened:
                streams, changed = _OpenBlock(run, opened, name).walk(streams, asking, findings)
                if alone is not None:
                    with run.spending.on("forward"):
                        alone.through(index, changed)
        if alone is not None:
            with run.spending.on("forward"):
                damages = alone.damages()
            for (p, layer), damage in damages.items():
                findings[p][layer] = replace(findings[p][layer], damage=damage)
    settled = {p: stage.settle(findings[p]) for p, stage in asking.items()}
    settled |= with_gradients(run)
    return _settle(run, settled)


def _settle(run: Run, settled: Mapping[Pass, Settled]) -> Plan:
    """The plan with what has become of its passes."""
    made, ignored = {p: found.made for p, found in settled.items()}, dict(run.plan.ignored)
    for found in settled.values():
        ignored |= found.alone
        for note in found.notes:
            run.record.note(run.reporter, note)
    return replace(run.plan, passes=tuple(made.get(p, p) for p in run.plan.passes), ignored=ignored)


@dataclass(frozen=True)
class _OpenBlock:
    """A block that is open, and its layers by name."""

    run: Run
    opened: Opened
    name: str

    @cached_property
    def layers(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.run.plan.layers[self.name]}

    def walk(self, streams: Streams, asking: Mapping[Pass, Survey], found: Mapping[Pass, Found]) -> Walked:
        """Look at the layers, in one forward for each pass that asks for data."""
        for p, stage in asking.items():
            if not stage.needs:
                for layer in (layer for layer in self.layers.values() if p.wants(layer.name)):
                    self.note(stage, [layer], [{}], found[p])
        changed: Changed = {}
        if not any(stage.needs for stage in asking.values()):
            return streams, changed
        structure = structure_of(self.opened.block, streams.calls, list(self.layers.values()))
        structure = same_on_all_ranks(structure, self.run.comm)
        outputs: list[Any] = []
        for p, stage in asking.items():
            if stage.needs:
                wanted = ([self.layers[n] for n in names if p.wants(n)] for names in structure.sites)
                outputs, values = self.look(streams, stage, [site for site in wanted if site], found[p])
                changed |= {(p, layer.name): {layer: value} for layer, value in values.items()}
        return streams.after(outputs, []), changed

    def look(
        self, streams: Streams, stage: Survey, sites: Sequence[Sequence[Layer]], found: Found
    ) -> tuple[list[Any], dict[Layer, Tensor]]:
        """One forward of the block, in which a pass looks at its sites: (what the block returns, what layers become
        where the pass is asked for that)."""
        run, changed = self.run, dict[Layer, Tensor]()

        def visit(site: Sequence[Layer], arrivals: Iterable[Arrival | None]) -> None:
            statistics = collect(stage.needs, site[0], arrivals, run.comm)
            if statistics is None:
                return  # the run itself says so
            self.note(stage, site, statistics, found)
            if stage.changed is not None:
                parts = [stage.changed(part) for part in in_parts(site_of(site, self.opened, run.comm), statistics)]
                for layer in site:
                    whole = torch.cat([part[layer.name] for part in parts])
                    changed[layer] = layer.stored(whole.to(layer.parameter.dtype))

        passed = suspended_forward(
            self.opened.block, streams.calls, sites, visit, (), Versions(), repeats=run.memory_mode.repeats
        )
        run.record.block_forwards += passed.forwards
        return passed.outputs, changed

    def note(self, stage: Survey, site: Sequence[Layer], statistics: Sequence[Mapping[str, Any]], found: Found) -> None:
        """Let a pass look at the layers of a site, part by part."""
        whole = site_of(site, self.opened, self.run.comm)
        parts = [stage.look(part) for part in in_parts(whole, statistics)]
        for layer in site:
            found[layer.name] = Finding(self.name, layer.shape, tuple(part[layer.name] for part in parts))
