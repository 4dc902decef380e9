"""THE loop. For every block: open it, let each pass see its statistics and decide, install, write, go on.

    capture -> for block: open -> for pass: (suspended forward: observe -> sync -> apply -> install) -> write -> next

State is what flows from block to block: the calls (the compressed model's hidden states), the reference calls (the
original model's, where a pass compares with them) and the layers decided so far. All of it can be recomputed from
what is on disk, which is how a run resumes.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.architecture import (
    Layer,
    Stack,
    left_alone,
)
from compress.calibrators import Range
from compress.collect import collected, joined
from compress.comm import Comm
from compress.errors import CompressError
from compress.forward import (
    Arrival,
    Batch,
    Call,
    Structure,
    capture,
    hidden_of,
    output_shape,
    structure_of,
    suspended_forward,
    without_cache,
)
from compress.passes.base import Decision, Pass, Site
from compress.plan import Plan, shared_weights
from compress.progress import Reporter
from compress.record import Finished, RunRecord, Sink, few_tokens, layer_record, range_figures
from compress.rescale import Folded, FoldRecord, Rescaler, collecting, repeat
from compress.residency import Opened, Residency
from compress.versions import RoundInput, Versions


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

    def install(self, layer: Layer, decided: Decision | Tensor, versions: Versions) -> None:
        """Give a layer the values [N, K] that its codes stand for."""
        parameter = layer.parameter
        values = decided.weight.dequantize() if isinstance(decided, Decision) else decided
        versions.add(parameter, layer.stored(values.to(parameter.device, parameter.dtype)))
        if isinstance(decided, Decision) and decided.inputs is not None:
            versions.hooks[layer.module] = RoundInput(decided.inputs, layer.geometry)

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
        dtypes = {id(param): opened.dtypes[n] for n, param in opened.block.named_parameters() if n in opened.dtypes}
        scale_dtypes = {n: dtypes[id(layers[n].parameter)] for n in names}
        parts = []
        for i, part in enumerate(stats):
            rows = {n: w.unflatten(0, (len(stats), -1))[i] for n, w in weights.items()}
            parts.append(p.apply(Site(rows, part, scale_dtypes, self.comm)))
        decisions = {n: joined([made[n] for made in parts]) for n in parts[0]}
        found = stats[0].get("range")
        if not isinstance(found, Range):
            return decisions
        seen = range_figures(found)
        return {n: replace(d, figures={**d.figures, **seen}) if d.inputs else d for n, d in decisions.items()}

    def run_block(
        self, name: str, block: nn.Module, calls: list[Call], reference: list[Call]
    ) -> tuple[list[Call], list[Call]]:
        """Compress one block; returns the calls of the next."""
        started = time.monotonic()
        layers = {layer.name: layer for layer in self.plan.layers[name]}
        before = self.sink.finished(name)
        with self.residency.open(block) as opened:
            versions = Versions()
            if before is not None:
                repeat(opened, before.folded)
                for layer_name, decided in before.decided.items():
                    self.install(layers[layer_name], decided, versions)
                versions.install_hooks()
                self.record.layers.extend(before.records)
                self.record.folds.extend(before.fold_records)
                self.record.left_alone.update(before.left_alone)
                return self.propagate(block, calls, reference, versions)
            made_here: dict[str, Decision] = {}
            records = []
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
                if structure is None or not p.needs():
                    for layer_name in wanted:
                        made.update(self.apply(p, [layer_name], layers, opened))
                        self.install(layers[layer_name], made[layer_name], versions)
                else:
                    last = index == len(self.plan.passes) - 1
                    made, outputs = self.observe(p, wanted, layers, opened, structure, calls, reference, versions)
                    if last:
                        calls, reference = self.next_calls(calls, outputs[0]), self.next_calls(reference, outputs[1])
                        forwarded = True
                versions.install_hooks()
                for layer_name, decision in made.items():
                    made_here[layer_name] = decision
                    records.append(layer_record(p, layers[layer_name], decision))
            if self.plan.calibrated and not forwarded:
                calls, reference = self.propagate(block, calls, reference, versions)
            for entry in records:
                entry.figures["block_seconds"] = round(time.monotonic() - started, 3)
            alone = {n: self.record.left_alone[n] for n in layers if n in self.record.left_alone}
            self.sink.write(name, opened, layers, Finished(made_here, records, alone, folded, fold_records))
            self.record.layers.extend(records)
            self.record.folds.extend(fold_records)
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

        def visit(index: int, arrivals: Iterator[Arrival | None]) -> None:
            names = sites[index]
            results = collected(p.needs(), layers[names[0]], arrivals, self.comm)
            if results is None:
                for layer_name in names:
                    self.record.left_alone[layer_name] = "no calibration token reached it"
                return
            decisions = self.apply(p, names, layers, opened, results)
            for layer_name, decision in decisions.items():
                self.install(layers[layer_name], decision, versions)
            made.update(decisions)

        shadow = reference if self.reference else None
        outputs = suspended_forward(
            opened.block, calls, wanted, sites, visit, shadow, versions.use_original, versions.entering
        )
        self.record.block_forwards += len(calls) + (len(reference) if shadow is not None else 0)
        return made, outputs

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
    total = sum(len(stack.blocks) for stack in plan_.stacks)
    finished = 0
    reporter.step(0, total, "")
    with without_cache(model):
        for stack in plan_.stacks:
            captured: list[list[Call]] = [[] for _ in stack.blocks]
            if plan_.calibrated:
                captured = capture(model, stack, batches, residency, partial(_first_output, residency, stack))
            calls = list(captured[0])
            shadow = list(calls) if reference else []
            for i, (name, block) in enumerate(stack.blocks):
                if i > 0 and plan_.calibrated:
                    calls = [own.with_hidden(c.hidden) for own, c in zip(captured[i], calls, strict=True)]
                    shadow = [own.with_hidden(c.hidden) for own, c in zip(captured[i], shadow, strict=False)]
                    captured[i - 1] = []
                calls, shadow = state.run_block(name, block, calls, shadow)
                finished += 1
                reporter.step(finished, total, name)
    remark = few_tokens(record.layers)
    if remark is not None:
        record.note(reporter, remark)
    record.seconds = time.monotonic() - started


def _first_output(residency: Residency, stack: Stack, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with residency.open(stack.blocks[0][1]) as opened:
        return output_shape(opened.block, args, kwargs)
