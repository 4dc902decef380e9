"""Remarks of a run: its layers and their ranges, passes that did nothing, layers that saw too few tokens."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from compress.checkpoint.write.record import TRAIN, LayerRecord, RangeRecord, RunRecord, range_figures, range_record
from compress.engine.plan.plan import Plan
from compress.model.layers import Layer
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Decide, Reconstruction
from compress.solvers.statistics.calibrators import Range
from compress.weights.decision import Decision
from compress.weights.grid import Quantized
from compress.weights.masks import pattern_of

# What the record calls the solution of a layer that got all that a method has (`passes.options.second_order`).
ENTIRE = ("gptq", "sparsegpt")


def nothing_done(plan: Plan, record: RunRecord) -> str | None:
    """A sentence naming a pass that compressed nothing at all, and why; None where every one did something."""
    made = {layer.name for layer in record.layers}
    for p in plan.passes:
        wanted = sorted(name for name in plan.treated if p.wants(name))
        if (p.stage(Decide) or p.stage(Reconstruction)) and not made & set(wanted):
            reasons = Counter(record.left_alone.get(name, "no reason known") for name in wanted)
            words = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            return f"{p.name} compressed nothing: of its layers, like {wanted[0]}, {words}"
    if plan.kv is not None and not record.caches:
        return "kv-cache compressed nothing: no attention keeps keys and values of its own"
    if plan.passes and not any(p.stage(Decide) for p in plan.passes) and not record.folds:
        why = f" ({record.not_folded[0]})" if record.not_folded else ""
        return f"{plan.passes[0].name} did nothing: there is no fold in this model{why}"
    return None


def remark_on_few_tokens(layers: Sequence[LayerRecord]) -> str | None:
    """A remark about layers that saw fewer calibration tokens than they have inputs; None where none did."""
    seen = [(int(layer.figures["tokens"]), layer.shape[1]) for layer in layers if "tokens" in layer.figures]
    few = [(tokens / inputs, tokens, inputs) for tokens, inputs in seen if tokens < inputs]
    if not few:
        return None
    _, tokens, inputs = min(few)
    return (
        f"{len(few)} of {len(seen)} layers saw fewer calibration tokens than they have inputs "
        f"(at worst {tokens} for {inputs}); more calibration data would serve them better (--samples)"
    )


def remark_on_less(layers: Sequence[LayerRecord]) -> str | None:
    """A remark about layers that a method did less to than asked, their tokens not bearing it out; None where none."""
    solutions = [str(layer.figures["solution"]) for layer in layers if "solution" in layer.figures]
    less = {name: solutions.count(name) for name in sorted(set(solutions)) if name not in ENTIRE}
    if not less:
        return None
    asked = " and ".join(sorted({layer.method for layer in layers if "solution" in layer.figures}))
    shares = ", ".join(f"{count} by {name}" for name, count in less.items())
    return (
        f"{sum(less.values())} of {len(solutions)} layers were solved by less than {asked} ({shares}): with so few "
        f"calibration tokens, {asked} on one half of them did not hold on the other; more calibration text would help"
    )


def remark_on_objective(layers: Sequence[LayerRecord]) -> str | None:
    """A remark about layers that were to be rounded for the loss, and could not; None where none was."""
    objectives = [str(layer.figures["objective"]) for layer in layers if "objective" in layer.figures]
    reasons = Counter(each.removeprefix("layer: ") for each in objectives if each != "loss")
    if not reasons:
        return None
    words = ", ".join(f"{count} {why}" for why, count in reasons.most_common())
    return f"{reasons.total()} of {len(objectives)} layers are rounded for what they return, not for the loss ({words})"


def remark_on_order(layers: Sequence[LayerRecord]) -> str | None:
    """A remark about inputs that changed groups of a pattern, and those that could not; None where none was to."""
    moved = [layer.figures for layer in layers if "kept_permuted" in layer.figures]
    stayed = Counter(str(layer.figures["order"]) for layer in layers if "order" in layer.figures)
    if not moved and not stayed:
        return None
    words = "".join(f"; of {count} layers they stay: {why}" for why, count in stayed.most_common())
    if not moved:
        return f"no inputs have changed groups of a pattern{words}"
    before, after = (sum(float(f[key]) for f in moved) / len(moved) for key in ("kept_in_order", "kept_permuted"))
    return (
        f"inputs of {len(moved)} of {len(moved) + stayed.total()} layers have changed groups of a pattern, which keep "
        f"{after:.1%} of their scores and not {before:.1%}, on average{words}"
    )


def layer_record(layer: Layer, decision: Decision, p: Pass | None) -> LayerRecord:
    """The report's entry about a layer. p: the pass that decided; None: training did."""
    first = decision.weight.terms[0]
    grid = first.grid if isinstance(first, Quantized) else None
    figures = dict(decision.figures)
    if decision.kept is not None:
        figures["sparsity"] = 1 - float(decision.kept.double().mean())
        pattern = pattern_of(decision.kept)
        if pattern is not None:
            figures["pattern"] = str(pattern)
    return LayerRecord(
        layer.name,
        TRAIN if p is None else p.name,
        *(("", "") if p is None else p.wording),
        None if grid is None else grid.group_size,
        layer.shape,
        figures,
    )


class RangeNotes:
    """Records of the ranges that calibration fixes in a block."""

    def __init__(self, earlier: Sequence[RangeRecord] = ()) -> None:
        self.noted: list[RangeRecord] = [*earlier]

    def of_layers(
        self, statistics: Mapping[str, Any], decisions: Mapping[str, Decision], role: Literal["input", "output"]
    ) -> dict[str, Decision]:
        """Decisions that go by one range, if their statistics have one, with its figures. It is noted once for all."""
        range_ = statistics.get("range")
        if not decisions or not isinstance(range_, Range):
            return dict(decisions)
        first, *also = decisions
        self.noted.append(range_record(range_, first, role, also))
        figures = range_figures(self.noted[-1])
        return {name: replace(d, figures={**d.figures, **figures}) for name, d in decisions.items()}

    def of_cache(self, attention: str, keys: Range, values: Range) -> None:
        """Note the ranges of an attention's cache."""
        self.noted += [range_record(keys, attention, "keys"), range_record(values, attention, "values")]

    def in_order(self, block: nn.Module, block_name: str) -> list[RangeRecord]:
        """The noted ranges, in the order of the model."""
        place = {name: i for i, (name, _) in enumerate(block.named_modules(prefix=block_name))}
        return sorted(self.noted, key=lambda noted: place[noted.tensor])
