"""One block of a run: opened, decided about pass by pass, written.

    open -> for pass: (suspended forward: observe -> sync -> decide -> install) -> caches -> write

A pass that folds scales does so first, from a suspended forward of its own.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.base.memory import give_back
from compress.checkpoint.write.record import Finished, LayerRecord
from compress.checkpoint.write.writer import Made, aside
from compress.engine.layer_versions import Versions
from compress.engine.restore import hooks_and_buffers, undone
from compress.engine.walk.collect import RoutedTokens, collect, collect_outputs
from compress.engine.walk.curvature import weighing
from compress.engine.walk.decide import Decided, Reach, decide, together, with_widest_inputs
from compress.engine.walk.forward import ForwardsDone, suspended_forward
from compress.engine.walk.reconstruct import reconstruct
from compress.engine.walk.remarks import RangeNotes, layer_record
from compress.engine.walk.reorder import reorder
from compress.engine.walk.repeated_layers import arrivals_of, decides_repeated, name_unseen
from compress.engine.walk.rewrite import Observed, repeat, same_orders
from compress.engine.walk.sites import BlockSites, same_on_all_ranks, structure_of
from compress.engine.walk.state import Run, Streams
from compress.model.calls import Arrival, Arrivals, Call
from compress.model.edits.folds import FoldRecord
from compress.model.experts import by_rank
from compress.model.known_edits import Edit
from compress.model.layers import Layer
from compress.model.open_block import Opened
from compress.model.structure.orders import find_orders
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Decide, Fix, Needs, Reconstruction, Reorder, Rewrite
from compress.solvers.statistics.cache_ranges import cache_names, cache_ranges
from compress.solvers.statistics.calibrators import Range
from compress.train.rounding.latents import places_of
from compress.weights.decision import Decision, Figures
from compress.weights.kv_cache_codes import CacheCodes

ELSEWHERE = (
    "some layers get other tokens than in the original (routing), which cannot be paired: in those micro-batches their "
    "drift counts as none"
)


def is_held(layer: Layer) -> bool:
    """True for a layer of which this rank has the weight; False for one of another rank's experts."""
    weight = layer.module._parameters.get(layer.key)  # none of a layer that is refused later
    return weight is None or not weight.is_meta


def run_block(run: Run, name: str, block: nn.Module, streams: Streams) -> Streams:
    """Compress one block, entirely or, where that fails, not at all; returns the calls of the next."""
    started = time.monotonic()
    before = run.sink.finished(name, [each.name for each in run.plan.layers[name] if not is_held(each)])
    with undone(hooks_and_buffers(block)), run.residency.open(block) as opened:
        here = BlockRun(run, name, opened, streams)
        if before is None:
            here.compress(started)
        else:
            here.repeat(before)
    run.record.changed.append(name or "all of it")
    run.steps.finish(name, usual=before is None)
    # They hold the block's decisions, which hold `opened`: a cycle that would wait for Python's collector.
    opened.on_open.clear()
    opened.on_close.clear()
    give_back()
    return here.streams


class BlockRun:
    """An open block, and the decisions about it so far. Layers and attentions go by their full names. streams: the
    calls of this block, at its end those of the next; onward: these, once a forward has found them that nothing has to
    repeat. structure: the sites of its layers, where a pass needs to know. by_rank: the layers of experts that one rank
    holds and decides about; problem: the first failure of this rank at one of them. renewed: decisions about
    layers of experts that are opened one by one, which get their values again whenever these open."""

    def __init__(self, run: Run, name: str, opened: Opened, streams: Streams) -> None:
        self.run, self.name, self.opened, self.streams = run, name, opened, streams
        self.layers = {layer.name: layer for layer in run.plan.layers[name]}
        whole = by_rank(opened.block)
        self.by_rank = {layer.name for layer in self.layers.values() if whole and layer.parameter in whole}
        self.problem: str | None = None
        self.attentions = {} if run.plan.kv is None else cache_names(opened.block, name)
        self.structure: BlockSites | None = None
        self.versions = Versions(run.plan.calibrated or run.places is not None)
        self.renewed: dict[nn.Parameter, tuple[Layer, Decision | Tensor]] = {}
        opened.on_open.append(partial(_renew, self))
        opened.on_close.append(self.versions.drop)
        self.onward: Streams | None = None
        self.decided = Decided(came=run.plan.earlier, reach=Reach(self.layers.values()))
        earlier = run.earlier.get(name) or Finished({}, [], {})
        self.records: list[LayerRecord] = [*earlier.records]
        self.ranges = RangeNotes(earlier.ranges)
        self.edits: list[Edit] = []
        self.fold_records: list[FoldRecord] = [*earlier.fold_records]
        self.not_folded: list[str] = [*earlier.not_folded]
        self.permuted: dict[str, Figures] = {}
        self.caches: dict[str, CacheCodes] = {}

    def repeat(self, before: Finished) -> None:
        """Make of the block again what an earlier run has made of it."""
        repeat(self.opened, before.edits)
        for name, decided in before.decided.items():
            _place(self, name, decided)
        for name, codes in before.caches.items():
            self.versions.keep_codes(self.attentions[name], codes)
        self.run.record.take(before)
        _propagate(self)

    def compress(self, started: float) -> None:
        """Let every pass decide, go on to the next block's calls, write. started: when, of `time.monotonic`."""
        plan = self.run.plan
        if self.streams.calls:
            structure = structure_of(self.opened.block, self.streams.calls, [*filter(is_held, self.layers.values())])
            self.structure = same_on_all_ranks(structure, self.run.comm, self.by_rank)
        for name in (name for name in self.layers if name in plan.trained):
            self.install(name, plan.trained[name])
            self.enter({name: (None, plan.trained[name])})
        groups = together([p for p in plan.passes if any(map(p.wants, self.layers))], self.layers)
        for i, group in enumerate(groups):
            last = i == len(groups) - 1 and plan.kv is None
            if len(group) > 1 and self.structure is not None:
                self.enter(self.observe(group, self.structure, last))
            else:
                self.carry_out(group[0], last)
        inputs = {n: d.inputs for n, d in self.decided.decisions.items() if d.inputs is not None}
        if widened := with_widest_inputs(self.run.comm.union(inputs) if self.by_rank else inputs):
            for name in widened.keys() & inputs.keys():
                self.decided.decisions[name] = replace(self.decided.decisions[name], inputs=widened[name])
                _place(self, name, self.decided.decisions[name])
            self.onward = None
        if plan.kv is not None:
            _round_caches(self, plan.kv)
        if self.onward is None:
            _propagate(self)
        else:
            self.streams = self.onward
        for entry in self.records:
            entry.figures["block_seconds"] = round(time.monotonic() - started, 3)
        if self.run.places is not None:
            self.run.places.update(_places(self))
        finished = _result_of(self)
        with self.run.spending.on("write"):
            self.run.sink.write(self.name, self.opened, self.layers, finished)
        self.run.record.take(finished)

    def carry_out(self, p: Pass, last: bool) -> None:
        """Do what one pass does. last: nothing changes the block after it."""
        wanted = [name for name in self.layers if p.wants(name)]
        if not wanted:
            return
        orders, rewrite, decides, fix = p.stage(Reorder), p.stage(Rewrite), p.stage(Decide), p.stage(Fix)
        if self.structure is not None and orders is not None:
            _permute(self, orders, self.structure, wanted)
        if self.structure is not None and rewrite is not None:
            self.fold(p, rewrite, self.structure, wanted)
        if (stage := p.stage(Reconstruction)) is not None:
            _reconstruct(self, p, stage, wanted)
        if decides is None:
            return
        if self.structure is not None and (decides.needs or fix is not None):
            self.enter(self.observe([p], self.structure, last))
            return
        decisions: dict[str, Decision] = {}
        experts, held = self.opened.experts, [name for name in wanted if is_held(self.layers[name])]
        for expert, names in groupby(held, lambda name: experts.get(self.layers[name].parameter)):
            with nullcontext() if expert is None else expert.opening():
                for name in names:
                    decided = decide(p, [self.layers[name]], self.opened, _comm_of(self, name), earlier=self.decided)
                    decisions[name] = self.install(name, decided[name])
                    _give_up(self, p, name, decisions[name])
        self.enter({name: (p, decision) for name, decision in decisions.items()})

    def enter(self, made: Mapping[str, tuple[Pass | None, Decision]]) -> None:
        """Keep passes' decisions about layers, for the passes that follow and for the record."""
        self.decided.decisions |= {name: decision for name, (_, decision) in made.items()}
        for name, (p, decision) in made.items():
            figures = {**decision.figures, **self.permuted.pop(name, {})}
            self.records.append(layer_record(self.layers[name], replace(decision, figures=figures), p))

    def install(self, name: str, decision: Decision) -> Decision:
        """Give a layer its decided values; returns the decision as it is kept."""
        layer = self.layers[name]
        if decision.kept is not None and sum(p.wants(name) for p in self.run.plan.passes) > 1:
            # A slice is overwritten in place.
            self.decided.before.setdefault(name, layer.weight if layer.index is None else layer.weight.clone())
        return _place(self, name, decision)

    def sites(self, structure: BlockSites, names: Collection[str]) -> list[list[Layer]]:
        """The sites of the block, of the layers of these names."""
        return [found for site in structure.sites if (found := [self.layers[n] for n in site if n in names])]

    def fold(self, p: Pass, rewrite: Rewrite, structure: BlockSites, wanted: Sequence[str]) -> None:
        """One suspended forward that only collects, then the edits of the pass around each producer of the block."""
        folds = self.run.folds.find(self.opened, self.name, self.streams.calls[0])
        self.not_folded += [reason for reason in folds.rejected if reason not in self.not_folded]
        # Nothing is collected for layers that no fold serves.
        sites = self.sites(structure, folds.served.intersection(wanted))
        if not sites:
            return
        observed = _observe_inputs(self, rewrite.needs, sites)
        about = self.streams.calls[0], self.run.folds.shared, observed, set(self.decided.decisions)
        edits, records = folds.rewrite(p, *about)
        self.edits += edits
        self.fold_records += records

    def observe(self, passes: Sequence[Pass], structure: BlockSites, last: bool) -> dict[str, tuple[Pass, Decision]]:
        """One suspended forward: statistics, decisions, weights, site by site. No two passes treat the same layer."""
        whose = {name: p for p in passes for name in self.layers if p.wants(name)}
        if structure.unreached or structure.repeated or not structure.traced:
            name_unseen(self.run, structure, whose)
        block_decisions: dict[str, tuple[Pass, Decision]] = {}

        def visit(site: Sequence[Layer], arrivals: Iterable[Arrival | None]) -> None:
            p = whose[site[0].name]
            try:
                with self.run.spending.on("solve"):
                    decisions = self.decide_site(p, site, arrivals)
            except CompressError as error:
                if site[0].name not in self.by_rank:
                    raise
                self.problem = self.problem or str(error)  # the others learn of it below
                return
            block_decisions.update({name: (p, decision) for name, decision in decisions.items()})

        # In the order of their first calls, for a forward that has gone past a site does not come by again.
        sites = [
            [layer for layer in site if whose[layer.name] is p]
            for site in self.sites(structure, whose)
            for p in dict.fromkeys(whose[layer.name] for layer in site)
        ]
        with self.run.spending.on("forward"):
            passed = _run_forward(self, sites, visit, self.streams.reference)
        if self.by_rank:
            self.run.comm.fail_together(self.problem)
        block_decisions |= (again := _decide_repeated(self, structure, whose) if structure.again else {})
        if last and not again:  # nothing has changed since
            self.onward = self.streams.after(passed.outputs, passed.reference)
        return block_decisions

    def decide_site(self, p: Pass, site: Sequence[Layer], arrivals: Iterable[Arrival | None]) -> dict[str, Decision]:
        """Collect, decide, install, while the forwards wait before the site."""
        decides = p.stage(Decide)
        assert decides is not None
        spending = self.run.spending
        with spending.on("statistics"):
            routing, offloads = RoutedTokens(), self.run.memory_mode.offloads
            forwards: Iterable[Arrival | None] = map(routing.note, spending.each("forward", arrivals))
            curvature = {la.name: found for la in site if (found := self.run.curvature.get(la.name)) is not None}
            curvature = curvature if decides.curvature else {}
            forwards = weighing(curvature, forwards) if curvature else forwards
            statistics = collect(decides.needs, site[0], forwards, self.run.token_comm, offloads)
            figures = {} if statistics is None else routing.figures(self.run.token_comm, site[0].weight.device)
        if statistics is None:
            self.run.record.left_alone |= {layer.name: "no calibration token reached it" for layer in site}
            return {}
        statistics = [{**part, "curvature": curvature} for part in statistics] if curvature else statistics
        decisions = decide(p, site, self.opened, _comm_of(self, site[0].name), statistics, self.decided)
        decisions = {n: replace(made, figures={**made.figures, **figures}) for n, made in decisions.items()}
        if any("elsewhere" in decision.figures for decision in decisions.values()):
            self.run.record.note(self.run.reporter, ELSEWHERE)
        decisions = {name: self.install(name, decision) for name, decision in decisions.items()}
        rounded = {name: decision for name, decision in decisions.items() if decision.inputs is not None}
        decisions |= self.ranges.of_layers(statistics[0], rounded, "input")
        return _with_outputs(self, p, decisions, arrivals)


def _place(here: BlockRun, name: str, decided: Made) -> Made:
    """Give a layer its decided values, at once or when its expert opens; returns what is kept of the decision."""
    layer = here.layers[name]
    if here.opened.is_open(layer.parameter):
        here.versions.install(layer, decided)
    if layer.parameter in here.opened.experts:
        decided = aside(here.run.sink, decided)
        here.renewed[layer.parameter] = layer, decided
    return decided


def _renew(here: BlockRun, parameter: nn.Parameter) -> None:
    """Give a parameter of an expert that opens its decided values."""
    if parameter in here.renewed:
        layer, decided = here.renewed[parameter]
        here.versions.install(layer, decided.moved(parameter.device) if isinstance(decided, Decision) else decided)


def _permute(here: BlockRun, stage: Reorder, structure: BlockSites, wanted: Sequence[str]) -> None:
    """One suspended forward that only collects, then the channels of the block in the order of the pass."""
    call, comm = here.streams.calls[0], here.run.comm
    folds = here.run.folds.find(here.opened, here.name, call)
    found = same_orders(find_orders(here.opened.block, call, folds.folds, here.run.folds.shared), comm)
    observed = _observe_inputs(here, stage.needs, here.sites(structure, wanted))
    made = reorder(here.opened, folds.prefix, stage, found, observed, set(here.decided.decisions), comm)
    here.edits += made.edits
    here.permuted |= made.figures
    here.permuted |= {name: {"order": why} for name, why in made.stayed.items()}


def _comm_of(here: BlockRun, layer: str) -> Comm:
    """The ranks that decide about a layer."""
    return Comm.alone() if layer in here.by_rank else here.run.comm


def _propagate(here: BlockRun) -> None:
    """Plain forwards with the weights as they are now (and the original ones for the reference)."""
    if not here.run.plan.calibrated or here.streams.end:
        return
    block, streams = here.opened.block, here.streams
    with torch.no_grad(), here.run.spending.on("forward"):
        outputs = [here.run.settled(block(*call.args, **call.kwargs)) for call in streams.calls]
        with here.versions.original():
            others = [here.run.settled(block(*call.args, **call.kwargs)) for call in streams.reference]
    here.run.record.block_forwards += len(streams.calls) + len(streams.reference)
    here.streams = streams.after(outputs, others)


def _with_outputs(
    here: BlockRun, p: Pass, made: Mapping[str, Decision], arrivals: Iterable[Arrival | None]
) -> dict[str, Decision]:
    """The decisions about a site's layers, which are installed, with how each of them rounds what it returns."""
    decisions = dict(made)
    fix = p.stage(Fix)
    if fix is None:
        return decisions
    site = [here.layers[name] for name in made]
    outputs = ((here.versions.returned(layer, arrival) for layer in site) for arrival in arrivals)
    statistics = collect_outputs(fix.needs, site, outputs, here.run.token_comm)
    for layer, of_layer in zip(site, statistics, strict=True):
        codes = fix.codes(of_layer, here.opened.dtype_of(layer.parameter))
        here.versions.round_output(layer, codes)
        rounded = replace(made[layer.name], outputs=codes)
        decisions |= here.ranges.of_layers(of_layer, {layer.name: rounded}, "output")
    return decisions


def _decide_repeated(
    here: BlockRun, structure: BlockSites, whose: Mapping[str, Pass]
) -> dict[str, tuple[Pass, Decision]]:
    """Decide about layers that are called several times, from forwards of their own."""
    repeated_decisions: dict[str, tuple[Pass, Decision]] = {}
    calls, reference = here.streams.calls, here.streams.reference
    for site in structure.again:
        for p in dict.fromkeys(whose[name] for name in site if name in whose and decides_repeated(whose[name])):
            layers = [here.layers[name] for name in site if whose.get(name) is p]
            arrivals = arrivals_of(here.opened.block, layers[0], calls, reference, here.versions).whole(here.run.parts)
            with here.run.spending.on("solve"):
                decisions = here.decide_site(p, layers, arrivals)
            repeated_decisions.update({name: (p, decision) for name, decision in decisions.items()})
            here.run.record.block_forwards += len(calls) + len(reference)
    return repeated_decisions


def _places(here: BlockRun) -> dict[str, Tensor]:
    """{layer: places of the original weights within the decided codes}, on the CPU."""
    layer_places = {}
    for name, decision in here.decided.decisions.items():
        layer = here.layers[name]
        places = places_of(decision, layer.matrix(here.versions.weights[layer.parameter][0]))
        if places is not None:
            layer_places[name] = places.cpu()
    return layer_places


def _result_of(here: BlockRun) -> Finished:
    """All that was decided, for the sink and the record."""
    left_alone = here.run.record.left_alone
    alone = {name: left_alone[name] for name in (*here.layers, *here.attentions) if name in left_alone}
    records = here.records
    if here.by_rank:
        alone, order = here.run.comm.union(alone), {name: i for i, name in enumerate(here.layers)}
        found = here.run.comm.gather_objects((records, here.ranges.noted))
        others = found[: here.run.comm.rank] + found[here.run.comm.rank + 1 :]
        here.ranges.noted += [each for _, noted in others for each in noted if each.tensor in here.by_rank]
        records = [*records, *(each for made, _ in others for each in made if each.name in here.by_rank)]
        records.sort(key=lambda record: order[record.name])
    ranges = here.ranges.in_order(here.opened.block, here.name)
    made = (here.edits, here.fold_records, ranges, here.caches, here.not_folded)
    return Finished(here.decided.decisions, records, alone, *made)


def _round_caches(here: BlockRun, kv: Pass) -> None:
    """Let the attentions keep codes: those that training has seen, or after one more forward where their ranges are
    calibrated."""
    earlier = here.run.earlier.get(here.name)
    if earlier is not None and earlier.caches:
        here.caches.update(earlier.caches)
        for name, codes in here.caches.items():
            here.versions.keep_codes(here.attentions[name], codes)
        return
    ranges: dict[str, tuple[Range, Range]] = {}
    scheme, fix, calls = kv.cache_scheme, kv.stage(Fix), here.streams.calls
    assert scheme is not None
    assert fix is not None
    needs = fix.needs
    if needs:
        per_head = scheme.granularity == "head"
        ranges = cache_ranges(here.opened.block, calls, here.attentions, needs["range"], per_head, here.run.token_comm)
        here.run.record.block_forwards += len(calls)
    for name, attention in here.attentions.items():
        if needs and name not in ranges:
            here.run.record.left_alone[name] = "keeps no keys and values of its own"
            continue
        dtype = here.opened.dtype_of(next(attention.parameters()))
        here.caches[name] = fix.codes(ranges.get(name), dtype)
        if name in ranges:
            here.ranges.of_cache(name, *ranges[name])
        here.versions.keep_codes(attention, here.caches[name])


def _observe_inputs(here: BlockRun, needs: Needs, sites: Sequence[Sequence[Layer]]) -> dict[str, Observed]:
    """One suspended forward of a block that changes nothing: the layers of sites, with the statistics of inputs."""
    observed: dict[str, Observed] = {}

    def visit(site: Sequence[Layer], arrivals: Iterable[Arrival | None]) -> None:
        statistics = collect(needs, site[0], arrivals, here.run.comm)
        if statistics is not None:
            observed.update({layer.name: (layer, statistics[0]) for layer in site})

    _run_forward(here, sites, visit, ())
    return observed


def _run_forward(
    here: BlockRun,
    sites: Sequence[Sequence[Layer]],
    visit: Callable[[Sequence[Layer], Arrivals], None],
    reference: Sequence[Call],
) -> ForwardsDone:
    """One suspended forward of a block, counted."""
    block, calls = here.opened.block, here.streams.calls

    def visit_whole(site: Sequence[Layer], arrivals: Arrivals) -> None:
        if is_held(site[0]):
            visit(site, arrivals.whole(here.run.parts))

    how = here.versions, here.run.memory_mode.repeats, here.run.settled
    passed = suspended_forward(block, calls, sites, visit_whole, reference, *how)
    here.run.record.block_forwards += passed.forwards
    return passed


def _reconstruct(here: BlockRun, p: Pass, stage: Reconstruction, wanted: Sequence[str]) -> None:
    """Train what earlier passes made of the block."""
    layers, streams = {name: here.layers[name] for name in wanted}, here.streams
    decisions = reconstruct(
        here.opened,
        streams.calls,
        streams.reference,
        layers,
        here.decided.decisions,
        stage,
        here.versions,
        here.run.comm,
    )
    for name, decision in decisions.items():
        here.install(name, decision)
        here.records.append(layer_record(here.layers[name], decision, p))
    here.decided.decisions |= decisions
    here.onward = None


def _give_up(here: BlockRun, p: Pass, name: str, decision: Decision) -> None:
    """Give up the values of a layer after a pass, where nothing but its codes is read from now on."""
    run, layer = here.run, here.layers[name]
    *_, last = (each for each in run.plan.passes if each.wants(name))
    read = last is not p or here.versions.originals or run.residency.keep or decision.dense
    if not read and layer.has_format and layer.index is None:
        here.versions.drop(layer.parameter)
        here.opened.drop(layer.parameter)
