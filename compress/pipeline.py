"""THE loop. For every block: open it, let each pass see its statistics and decide, install, write, go on.

    capture -> for block: open -> for pass: (suspended forward: observe -> sync -> apply -> install) -> write -> next

State is what flows from block to block: the calls (the compressed model's hidden states), the reference calls (the
original model's, where a pass compares with them) and the layers decided so far. All of it can be recomputed from
what is on disk, which is how a run resumes.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compress.architecture import (
    Layer,
    Stack,
    find_stacks,
    layers_of,
    left_alone,
    output_head,
    treats_convolutions,
    whole_model,
)
from compress.calibrators import Range
from compress.collect import Collector, joined
from compress.comm import Comm
from compress.convolution import Geometry, samples
from compress.errors import CompressError, InputError
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
from compress.passes.base import Decision, Only, Pass, Site
from compress.progress import Reporter
from compress.rescale import Folded, FoldRecord, Rescaler, collecting, repeat
from compress.residency import Opened, Residency
from compress.scheme import InputCodes


@dataclass
class LayerRecord:
    """What the report says about one compressed layer. figures: whatever its passes measured."""

    name: str
    method: str
    scheme: str
    grid: str
    group_size: int | None
    shape: tuple[int, int]
    figures: dict[str, float | int | str] = field(default_factory=dict)


@dataclass
class RunRecord:
    """What a run did, for the report. not_folded: producers into which no scale can go, and why."""

    layers: list[LayerRecord] = field(default_factory=list)
    folds: list[FoldRecord] = field(default_factory=list)
    not_folded: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    block_forwards: int = 0
    seconds: float = 0.0

    def note(self, reporter: Reporter, message: str) -> None:
        """Keep a remark once and say it."""
        if message not in self.notes:
            self.notes.append(message)
            reporter.note(message)


@dataclass(frozen=True)
class Finished:
    """A block that is done: its decisions (values [N, K] where the codes are not kept), the folds before them, records
    and reasons."""

    decided: Mapping[str, Decision | Tensor]
    records: list[LayerRecord]
    left_alone: Mapping[str, str]
    folded: Sequence[Folded] = ()
    fold_records: Sequence[FoldRecord] = ()


class Sink(Protocol):
    """Takes finished blocks; knows which are finished already."""

    def finished(self, block: str) -> Finished | None:
        """What an earlier run wrote for a block; None where it did not."""
        ...

    def write(
        self,
        block: str,
        opened: Opened,
        layers: Mapping[str, Layer],
        finished: Finished,
    ) -> None:
        """Write a finished block. Called on every rank while the block is open."""
        ...


@dataclass(frozen=True)
class Plan:
    """What will be done, checked before any weight is touched: stacks, layers by block, and who treats what."""

    stacks: tuple[Stack, ...]
    layers: Mapping[str, tuple[Layer, ...]]
    passes: tuple[Pass, ...]
    ignored: Mapping[str, str]
    convolutions: bool = False

    @property
    def calibrated(self) -> bool:
        return any(p.calibrated for p in self.passes)

    @property
    def treated(self) -> set[str]:
        return {
            layer.name
            for layers in self.layers.values()
            for layer in layers
            if any(p.wants(layer.name) for p in self.passes)
        }


def plan(
    model: nn.Module,
    passes: Sequence[Pass],
    ignore: Sequence[str] = (),
    one_block: bool = False,
    convolutions: bool | None = None,
) -> Plan:
    """Match passes with layers. Raises InputError for an impossible order, shape, or a pattern that matches nothing.

    one_block: the model as a whole. Calibrated passes see a model of several stacks (an encoder and a decoder) so.
    convolutions: whether they are layers; None: in models without a stack of linear layers (`architecture`).
    """
    for name, module in model.named_modules():
        if any(isinstance(hook, RoundInput) for hook in module._forward_pre_hooks.values()):
            raise InputError(
                f"{name} rounds its input already, from an earlier run on this model; give all passes to one run, or "
                "load the model again"
            )
    if convolutions is None:
        convolutions = treats_convolutions(model)
    stacks = find_stacks(model, convolutions)
    if one_block or (len(stacks) > 1 and any(p.calibrated for p in passes)):
        stacks = [whole_model(model)]
    shared = _shared_weights(model)
    head = output_head(model)
    ignored: dict[str, str] = {}
    layers: dict[str, tuple[Layer, ...]] = {}
    matched: set[str] = set()
    for stack in stacks:
        for block_name, block in stack.blocks:
            kept = []
            for layer in layers_of(block, block_name, convolutions):
                hits = [p for p in ignore if fnmatchcase(layer.name, p)]
                matched.update(hits)
                if hits:
                    ignored[layer.name] = f"ignored by {hits[0]!r}"
                elif id(layer.parameter) in shared:
                    ignored[layer.name] = "shares its weight with another module"
                elif layer.module is not head:
                    kept.append(layer)
                    if not any(p.wants(layer.name) for p in passes):
                        ignored[layer.name] = "no pass asks for it"
            layers[block_name] = tuple(kept)
    unmatched = [p for p in ignore if p not in matched]
    if unmatched:
        example = next((layer.name for found in layers.values() for layer in found), "")
        raise InputError(f"ignore pattern {unmatched[0]!r} matches no layer; a layer is called {example!r}")
    result = Plan(tuple(stacks), layers, tuple(passes), ignored, convolutions)
    _check(result)
    return result


def _shared_weights(model: nn.Module) -> set[int]:
    """Identities of the weights that several modules use."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            (shared if id(weight) in seen else seen).add(id(weight))
    return shared


def _check(plan: Plan) -> None:
    everything = [layer for layers in plan.layers.values() for layer in layers]
    if not everything:
        raise InputError("no layer is left to compress; ignore less")
    quantized_by: dict[str, Pass] = {}
    for p in plan.passes:
        wanted = [layer for layer in everything if p.wants(layer.name)]
        if not wanted:
            named = f"pass {p.innermost.name!r}"
            if isinstance(p, Only):
                named += f" ({'but' if p.but else 'only'} {', '.join(p.patterns)})"
            raise InputError(f"{named} matches no layer; a layer is called {everything[0].name!r}")
        p.check({layer.name: layer.shape for layer in wanted})
        _check_grouped(p, wanted)
        for layer in wanted:
            earlier = quantized_by.get(layer.name)
            if earlier is not None and p.reads == "dense weight":
                names = [q.innermost.name for q in (p, earlier)]
                advice = "give them different layers (`only`, `but`)"
                if p.writes != "quantized weight":
                    advice = f"put {names[0]!r} first or {advice}"
                raise InputError(
                    f"{names[0]!r} needs the dense weight of {layer.name}, which {names[1]!r} has "
                    f"quantized before it; {advice}"
                )
            if p.writes == "quantized weight":
                quantized_by[layer.name] = p


def _check_grouped(p: Pass, layers: Sequence[Layer]) -> None:
    """Refuse one scale for a grouped convolution whose groups are decided about one by one."""
    if not getattr(p.innermost, "per_tensor", False) or not set(p.needs()) - {"range"}:
        return
    for layer in layers:
        if layer.geometry is not None and layer.geometry.groups > 1:
            raise InputError(
                f"{p.innermost.name} decides about the {layer.geometry.groups} groups of {layer.name} one by one, so "
                "they cannot share the one scale of per_tensor; leave it out, ignore the layer or use rtn"
            )


class RoundInput:
    """A hook that rounds what a layer is given, so that a model in memory computes what its checkpoint will.

    What a token is to a linear layer, a sample is to a convolution: a dynamic range is fitted to each.
    """

    def __init__(self, codes: InputCodes, geometry: Geometry | None = None) -> None:
        self.codes, self.geometry, self.active = codes, geometry, True

    def rounded(self, x: Tensor) -> Tensor:
        """What the layer multiplies in place of x."""
        if self.geometry is None:
            return self.codes.fake_quantize(x)
        return self.codes.fake_quantize(samples(x, self.geometry).flatten(1)).reshape(x.shape)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_StraightThrough.apply(args[0], self.rounded), *args[1:]) if self.active else args


class _StraightThrough(torch.autograd.Function):
    """Rounded inputs whose gradient is that of the inputs, as the kernels have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Versions:
    """The original and the new state of the layers changed so far in a block, to swap between."""

    def __init__(self) -> None:
        self.pairs: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self.hooks: dict[nn.Module, RoundInput] = {}
        self.installed: set[nn.Module] = set()

    def add(self, parameter: nn.Parameter, new: Tensor) -> None:
        self.pairs.append((parameter, parameter.data, new))
        parameter.data = new

    def use_original(self, original: bool) -> None:
        for parameter, old, new in self.pairs:
            parameter.data = old if original else new
        for hook in self.hooks.values():
            hook.active = not original

    def entering(self, module: nn.Module, x: Tensor) -> Tensor:
        """What a layer multiplies while forwards are suspended: hooks that they already passed cannot act."""
        hook = self.hooks.get(module)
        return x if hook is None or not hook.active or module in self.installed else hook.rounded(x)

    def install_hooks(self) -> None:
        """From now on the layers round their own inputs."""
        for module, hook in self.hooks.items():
            if module not in self.installed:
                module.register_forward_pre_hook(hook)
                self.installed.add(module)


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

    def install(self, layer: Layer, decided: Decision | Tensor, versions: _Versions) -> None:
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
        seen = _range_figures(found)
        return {n: replace(d, figures={**d.figures, **seen}) if d.inputs else d for n, d in decisions.items()}

    def run_block(
        self, name: str, block: nn.Module, calls: list[Call], reference: list[Call]
    ) -> tuple[list[Call], list[Call]]:
        """Compress one block; returns the calls of the next."""
        started = time.monotonic()
        layers = {layer.name: layer for layer in self.plan.layers[name]}
        before = self.sink.finished(name)
        with self.residency.open(block) as opened:
            versions = _Versions()
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
                    records.append(_layer_record(p, layers[layer_name], decision))
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
        # Folds are of linear layers: nothing is collected for convolutions.
        linear = {n for n, layer in wanted.items() if layer.geometry is None}
        sites = [site for site in ([n for n in s if n in linear] for s in structure.sites) if site]
        visit, statistics = collecting(p, sites, layers, self.comm, _problem)
        suspended_forward(opened.block, calls, wanted, sites, visit, None, lambda _: None)
        self.record.block_forwards += len(calls)
        prefix = f"{block_name}." if block_name else ""
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
        versions: _Versions,
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
            collector = Collector(p.needs(), layers[names[0]])
            seen = 0
            problem = None
            for arrival in arrivals:
                problem = problem or _problem(names[0], arrival)
                if problem is None:
                    collector.update(arrival)
                    seen += 0 if arrival is None else len(arrival.x_MK)
            self.comm.fail_together(problem)
            collector.sync(self.comm)
            total = int(self.comm.all_reduce(torch.tensor(seen, device=self.residency.device)))
            if total == 0:
                for layer_name in names:
                    self.record.left_alone[layer_name] = "no calibration token reached it"
                return
            decisions = self.apply(p, names, layers, opened, collector.results())
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
        self, block: nn.Module, calls: list[Call], reference: list[Call], versions: _Versions
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


def _problem(layer: str, arrival: Arrival | None) -> str | None:
    """Why a micro-batch cannot enter the statistics of a layer."""
    if arrival is None:
        return None
    x, reference = arrival.x_MK, arrival.reference_MK
    if not bool(torch.isfinite(x).all()):
        return (
            f"the input of {layer} has non-finite values during calibration; the model overflows in this dtype or its "
            "weights are damaged"
        )
    if reference is not None and reference.shape != x.shape:
        return (
            f"{layer} sees other tokens in the compressed model than in the original (routing); drift correction "
            "cannot pair them: turn it off (drift=0) or ignore the layer"
        )
    return None


def _range_figures(found: Range) -> dict[str, float | int | str]:
    """What the report says about the fixed range of an input, which is one for the whole tensor."""
    figures: dict[str, float | int | str] = {
        "input_low": float(found.lo),
        "input_high": float(found.hi),
        "input_lowest": float(found.lowest),
        "input_highest": float(found.highest),
        "calibrator": found.method,
    }
    return figures if found.clipped is None else {**figures, "input_clipped": float(found.clipped)}


def _layer_record(p: Pass, layer: Layer, decision: Decision) -> LayerRecord:
    inner = p.innermost
    grid = decision.weight.grid
    return LayerRecord(
        layer.name,
        inner.name,
        getattr(inner, "scheme", ""),
        getattr(inner, "grid", ""),
        grid.group_size,
        layer.shape,
        dict(decision.figures),
    )


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
    state = _Run(plan_, residency, sink, comm, reporter, record, reference, Rescaler(comm, _shared_weights(model)))
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
    record.seconds = time.monotonic() - started


def _first_output(residency: Residency, stack: Stack, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with residency.open(stack.blocks[0][1]) as opened:
        return output_shape(opened.block, args, kwargs)
