"""The walk that measures sensitivities: block by block over the original model, every candidate on every layer.

    capture -> gradients -> each block: statistics -> candidates decide -> weighted losses, bytes -> held-out rows

Statistics are those of the original model: no candidate changes the inputs of later layers, so that all candidates
share one forward. The decisions of a candidate are dropped after their block. Held-out rows go through the original and
through a uniform model of each candidate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.sensitivity import Tried, Unit, header_bytes
from compress.engine.layer_versions import Versions
from compress.engine.walk.capture import capture_stack
from compress.engine.walk.collect import collect
from compress.engine.walk.decide import Decided, Reach, decide
from compress.engine.walk.forward import suspended_forward
from compress.engine.walk.held_out_kl import HeldOut, holding
from compress.engine.walk.sites import structure_of
from compress.engine.walk.state import Run, Streams
from compress.model.calls import Arrivals, Batch, without_cache
from compress.model.layers import Layer
from compress.model.open_block import Opened
from compress.search.candidate import Candidate
from compress.search.fisher import Fisher, Weighted
from compress.solvers.hessian_with_drift import quadratic
from compress.solvers.statistics.hessian import Hessian, HessianResult
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.weights.decision import Decision


@dataclass
class LayerCosts:
    """Measured units, the KL of uniform models ({candidate: KL}), and layers left out ({layer: reason})."""

    units: list[Unit] = field(default_factory=list)
    uniform_kl: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """A layer after a candidate. values: as the module stores them. loss: squared error of the output, energy: squared
    norm of the original output, both means over tokens. fisher: the loss, weighted by Fisher information; NaN
    where no gradient reached the layer. bytes, header_bytes: in the checkpoint."""

    values: Tensor
    loss: float
    energy: float
    bytes: int
    header_bytes: int
    fisher: float


# {candidate: {layer: the layer after it}}
OfBlock = dict[str, dict[str, Made]]


def measure_layers(run: Run, candidates: Sequence[Candidate], held_out: Sequence[Batch]) -> LayerCosts:
    """Measure all candidates. The run must have one process and a plan of all layers (`engine.plan.candidate_layers`).
    held_out: rows for the KL of uniform models."""
    costs = LayerCosts()
    run.steps.begin()
    (stack,) = run.plan.stacks  # a calibrated model with several stacks is treated as one block
    with without_cache(run.model):
        calls = capture_stack(run, stack)
        streams = Streams(calls[0], [])
        fisher = Fisher(run, stack, calls)
        with run.residency.open(run.model, keep=False) as opened:
            own = capture_stack(replace(run, batches=held_out), stack)
            device = run.residency.device
            batches = [{k: t.to(device) for k, t in batch.items()} for batch in held_out]
            holdout = HeldOut(run.model, stack, batches, own, [c.name for c in candidates])
            for index, (name, _) in enumerate(stack.blocks):
                look = _Block(run, name, opened, candidates, costs, fisher)
                streams = look.walk(streams.called_as(calls[index]))
                look.enter(index, holdout)
                run.steps.finish(name, usual=True)
            costs.uniform_kl = holdout.uniform_kl()
    if missed := [unit.name for unit in costs.units if any(isnan(each.fisher) for each in unit.tried.values())]:
        run.record.note(
            run.reporter,
            f"no gradient of predictions reached {missed[0]} ({len(missed)} units in all): its loss counts as much as "
            "others' of its size do on average",
        )
    return replace(costs, units=with_fisher(costs.units))


class _Block:
    """One block of the walk."""

    def __init__(
        self,
        run: Run,
        name: str,
        opened: Opened,
        candidates: Sequence[Candidate],
        found: LayerCosts,
        fisher: Fisher,
    ) -> None:
        self.run, self.name, self.opened, self.found = run, name, opened, found
        self.fisher = fisher
        self.block = run.model.get_submodule(name)
        self.layers = {la.name: la for la in run.plan.layers[name]}
        self.reach = Reach(self.layers.values())
        self.candidates = [Candidate(c.name, tuple(p.without_reference() for p in c.passes)) for c in candidates]
        self.made: OfBlock = {c.name: {} for c in candidates}
        self.sites: list[list[Layer]] = []

    def walk(self, streams: Streams) -> Streams:
        """Run one forward, in which every candidate decides about every site. Returns the calls of the next block."""
        structure = structure_of(self.block, streams.calls, list(self.layers.values()))
        self.found.left_out |= dict.fromkeys(structure.unreached, "never called during calibration")
        self.found.left_out |= dict.fromkeys(structure.repeated, "called several times in one forward pass")
        self.sites = [[self.layers[n] for n in names] for names in structure.sites]
        passed = suspended_forward(
            self.block, streams.calls, self.sites, self._visit, (), Versions(), repeats=self.run.memory_mode.repeats
        )
        self.run.record.block_forwards += passed.forwards
        return streams.after(passed.outputs, [])

    def _visit(self, site: Sequence[Layer], arrivals: Arrivals) -> None:
        needs, names = _needs(self.candidates)
        statistics = collect(needs, site[0], arrivals, self.run.comm)
        if statistics is None:
            self.found.left_out |= {layer.name: "no calibration token reached it" for layer in site}
            return
        weighted = self.fisher.weighted(site, arrivals)
        for candidate in self.candidates:
            suited = [layer for layer in site if candidate.suits(layer.name, layer.shape) is None]
            if suited:
                of_passes = [[{k: s[n] for k, n in own.items()} for s in statistics] for own in names[candidate.name]]
                decisions = self._decided(candidate, suited, of_passes)
                for layer in suited:
                    self.made[candidate.name][layer.name] = self._made(
                        candidate, layer, decisions[layer.name], statistics, weighted.get(layer.name)
                    )

    def _decided(
        self, candidate: Candidate, site: Sequence[Layer], statistics: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, Decision]:
        """{layer: decision} after all passes of a candidate, run in order on a site. statistics: those of each pass."""
        earlier = Decided(came=self.run.plan.earlier, reach=self.reach)
        original = {layer.name: layer.weight.clone() for layer in site}
        values: dict[Layer, Tensor] = {}
        for p, own in zip(candidate.passes, statistics, strict=True):
            with holding(values):
                made = decide(p, site, self.opened, self.run.comm, own, earlier)
            earlier.decisions |= made
            for layer in site:
                if made[layer.name].kept is not None:
                    earlier.before.setdefault(layer.name, original[layer.name])
                values[layer] = _values(layer, made[layer.name])
        return earlier.decisions

    def _made(
        self,
        candidate: Candidate,
        layer: Layer,
        decision: Decision,
        statistics: Sequence[Mapping[str, Any]],
        weighted: Weighted | None,
    ) -> Made:
        weight, new = layer.weight.float(), decision.weight.dequantize().to(layer.weight.device).float()
        height, loss, energy = len(weight) // len(statistics), 0.0, 0.0
        for i, of_part in enumerate(statistics):
            result: HessianResult = of_part["hessian"]
            rows = slice(i * height, (i + 1) * height)
            loss += quadratic(self.run.comm, weight[rows] - new[rows], result.hessian)
            energy += quadratic(self.run.comm, weight[rows], result.hessian)
        fisher = nan if weighted is None else weighted.cost(weight - new)
        return Made(_values(layer, decision), loss, energy, *self._sizes(layer, decision), fisher)

    def _sizes(self, layer: Layer, stored: Decision) -> tuple[int, int]:
        """(Bytes of a layer's tensors in the checkpoint, bytes of their header entries)."""
        if not layer.has_format or stored.dense:
            size = layer.parameter.numel() * self.opened.dtype_of(layer.parameter).itemsize
            return size, header_bytes(f"{layer.name}.weight", layer.parameter.shape)
        parts = stored.parts()
        headers = sum(header_bytes(f"{layer.name}.{name}", part.shape) for name, part in parts.items())
        return sum(part.numel() * part.element_size() for part in parts.values()), headers

    def enter(self, index: int, held: HeldOut) -> None:
        """Enter the units of the block into what was found, and take held-out rows to the next one."""
        of_units: dict[tuple[Layer, ...], dict[str, list[Made]]] = {}
        for group in map(tuple, self.sites):
            tried = {
                name: [m[la.name] for la in group]
                for name, m in self.made.items()
                if all(layer.name in m for layer in group)
            }
            if tried:
                of_units[group] = tried
            else:
                why = "no candidate suits it"
                self.found.left_out |= {la.name: self.found.left_out.get(la.name, why) for la in group}
        uniform = {name: {self.layers[n]: m.values for n, m in made.items()} for name, made in self.made.items()}
        held.advance(index, uniform)
        for group, tried in of_units.items():
            self.found.units.append(_unit(self.name, group, {name: _tried(made) for name, made in tried.items()}))


def _tried(made: Sequence[Made]) -> Tried:
    loss, energy = sum(m.loss for m in made), sum(m.energy for m in made)
    size, headers = sum(m.bytes for m in made), sum(m.header_bytes for m in made)
    return Tried(loss / energy if energy else 0.0, size, headers, sum(m.fisher for m in made))


def with_fisher(units: Sequence[Unit]) -> list[Unit]:
    """Units with a Fisher-weighted loss of each. One that no gradient reached (an expert that few tokens use, say) has
    its relative loss, times the mean of what the others have by theirs."""
    tried = [each for unit in units for each in unit.tried.values()]
    known = [(each.fisher, each.relative_loss) for each in tried if not isnan(each.fisher)]
    rate = sum(fisher for fisher, _ in known) / (sum(loss for _, loss in known) or 1.0)

    def filled(each: Tried) -> Tried:
        return each if not isnan(each.fisher) else replace(each, fisher=rate * each.relative_loss)

    return [replace(unit, tried={name: filled(each) for name, each in unit.tried.items()}) for unit in units]


def _unit(block: str, group: Sequence[Layer], tried: dict[str, Tried]) -> Unit:
    prefix = f"{block}." if block else ""
    inside = [layer.name.removeprefix(prefix) for layer in group]
    parents = {name.rpartition(".")[0] for name in inside}
    kind = "+".join(inside)
    if len(parents) == 1 and (parent := parents.pop()):
        kind = f"{parent}." + "+".join(name.rpartition(".")[2] for name in inside)
    weights = sum(layer.shape[0] * layer.shape[1] for layer in group)
    return Unit(prefix + kind, block, kind, [layer.name for layer in group], weights, tried)


def _values(layer: Layer, decision: Decision) -> Tensor:
    return layer.stored(decision.weight.dequantize().to(layer.parameter.device, layer.parameter.dtype))


def _needs(candidates: Sequence[Candidate]) -> tuple[dict[str, StatisticFactory], dict[str, list[dict[str, str]]]]:
    """({name: factory} of all statistics, each once; {candidate: for each pass {its own name: that name}})."""
    needs: dict[str, StatisticFactory] = {"hessian": partial(Hessian, dtype=torch.float32, reference=False)}
    known = {_signature(needs["hessian"]): "hessian"}
    names: dict[str, list[dict[str, str]]] = {}
    for candidate in candidates:
        names[candidate.name] = []
        for p in candidate.passes:
            own = {}
            for name, make in p.needs().items():
                own[name] = known.setdefault(_signature(make), f"{name} {len(known)}")
                needs.setdefault(own[name], make)
            names[candidate.name].append(own)
    return needs, names


def _signature(make: StatisticFactory) -> Any:
    """A key that is equal for factories of equal statistics."""
    return (make.func, make.args, tuple(sorted(make.keywords.items()))) if isinstance(make, partial) else make
