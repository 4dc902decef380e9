"""Both ends of a training: the weights that layers begin with, and what is decided of those that it leaves."""

import copy
from collections.abc import Mapping

from torch import Tensor

from compress.model.layers import Layer
from compress.model.opened import Opened
from compress.run.plan import Plan
from compress.run.residency import Residency
from compress.train.latents import begun
from compress.train.layers import PARTS, finished
from compress.weights.decision import Decision
from compress.weights.dense import dense


def begin(plan: Plan, residency: Residency, decided: Mapping[str, Decision], places: dict[str, Tensor]) -> None:
    """Give layers that round the weights that are closest to the original of all that have the codes that were decided.
    places: taken out of here, as they are used."""
    for stack in plan.stacks:
        for name, block in stack.blocks:
            layers = [layer for layer in plan.layers[name] if layer.name in places]
            if not layers:
                continue
            with _exact(residency).open(block, keep=True):
                for layer in layers:
                    latent_NK = begun(decided[layer.name], places.pop(layer.name), layer.parameter.dtype)
                    layer.parameter.data.copy_(layer.stored(latent_NK))


def decisions_of(plan: Plan, residency: Residency, before: Mapping[str, Decision]) -> dict[str, Decision]:
    """What training has made of layers, block by block."""
    names = plan.treated
    found: dict[str, Decision] = {}
    for stack in plan.stacks:
        for name, block in stack.blocks:
            with _exact(residency).open(block, keep=False) as opened:
                for layer in plan.layers[name]:
                    if layer.name in names:
                        found[layer.name] = _decision(layer, opened, before.get(layer.name))
    return found


def _exact(residency: Residency) -> Residency:
    """The same place, as it is trained, whatever products are computed in."""
    exact = copy.copy(residency)
    exact.dtype = None
    return exact


def _decision(layer: Layer, opened: Opened, before: Decision | None) -> Decision:
    weight_NK: Tensor = layer.weight
    if before is None or not hasattr(layer.module, PARTS[0]):
        return Decision(dense(weight_NK.to(opened.dtype_of(layer.parameter))))
    return finished(layer.module, weight_NK, before, opened.dtype_of(layer.parameter))
