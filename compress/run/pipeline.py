"""THE loop. For every block: open it, let each pass see its statistics and decide, install, write, go on.

    capture -> for block: open -> for pass: (suspended forward: observe -> sync -> apply -> install) -> write -> next

The token embedding, if a pass is about it, is rounded before the capture. State is what flows from block to block: the
calls (the compressed model's hidden states), the reference calls (the original model's, where a pass compares with
them) and the layers decided so far. All of it can be recomputed from what is on disk, which is how a run resumes.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.calibration.caches import cache_names, cache_ranges
from compress.calibration.calibrators import Range
from compress.calibration.collect import collected, collected_outputs
from compress.checkpoint.record import Finished, RangeRecord, RunRecord, Sink, range_figures, range_record
from compress.comm import Comm
from compress.errors import CompressError
from compress.model.calls import Arrival, Batch, Call, hidden_of, without_cache
from compress.model.folds import Folded, FoldRecord
from compress.model.layers import Layer, Stack, left_alone
from compress.model.opened import Opened
from compress.passes.base import Pass, Site
from compress.progress import Reporter
from compress.run.capture import capture, output_shape
from compress.run.forward import suspended_forward
from compress.run.installed import RoundInput, RoundOutput, Versions
from compress.run.plan import Plan, shared_weights
from compress.run.remarks import few_tokens, held_back, layer_record
from compress.run.residency import Residency
from compress.run.restore import hooks_and_buffers, undone
from compress.run.rewrite import Rescaler, collecting, repeat
from compress.run.structure import Structure, structure_of
from compress.weights.caches import CacheCodes
from compress.weights.decision import Decision, joined


@dataclass
class _Run:
    plan: Plan
    residency: Residency
    sink: Sink
    comm: Comm
    reporter: Reporter
    record: RunRecord
    reference: bool
    rescaler: Rescaler
    ranges: list[RangeRecord] = field(default_factory=list)  # of the block at hand
    decided: dict[str, Decision] = field(default_factory=dict)  # of the block at hand, by earlier passes
    before: dict[str, Tensor] = field(default_factory=dict)  # its layers that are pruned, as they were
    repeated: set[str] = field(default_factory=set)  # blocks that an earlier run had finished

    def install(self, layer: Layer, decided: Decision | Tensor, versions: Versions) -> None:
        """Give a layer the values [N, K] that its codes stand for."""
        parameter = layer.parameter
        values = decided.weight.dequantize() if isinstance(decided, Decision) else decided
        if isinstance(decided, Decision) and decided.kept is not None:
            self.before.setdefault(layer.name, layer.weight)
        versions.add(parameter, layer.stored(values.to(parameter.device, parameter.dtype)))
        if isinstance(decided, Decision):
            if decided.inputs is not None:
                versions.inputs[layer.module] = RoundInput(decided.inputs, layer.geometry)
            if decided.outputs is not None:
                versions.outputs[layer.module] = RoundOutput(decided.outputs)

    def apply(
        self,
        p: Pass,
        names: Sequence[str],
        layers: Mapping[str, Layer],
        opened: Opened,
        stats: Sequence[Mapping[str, Any]] = ({},),
    ) -> dict[str, Decision]:
        """Ask the pass about the layers of a site; with several sets of statistics, about as many parts of each."""
        weights = {n: layers[n].weight for n in names}
        for name, weight in weights.items():
            if not bool(torch.isfinite(weight).all()):
                raise CompressError(f"{name} has non-finite weights; the model is damaged")
        scale_dtypes = self.scale_dtypes(names, layers, opened)
        decided = {n: self.decided[n] for n in names if n in self.decided}
        before = {n: self.before[n] for n in names if n in self.before}
        site = Site(weights, {}, scale_dtypes, self.comm, decided, before)
        parts = []
        for i, part in enumerate(stats):
            heights = {n: len(w) // len(stats) for n, w in weights.items()}
            rows = site.rows({n: slice(i * height, (i + 1) * height) for n, height in heights.items()})
            fitted = p.fitted({weight.shape[1] for weight in weights.values()})
            parts.append(fitted.apply(replace(rows, stats=part)))
        made = {n: joined([part[n] for part in parts]) for n in parts[0]}
        # A mask stays with the layer, whatever is decided about it afterwards.
        return {n: d if d.kept is not None else replace(d, kept=site.kept(n)) for n, d in made.items()}

    @staticmethod
    def scale_dtypes(names: Sequence[str], layers: Mapping[str, Layer], opened: Opened) -> dict[str, torch.dtype]:
        """The dtype in which each layer's scales are stored: that of its weight."""
        return {n: opened.dtype_of(layers[n].parameter) for n in names}

    def fix_outputs(
        self,
        p: Pass,
        made: Mapping[str, Decision],
        layers: Mapping[str, Layer],
        opened: Opened,
        arrivals: Iterable[Arrival | None],
        versions: Versions,
    ) -> dict[str, Decision]:
        """The decisions about a site's layers, which are installed, with how each of them rounds what it returns."""
        if not p.output_needs():
            return dict(made)
        treated = [layers[n] for n in made]
        found = collected_outputs(p.output_needs(), treated, arrivals, versions.entering, self.comm)
        dtypes = self.scale_dtypes(list(made), layers, opened)
        decisions = {}
        for (name, decision), stats in zip(made.items(), found, strict=True):
            outputs = p.output_codes(stats, dtypes[name])
            versions.outputs[layers[name].module] = RoundOutput(outputs)
            decisions[name] = replace(decision, outputs=outputs)
            decisions |= self.with_range(stats, {name: decisions[name]}, "output")
        return decisions

    def with_range(
        self, stats: Mapping[str, Any], decisions: Mapping[str, Decision], role: Literal["input", "output"]
    ) -> dict[str, Decision]:
        """Decisions that go by one range with its figures; the range is noted, once, for all of them."""
        if not decisions or not isinstance(stats.get("range"), Range):
            return dict(decisions)
        first, *also = decisions
        self.ranges.append(range_record(stats["range"], first, role, also))
        seen = range_figures(self.ranges[-1])
        return {n: replace(d, figures={**d.figures, **seen}) for n, d in decisions.items()}

    def run_tables(self, model: nn.Module, total: int) -> None:
        """Round the token embedding and the output head, for which no data is needed: before the blocks run, so that
        they are calibrated on what they will be given."""
        p, blocks = self.plan.embeddings, {block for stack in self.plan.stacks for _, block in stack.blocks}
        done = {layer.name for layer in self.record.layers}  # by a first try, whose blocks were no chain
        tables = [table for table in self.plan.tables if table.name not in done]
        for name in (n for table in self.plan.tables for n in (table.name, *table.shared)):
            self.record.left_alone.pop(name, None)
        if p is None or not tables:
            return
        # What is not in a block is the root's; the blocks' calibration reads it again, so the edits have to stay.
        with self.residency.open(model, blocks - {model}, self.residency.keep or self.plan.calibrated) as opened:
            for table in tables:
                versions, part = Versions(), opened.inside(table.module)
                finished = self.sink.finished(table.name)
                if finished is None:
                    made = self.apply(p, [table.name], {table.name: table}, part)[table.name]
                    self.install(table, made, versions)
                    described = layer_record(p, table, made)
                    if table.shared:
                        described.figures["shared_with"] = ", ".join(table.shared)
                    finished = Finished({table.name: made}, [described], {})
                    self.sink.write(table.name, part, {table.name: table}, finished)
                else:
                    self.install(table, finished.decided[table.name], versions)
                self.record.take(finished)
                done_tables = self.plan.tables.index(table) + 1
                self.reporter.step(done_tables, total, "")  # tables take less time than blocks
                self.reporter.step(done_tables, total, table.name)
        self.record.changed += [table.name for table in tables]

    def run_block(
        self, name: str, block: nn.Module, calls: list[Call], reference: list[Call]
    ) -> tuple[list[Call], list[Call]]:
        """Compress one block, entirely or, where that fails, not at all; returns the calls of the next."""
        with undone(hooks_and_buffers(block)):
            following = self.compress_block(name, block, calls, reference)
        self.record.changed.append(name or "all of it")
        return following

    def compress_block(
        self, name: str, block: nn.Module, calls: list[Call], reference: list[Call]
    ) -> tuple[list[Call], list[Call]]:
        """`run_block`; a failure leaves hooks behind."""
        started = time.monotonic()
        layers = {layer.name: layer for layer in self.plan.layers[name]}
        attentions = {} if self.plan.kv is None else cache_names(block, name)
        before = self.sink.finished(name)
        with self.residency.open(block) as opened:
            versions = Versions()
            if before is not None:
                repeat(opened, before.folded)
                for layer_name, decided in before.decided.items():
                    self.install(layers[layer_name], decided, versions)
                versions.install_hooks()
                for attention, codes in before.caches.items():
                    versions.keep_codes(attentions[attention], codes)
                self.record.take(before)
                self.repeated.add(name)
                return self.propagate(block, calls, reference, versions)
            made_here: dict[str, Decision] = {}
            self.decided, self.before = made_here, {}
            records = []
            self.ranges.clear()
            folded: list[Folded] = []
            fold_records: list[FoldRecord] = []
            forwarded = False
            structure = self.structure(block, calls, layers) if self.plan.calibrated else None
            for index, p in enumerate(self.plan.passes):
                wanted = {n: layer for n, layer in layers.items() if p.wants(n)}
                if not wanted:
                    continue
                if structure is not None and p.fold_needs():
                    new, described = self.rescale(p, name, wanted, layers, opened, structure, calls, set(made_here))
                    folded += new
                    fold_records += described
                if not p.rounds:
                    continue
                made: dict[str, Decision] = {}
                if structure is None or not (p.needs() or p.output_needs()):
                    for layer_name in wanted:
                        made.update(self.apply(p, [layer_name], layers, opened))
                        self.install(layers[layer_name], made[layer_name], versions)
                else:
                    last = index == len(self.plan.passes) - 1 and self.plan.kv is None
                    made, outputs = self.observe(p, wanted, layers, opened, structure, calls, reference, versions)
                    if last:
                        calls, reference = self.next_calls(calls, outputs[0]), self.next_calls(reference, outputs[1])
                        forwarded = True
                versions.install_hooks()
                for layer_name, decision in made.items():
                    made_here[layer_name] = decision
                    records.append(layer_record(p, layers[layer_name], decision))
            caches = self.round_caches(attentions, opened, calls, versions)
            if self.plan.calibrated and not forwarded:
                calls, reference = self.propagate(block, calls, reference, versions)
            for entry in records:
                entry.figures["block_seconds"] = round(time.monotonic() - started, 3)
            here = (*layers, *attentions)
            alone = {n: self.record.left_alone[n] for n in here if n in self.record.left_alone}
            place = {inside: i for i, (inside, _) in enumerate(block.named_modules(prefix=name))}
            ranges = sorted(self.ranges, key=lambda r: place[r.tensor])
            done = Finished(made_here, records, alone, folded, fold_records, ranges, caches)
            self.sink.write(name, opened, layers, done)
            self.record.take(done)
        return calls, reference

    def structure(self, block: nn.Module, calls: list[Call], layers: Mapping[str, Layer]) -> Structure:
        """How the block calls its layers, the same on every rank or an error on every rank."""
        found = structure_of(block, calls[0], list(layers.values()))
        if any(other != found for other in self.comm.gather_objects(found)):
            raise CompressError(
                "ranks disagree on which layers a block calls (its control flow depends on the data); "
                "run it in one process"
            )
        return found

    def rescale(
        self,
        p: Pass,
        block_name: str,
        wanted: Mapping[str, Layer],
        layers: Mapping[str, Layer],
        opened: Opened,
        structure: Structure,
        calls: list[Call],
        decided: set[str],
    ) -> tuple[list[Folded], list[FoldRecord]]:
        """One suspended forward that only collects, then the folds of the block with the scales of the pass."""
        found = self.rescaler.find(opened.block, calls[0])
        self.record.not_folded += [reason for reason in found.rejected if reason not in self.record.not_folded]
        prefix = f"{block_name}." if block_name else ""
        # Nothing is collected for layers that no fold serves.
        served = {prefix + consumer.name for fold in found.folds for consumer in fold.consumers} & set(wanted)
        sites = [site for site in ([n for n in s if n in served] for s in structure.sites) if site]
        if not sites:
            return [], []
        visit, statistics = collecting(p, sites, layers, self.comm)
        suspended_forward(opened.block, calls, wanted, sites, visit, None, lambda _: None)
        self.record.block_forwards += len(calls)
        return self.rescaler.rescale(p, prefix, opened, layers, set(wanted), decided, found, statistics)

    def observe(
        self,
        p: Pass,
        wanted: Mapping[str, Layer],
        layers: Mapping[str, Layer],
        opened: Opened,
        structure: Structure,
        calls: list[Call],
        reference: list[Call],
        versions: Versions,
    ) -> tuple[dict[str, Decision], tuple[list[Any], list[Any]]]:
        """One suspended forward: statistics, decisions and new weights, site after site."""
        sites = [[n for n in site if n in wanted] for site in structure.sites]
        sites = [site for site in sites if site]
        for layer_name in wanted:
            if layer_name in structure.unreached:
                self.record.left_alone[layer_name] = "never called during calibration"
            elif layer_name in structure.repeated:
                self.record.left_alone[layer_name] = "called several times in one forward pass"
        if not structure.traced:
            self.record.note(
                self.reporter,
                "blocks could not be traced without data: one more forward pass of one "
                "micro-batch per block shows which layers share inputs",
            )
        made: dict[str, Decision] = {}

        def visit(index: int, arrivals: Iterable[Arrival | None]) -> None:
            names = sites[index]
            results = collected(p.needs(), layers[names[0]], arrivals, self.comm)
            if results is None:
                for layer_name in names:
                    self.record.left_alone[layer_name] = "no calibration token reached it"
                return
            decisions = self.apply(p, names, layers, opened, results)
            for layer_name, decision in decisions.items():
                self.install(layers[layer_name], decision, versions)
            rounded = {n: decision for n, decision in decisions.items() if decision.inputs is not None}
            decisions |= self.with_range(results[0], rounded, "input")
            made.update(self.fix_outputs(p, decisions, layers, opened, arrivals, versions))

        shadow = reference if self.reference else None
        outputs = suspended_forward(
            opened.block,
            calls,
            wanted,
            sites,
            visit,
            shadow,
            versions.use_original,
            versions.entering,
            versions.leaving,
        )
        self.record.block_forwards += len(calls) + (len(reference) if shadow is not None else 0)
        return made, outputs

    def round_caches(
        self, names: Mapping[str, nn.Module], opened: Opened, calls: list[Call], versions: Versions
    ) -> dict[str, CacheCodes]:
        """Let the attentions of a block keep codes, after one more forward where their ranges are calibrated."""
        kv = self.plan.kv
        if kv is None:
            return {}
        ranges: dict[str, tuple[Range, Range]] = {}
        needs = kv.needs()
        if needs:
            per_head = kv.granularity == "head"
            ranges = cache_ranges(opened.block, calls, names, needs["range"], per_head, self.comm)
            self.record.block_forwards += len(calls)
        codes = {}
        for name, attention in names.items():
            if needs and name not in ranges:
                self.record.left_alone[name] = "keeps no keys and values of its own"
                continue
            codes[name] = kv.decide(ranges.get(name), opened.dtype_of(next(attention.parameters())))
            for role, found in zip(("keys", "values"), ranges.get(name, ()), strict=False):
                self.ranges.append(range_record(found, name, role))
            versions.keep_codes(attention, codes[name])
        return codes

    def propagate(
        self, block: nn.Module, calls: list[Call], reference: list[Call], versions: Versions
    ) -> tuple[list[Call], list[Call]]:
        """Plain forwards with the weights as they are now (and the original ones for the reference)."""
        if not self.plan.calibrated:
            return calls, reference
        with torch.no_grad():
            if calls[0].key is None:
                return calls, reference  # one block in all: nothing comes after it
            outputs = [block(*c.args, **c.kwargs) for c in calls]
            versions.use_original(True)
            others = [block(*c.args, **c.kwargs) for c in reference]
            versions.use_original(False)
        self.record.block_forwards += len(calls) + len(reference)
        return self.next_calls(calls, outputs), self.next_calls(reference, others)

    @staticmethod
    def next_calls(calls: list[Call], outputs: list[Any]) -> list[Call]:
        """The same calls, on the hidden states that the block returned."""
        if calls and calls[0].key is None:
            return calls
        return [call.with_hidden(hidden_of(output)) for call, output in zip(calls, outputs, strict=True)]


def run(
    model: nn.Module,
    plan_: Plan,
    batches: Sequence[Batch],
    residency: Residency,
    sink: Sink,
    comm: Comm,
    record: RunRecord,
    reporter: Reporter,
) -> None:
    """Carry out a plan. `batches` are this rank's micro-batches (empty where no pass needs calibration).

    Raises ChainBrokenError, before anything is changed, for a model that must run as one block.
    """
    started = time.monotonic()
    record.left_alone.update(left_alone(model, plan_.treated, plan_.convolutions))
    record.left_alone.update(plan_.ignored)
    reference = any(p.needs_reference for p in plan_.passes)
    state = _Run(plan_, residency, sink, comm, reporter, record, reference, Rescaler(comm, shared_weights(model)))
    total = sum(len(stack.blocks) for stack in plan_.stacks) + len(plan_.tables)
    finished = len(plan_.tables)
    reporter.step(0, total, "")
    with without_cache(model):
        captures = [
            partial(capture, model, s, batches, residency, partial(_first_output, residency, s)) for s in plan_.stacks
        ]
        # The original model's hidden states come from the original embedding.
        originals = [each()[0] if reference and plan_.tables else None for each in captures]
        state.run_tables(model, total)
        for stack, capture_stack, original in zip(plan_.stacks, captures, originals, strict=True):
            captured: list[list[Call]] = [[] for _ in stack.blocks]
            if plan_.calibrated:
                captured = capture_stack()
            reporter.step(finished, total, "")
            calls = list(captured[0])
            shadow = list(calls if original is None else original) if reference else []
            for i, (name, block) in enumerate(stack.blocks):
                if i > 0 and plan_.calibrated:
                    calls = [own.with_hidden(c.hidden) for own, c in zip(captured[i], calls, strict=True)]
                    shadow = [own.with_hidden(c.hidden) for own, c in zip(captured[i], shadow, strict=False)]
                    captured[i - 1] = []
                calls, shadow = state.run_block(name, block, calls, shadow)
                finished += 1
                if name in state.repeated:
                    reporter.step(finished, total, "")  # blocks that are not finished take longer
                reporter.step(finished, total, name)
    for remark in (few_tokens(record.layers), held_back(record.layers)):
        if remark is not None:
            record.note(reporter, remark)
    record.seconds = time.monotonic() - started


def _first_output(residency: Residency, stack: Stack, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with residency.open(stack.blocks[0][1]) as opened:
        return output_shape(opened.block, args, kwargs)
