"""What passes have to know about all layers before the first is decided: one walk over the uncompressed model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compress.calibration.collect import collected
from compress.model.calls import Arrival, Call
from compress.model.layers import Layer, Stack
from compress.model.opened import Opened
from compress.passes.base import Pass
from compress.passes.sites import Site
from compress.passes.stages import Survey
from compress.run.forward import suspended_forward
from compress.run.installed import Versions
from compress.run.plan import Plan
from compress.run.state import Run, Streams
from compress.run.structure import Structure, same_on_all_ranks, structure_of


def surveyed(run: Run, capture: Callable[[Stack], list[list[Call]]]) -> Plan:
    """The plan with passes that know what they asked for. capture: the calls of the blocks of a stack."""
    asking = {p: survey for p in run.plan.passes if (survey := p.stage(Survey)) is not None}
    found: dict[Pass, dict[str, Any]] = {p: {} for p in asking}
    for stack in run.plan.stacks if asking else ():
        captured = capture(stack)
        streams = Streams(captured[0], [])
        for name, block in stack.blocks:
            streams = streams.called_as(captured.pop(0))
            with run.residency.open(block, keep=False) as opened:
                streams = _walk(run, opened, name, streams, asking, found)
    settled, ignored = {}, dict(run.plan.ignored)
    for p, survey in asking.items():
        settled[p], alone = survey.settle(found[p])
        ignored |= alone
    return replace(run.plan, passes=tuple(settled.get(p, p) for p in run.plan.passes), ignored=ignored)


def _walk(
    run: Run,
    opened: Opened,
    name: str,
    streams: Streams,
    asking: Mapping[Pass, Survey],
    found: Mapping[Pass, dict[str, Any]],
) -> Streams:
    """Look at the layers of a block, one forward for each pass that asks; returns the calls of the next block."""
    layers = {layer.name: layer for layer in run.plan.layers[name]}
    structure = same_on_all_ranks(structure_of(opened.block, streams.calls[0], list(layers.values())), run.comm)
    outputs: list[Any] = []
    for p, survey in asking.items():
        outputs = _look(run, opened, streams, p, survey, _sites(structure, layers, p), found[p])
        run.record.block_forwards += len(streams.calls)
    return streams.after(outputs, [])


def _sites(structure: Structure, layers: Mapping[str, Layer], p: Pass) -> list[list[Layer]]:
    sites = ([layers[n] for n in names if p.wants(n)] for names in structure.sites)
    return [site for site in sites if site]


def _look(
    run: Run,
    opened: Opened,
    streams: Streams,
    p: Pass,
    survey: Survey,
    sites: Sequence[Sequence[Layer]],
    found: dict[str, Any],
) -> list[Any]:
    """One forward of a block, in which a pass looks at its sites; returns what the block returns."""

    def visit(site: Sequence[Layer], arrivals: Iterable[Arrival | None]) -> None:
        statistics = collected(survey.needs, site[0], arrivals, run.comm)
        if statistics is None:
            return  # the run itself says so
        assert len(statistics) == 1, "a survey is of layers as a whole"
        dtypes = {layer.name: opened.dtype_of(layer.parameter) for layer in site}
        found.update(survey.look(Site({la.name: la.weight for la in site}, statistics[0], dtypes, run.comm)))

    return suspended_forward(opened.block, streams.calls, sites, visit, (), Versions())[0]
