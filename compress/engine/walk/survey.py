"""Survey of all layers for passes, before the first is decided: one walk over the uncompressed model."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress.engine.layer_versions import Versions
from compress.engine.plan.plan import Plan
from compress.engine.walk.capture import capture_stack
from compress.engine.walk.collect import collected
from compress.engine.walk.decide import in_parts, seen
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


def survey(run: Run) -> Plan:
    """The plan with passes that know what they asked for."""
    asking = {p: stage for p in run.plan.passes if (stage := p.stage(Survey)) is not None}
    found: dict[Pass, Found] = {p: {} for p in asking}
    for stack in run.plan.stacks if asking else ():
        forwards = any(stage.needs for stage in asking.values())
        calls: list[list[Call]] = capture_stack(run, stack) if forwards else [[] for _ in stack.blocks]
        streams = Streams(calls[0], [])
        alone = Alone(run, stack, calls) if any(stage.changed for stage in asking.values()) else None
        for index, (name, block) in enumerate(stack.blocks):
            streams = streams.called_as(calls.pop(0))
            with run.residency.open(block, keep=False) as opened:
                values: Changed = {}
                streams = _walk(run, opened, name, streams, asking, found, values)
                if alone is not None:
                    with run.spending.on("forward"):
                        alone.through(index, values)
        if alone is not None:
            with run.spending.on("forward"):
                damages = alone.damages()
            for (p, layer), damage in damages.items():
                found[p][layer] = replace(found[p][layer], damage=damage)
    settled = {p: stage.settle(found[p]) for p, stage in asking.items()}
    settled |= with_gradients(run)
    return _with_settled(run, settled)


def _with_settled(run: Run, settled: Mapping[Pass, Settled]) -> Plan:
    """The plan with what has become of its passes."""
    made, ignored = {p: found.made for p, found in settled.items()}, dict(run.plan.ignored)
    for found in settled.values():
        ignored |= found.alone
        for note in found.notes:
            run.record.note(run.reporter, note)
    return replace(run.plan, passes=tuple(made.get(p, p) for p in run.plan.passes), ignored=ignored)


def _walk(
    run: Run,
    opened: Opened,
    name: str,
    streams: Streams,
    asking: Mapping[Pass, Survey],
    found: Mapping[Pass, Found],
    values: Changed,
) -> Streams:
    """Look at the layers of a block, one forward for each pass that asks for data; the calls of the next block."""
    layers = {layer.name: layer for layer in run.plan.layers[name]}
    for p, survey in asking.items():
        if not survey.needs:
            for layer in layers.values():
                if p.wants(layer.name):
                    _note(run, opened, name, survey, [layer], [{}], found[p])
    if not any(survey.needs for survey in asking.values()):
        return streams
    structure = same_on_all_ranks(structure_of(opened.block, streams.calls, list(layers.values())), run.comm)
    outputs: list[Any] = []
    for p, survey in asking.items():
        if survey.needs:
            wanted = ([layers[n] for n in names if p.wants(n)] for names in structure.sites)
            sites = [site for site in wanted if site]
            changed: dict[Layer, Tensor] = {}
            outputs = _look(run, opened, name, streams, survey, sites, found[p], changed)
            values.update(((p, layer.name), {layer: value}) for layer, value in changed.items())
    return streams.after(outputs, [])


def _look(
    run: Run,
    opened: Opened,
    name: str,
    streams: Streams,
    survey: Survey,
    sites: Sequence[Sequence[Layer]],
    found: Found,
    changed: dict[Layer, Tensor],
) -> list[Any]:
    """One forward of a block, in which a pass looks at its sites, and says what their layers become, if it is asked;
    returns what the block returns."""

    def visit(site: Sequence[Layer], arrivals: Iterable[Arrival | None]) -> None:
        statistics = collected(survey.needs, site[0], arrivals, run.comm)
        if statistics is not None:  # otherwise the run itself says so
            _note(run, opened, name, survey, site, statistics, found)
            if survey.changed is not None:
                parts = [survey.changed(part) for part in in_parts(seen(site, opened, run.comm), statistics)]
                for layer in site:
                    whole = torch.cat([part[layer.name] for part in parts])
                    changed[layer] = layer.stored(whole.to(layer.parameter.dtype))

    passed = suspended_forward(opened.block, streams.calls, sites, visit, (), Versions(), repeats=run.repeats)
    run.record.block_forwards += passed.forwards
    return passed.outputs


def _note(
    run: Run,
    opened: Opened,
    block: str,
    survey: Survey,
    site: Sequence[Layer],
    statistics: Sequence[Mapping[str, Any]],
    found: Found,
) -> None:
    """Let a pass look at the layers of a site, part by part."""
    parts = [survey.look(part) for part in in_parts(seen(site, opened, run.comm), statistics)]
    for layer in site:
        found[layer.name] = Finding(block, layer.shape, tuple(part[layer.name] for part in parts))
