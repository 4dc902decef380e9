"""What a run has to say about itself: passes that did nothing, layers that saw too little."""

from collections import Counter
from collections.abc import Sequence

from compress.checkpoint.record import LayerRecord, RunRecord
from compress.model.layers import Layer
from compress.passes.base import Pass
from compress.passes.weight_format import WeightFormat
from compress.run.plan import Plan
from compress.weights.decision import Decision


def nothing_done(plan: Plan, record: RunRecord) -> str | None:
    """Which pass compressed nothing at all, and why; None where every one did something."""
    made = {layer.name for layer in record.layers}
    for p in plan.passes:
        wanted = sorted(name for name in plan.treated if p.wants(name))
        if p.rounds and not made & set(wanted):
            reasons = Counter(record.left_alone.get(name, "no reason known") for name in wanted)
            told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            return f"{p.name} compressed nothing: of its layers, like {wanted[0]}, {told}"
    if plan.kv is not None and not record.caches:
        return "kv-cache compressed nothing: no attention keeps keys and values of its own"
    if plan.passes and not any(p.rounds for p in plan.passes) and not record.folds:
        why = f" ({record.not_folded[0]})" if record.not_folded else ""
        return f"{plan.passes[0].name} did nothing: there is no fold in this model{why}"
    return None


def few_tokens(layers: Sequence[LayerRecord]) -> str | None:
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


def held_back(layers: Sequence[LayerRecord]) -> str | None:
    """A remark about layers that a method did less to than asked, their tokens not bearing it out; None where none."""
    solutions = [str(layer.figures["solution"]) for layer in layers if "solution" in layer.figures]
    less = {name: solutions.count(name) for name in sorted(set(solutions)) if name != "gptq"}
    if not less:
        return None
    shares = ", ".join(f"{name} for {count}" for name, count in less.items())
    return (
        f"{sum(less.values())} of {len(solutions)} layers get less than GPTQ with all that was asked for ({shares}): "
        "what one half of their calibration tokens suggests does not hold on the other; give more calibration data"
    )


def layer_record(p: Pass, layer: Layer, decision: Decision) -> LayerRecord:
    words = (p.scheme, p.grid) if isinstance(p, WeightFormat) else ("", "")
    return LayerRecord(
        layer.name,
        p.name,
        *words,
        decision.weight.grid.group_size,
        layer.shape,
        dict(decision.figures),
    )
