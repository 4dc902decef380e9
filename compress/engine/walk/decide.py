"""Asks passes about the layers of a site, and finds which of them can be asked in the same forward."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.checkpoint.read.fused import inputs_of_one_range
from compress.model.layers import Layer
from compress.model.open_block import Opened
from compress.passes.protocol.base import Pass
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Decide
from compress.weights.decision import Decision, joined
from compress.weights.formats.dense import dense
from compress.weights.formats.k_quants import KBlocks
from compress.weights.grid import Quantized
from compress.weights.masks import CAME, Earlier
from compress.weights.matrix import Term
from compress.weights.rounding import ActivationCodes
from compress.weights.scale_numbers import scale_limits


class Reach:
    """The largest absolute weights of the groups among a block's layers, each found once, when it is first asked for:
    before any layer of the group is rounded.

    A group is the layers of one module that take as many inputs. Engines stack q, k and v, or gate and up, into one
    matrix with one global scale, or one scale of floats per tensor. A model does not say which layers they stack; all
    that they do stack lie in one module and have one width. Others there, like the output of a square attention, share
    the scale as well, which costs nothing: e4m3 numbers span 14 powers of two at full precision.
    """

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        self._layers = tuple(layers)
        self._found: dict[tuple[str, int], float] = {}

    def of(self, site: Sequence[Layer]) -> float:
        """The largest absolute weight of the groups of a site."""
        for key in set(map(_group_of, site)) - self._found.keys():
            group = [layer for layer in (*self._layers, *site) if _group_of(layer) == key]
            self._found[key] = max(float(layer.weight.abs().max()) for layer in group)
        return max(self._found[_group_of(layer)] for layer in site)


def _group_of(layer: Layer) -> tuple[str, int]:
    """The module and the width of a layer; its own name, where it is one expert's slice of a parameter."""
    return (layer.name.rpartition(".")[0] if layer.index is None else layer.name), layer.shape[1]


@dataclass
class Decided:
    """Decisions of earlier passes, the original weights of layers that these pruned, the pruning that the model came
    with, and the largest weights of the block's layers."""

    decisions: dict[str, Decision] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    came: Earlier = field(default_factory=Earlier)
    reach: Reach = field(default_factory=Reach)


def decide(
    p: Pass,
    site: Sequence[Layer],
    opened: Opened,
    comm: Comm,
    statistics: Sequence[Mapping[str, Any]] = ({},),
    earlier: Decided | None = None,
) -> dict[str, Decision]:
    """The pass's decisions about the layers of a site; with several sets of statistics, it decides about as many parts
    of each layer. Raises CompressError for weights that are not finite."""
    whole = site_of(site, opened, comm)
    weights = whole.weights
    before = Decided() if earlier is None else earlier
    decisions = {name: before.decisions[name] for name in weights if name in before.decisions}
    came = _earlier_masks(p, {n: weight for n, weight in weights.items() if n not in decisions}, before.came)
    decisions |= came
    was = {name: before.before[name] for name in weights if name in before.before}
    whole = replace(whole, decided=decisions, before=was, largest=partial(before.reach.of, site))
    decides = p.fitted({weight.shape[1] for weight in weights.values()}).stage(Decide)
    assert decides is not None
    parts = [decides.apply(part) for part in in_parts(whole, statistics)]
    for part in parts:
        _check_returned(p, part, weights)
    new_decisions = {name: joined([part[name] for part in parts]) for name in parts[0]}
    check_scales(new_decisions, weights)
    if decides.rounds_inputs:
        _check_inputs(p, new_decisions)
    # A mask stays with the layer, whatever is decided about it afterwards.
    new_decisions = {
        name: replace(d, figures={**d.figures, **came[name].figures}) if name in came else d
        for name, d in new_decisions.items()
    }
    return {name: d if d.kept is not None else replace(d, kept=whole.kept(name)) for name, d in new_decisions.items()}


def _check_inputs(p: Pass, made: Mapping[str, Decision]) -> None:
    """Raise CompressError for a pass whose options round inputs, and whose decisions do not."""
    name = next((name for name, decision in made.items() if decision.inputs is None), None)
    if name is not None:
        raise CompressError(
            f"{p.name} has options that round inputs, and decides about {name} without them; return "
            "Decision(..., inputs=self.input_codes(site).get(name))"
        )


def check_scales(made: Mapping[str, Decision], weights: Mapping[str, Tensor]) -> None:
    """Raise CompressError for a layer whose weights are too large or too small for scales that float16 has."""
    for name, decision in made.items():
        for term in decision.weight.terms:
            scale = _halves(term)
            if scale is None:
                continue
            least, largest = scale_limits(scale.dtype, "float16")
            size = float(weights[name].abs().max())
            if size and not least < float(scale.abs().max()) < largest:
                raise CompressError(
                    f"{name} has weights up to {size:.2g}, whose scales float16 has not ({least:.1g} to {largest:g}); "
                    "scale the model, or leave out what asks for them: scales=float16, K-quants, or --for"
                )


def with_widest_inputs(made: Mapping[str, ActivationCodes]) -> dict[str, ActivationCodes]:
    """The codes of experts' inputs whose fixed range of floats is narrower than another's of their block, with the
    widest: engines have one for the first layers of all experts of a block, and one for their last ones."""
    widened = {}
    for group in inputs_of_one_range(made):
        held = {name: made[name] for name in group if made[name].grid.floating}
        divisors = [codes.grid.global_scale for codes in held.values() if codes.grid.global_scale is not None]
        scales = [codes.scale for codes in held.values() if codes.scale is not None]
        for name, codes in held.items():
            if divisors and codes.grid.global_scale != min(divisors):
                widened[name] = replace(codes, grid=replace(codes.grid, global_scale=min(divisors)))
            elif codes.scale is not None and not torch.equal(codes.scale, widest := torch.stack(scales).amax(0)):
                widened[name] = replace(codes, scale=widest)
    return widened


def _halves(term: Term) -> Tensor | None:
    """The scales of a term that has numbers of float16 for them; None for another term."""
    if isinstance(term, KBlocks):
        return term.steps()
    return term.scale if isinstance(term, Quantized) and term.grid.scales == "float16" else None


def _earlier_masks(p: Pass, weights: Mapping[str, Tensor], earlier: Earlier) -> dict[str, Decision]:
    """Decisions of an earlier command about layers: those that came with a mask. Raises CompressError for a pass that
    would not keep it."""
    if p.reads != "dense weight":
        return {}  # what training has made, say
    masks = {name: mask for name, weight in weights.items() if (mask := earlier.mask(name, weight)) is not None}
    shares = {name: 1 - float(mask.double().mean()) for name, mask in masks.items()}
    if masks and not p.keeps_zeros:
        name = next(iter(masks))
        raise CompressError(earlier.problem(name, shares[name], p.name))
    return {n: Decision(dense(weights[n]), {CAME: shares[n]}, kept=mask) for n, mask in masks.items()}


def _check_returned(p: Pass, returned: Any, weights: Mapping[str, Tensor]) -> None:
    """Raises CompressError where a pass, perhaps one of a user's own, did not return a decision for each layer."""
    found = returned if isinstance(returned, Mapping) else {}
    for name in weights:
        if not isinstance(found.get(name), Decision):
            what = f"{type(found[name]).__name__} for {name}" if name in found else f"nothing for {name}"
            said = what if isinstance(returned, Mapping) else type(returned).__name__
            raise CompressError(
                f"`apply` of {p.name} returned {said}; it must return {{layer: compress.Decision(...)}} for each layer "
                "of `site.weights`, like compress.Decision(grid.quantize(weight, dtype))"
            )


def site_of(site: Sequence[Layer], opened: Opened, comm: Comm) -> Site:
    """The layers of a site, nothing decided about them yet. Raises CompressError for weights that are not finite."""
    weights = {layer.name: layer.weight for layer in site}
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise CompressError(f"{name} has non-finite weights; the model is damaged")
    return Site(weights, {}, {layer.name: opened.dtype_of(layer.parameter) for layer in site}, comm)


def in_parts(site: Site, statistics: Sequence[Mapping[str, Any]]) -> Iterator[Site]:
    """The site as it is for each set of statistics, which are about as many parts of each layer's rows."""
    heights = {name: len(weight) // len(statistics) for name, weight in site.weights.items()}
    for i, of_part in enumerate(statistics):
        rows = site.rows({name: slice(i * height, (i + 1) * height) for name, height in heights.items()})
        yield replace(rows, stats=of_part)


def together(passes: Sequence[Pass], layers: Collection[str]) -> list[list[Pass]]:
    """Passes in a row that can share a forward of the block: they only decide, by what they see of a layer's input, and
    no two of them about the same layer. Every site then sees the compressed prefix of its block, whoever it is for."""
    groups: list[list[Pass]] = []
    for p in passes:
        if groups and _can_share(p, groups[-1], layers):
            groups[-1].append(p)
        else:
            groups.append([p])
    return groups


def _only_decides(p: Pass) -> bool:
    decides = p.stage(Decide)
    # Needs, so that whoever is not calibrated stays by itself: a group has a forward.
    return len(p.stages) == 1 and decides is not None and bool(decides.needs)


def _can_share(p: Pass, group: Sequence[Pass], layers: Collection[str]) -> bool:
    return all(map(_only_decides, (p, *group))) and not any(
        p.wants(name) and other.wants(name) for other in group for name in layers
    )
