"""Layers that an engine makes one layer of. It does not take them with several schemes, nor blocks of scales that would
reach from one part into the next."""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from compress.base.errors import InputError
from compress.checkpoint.read.fused import (
    Loading,
    fused_groups,
    inputs_of_one_range,
    mixed_experts,
    mixed_groups,
    naming,
)
from compress.engine.plan.format_limits import with_dense
from compress.engine.plan.plan import Plan
from compress.engine.plan.stored_sizes import WrittenLayer, stored_layers
from compress.inference.check.by_transformers import misread_experts
from compress.jobs.target_engines import engine_named
from compress.model.split_experts import NUMBERED
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Learn
from compress.train.rounding.quantizers import LEARNED
from compress.weights.scheme import Scheme

LEAVE = "leave --for out"


def check_merged(name: str, plan: Plan, model: nn.Module) -> None:
    """Raises InputError for a plan whose result an engine does not take. model: that of the plan."""
    if (why := why_not_merged(name, plan, model, stored_layers(plan))) is not None:
        raise InputError(why)


def why_not_merged(name: str, plan: Plan, model: nn.Module, written: Sequence[WrittenLayer]) -> str | None:
    """The reason why an engine does not take the result of a plan, a whole line; None where it does. written: the
    layers that it holds."""
    loads = engine_named(name).loads
    if not loads.experts:
        return None
    if loads.fuses and (why := _why_not_trained(name, plan.passes)) is not None:
        return why
    layers = {layer.name: layer for layer in written}
    coded = {layer.name: layer.scheme for layer in layers.values() if layer.scheme is not None}
    schemes = with_dense(coded, plan)
    if mixed := mixed_experts(schemes):
        held = [n for n in schemes if (found := NUMBERED.match(f"{n}.weight")) is not None and found[1] == mixed[0]]
        return (
            f"{name} takes one scheme for all experts of a block, and those of {mixed[0]} would have "
            f"{_words(held, schemes)}: give all of them one (`only`, `but`, ignore), or {LEAVE}"
        )
    if (why := _why_not_experts(name, loads, model, coded)) is not None:
        return why
    if not loads.fuses:
        why = misread_experts(model, coded)
        return None if why is None else f"{name} takes these experts for others: {why}; give another scheme, or {LEAVE}"
    if groups := mixed_groups(schemes):
        return (
            f"{name} makes one layer of {naming(groups[0])} ({len(groups)} such groups), which would have "
            f"{_words(groups[0], schemes)}: give all of them one scheme (`only`, `but`, ignore), or {LEAVE}"
        )
    return _cut_blocks(name, layers)


def _why_not_experts(name: str, loads: Loading, model: nn.Module, coded: Mapping[str, Scheme]) -> str | None:
    """The reason why an engine does not take experts of one scheme, or one by one; None where it does."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in loads.joined:
        return (
            f"{name} reads the experts of {kind} in one tensor, and passes over single ones: {LEAVE}, and serve what "
            "`compress export --to dense` makes of the result"
        )
    experts = [layer for group in inputs_of_one_range(coded) for layer in group]
    inputs = coded[experts[0]].inputs if experts else None
    if inputs is not None and not inputs.floating and not coded[experts[0]].dynamic and not loads.int8_experts:
        return (
            f"{name} has no fixed ranges of int8 inputs of experts, like {experts[0]}: give activations=dynamic or "
            f"--scheme fp8, or {LEAVE}"
        )
    return None


def _why_not_trained(name: str, passes: Iterable[Pass]) -> str | None:
    """The reason against training the fixed range of each layer's inputs, of which the engine has one for layers that
    read one input; None where that is not asked for."""
    found = [*passes]
    learns = any((stage := p.stage(Learn)) and stage.options.scales in LEARNED for p in found)
    if not learns or not any(vars(p).get("activations") == "static" for p in found):
        return None
    return (
        f"{name} has one fixed range of inputs for q, k and v, and training learns one for each: give train "
        f"scales=fixed, or activations=dynamic, or {LEAVE}"
    )


def _words(names: Iterable[str], schemes: Mapping[str, Scheme | None]) -> str:
    words = dict.fromkeys("no scheme" if schemes[name] is None else str(schemes[name]) for name in names)
    return " and ".join(words)


def _cut_blocks(name: str, layers: Mapping[str, WrittenLayer]) -> str | None:
    """The reason against blocks that would reach from one part of a layer into the next. The last part may end inside a
    block; an expert's may not."""
    for group in fused_groups(layers):
        for part in group if NUMBERED.match(f"{group[0]}.weight") else group[:-1]:
            rows, scheme = layers[part].shape[0], layers[part].scheme
            grid = None if scheme is None else getattr(scheme.codes, "grid", None)
            if grid is not None and grid.block is not None and rows % grid.block[0]:
                return (
                    f"{name} makes one layer of {naming(group)}, and the {rows} rows of {part} are no multiple of the "
                    f"{grid.block[0]} of a block: give --scheme fp8, or {LEAVE}"
                )
    return None
