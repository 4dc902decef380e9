"""Both ends of a training: the weights that layers begin with, and what is decided of those that it leaves. Between
them, key-value caches are rounded."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.engine.plan.plan import Plan
from compress.engine.residency import Residency
from compress.engine.walk.decide import check_scales
from compress.inference.load.kv_caches import round_cache
from compress.model.attention import hold_scales
from compress.model.layers import Layer
from compress.model.open_block import Opened
from compress.train.rounding.latents import start_weight
from compress.train.rounding.swapped_layers import PARTS, decision_after
from compress.weights.decision import Decision
from compress.weights.formats.dense import dense
from compress.weights.kv_cache_codes import SCALES, CacheCodes


def begin(
    model: nn.Module, plan: Plan, residency: Residency, decided: Mapping[str, Decision], places: dict[str, Tensor]
) -> None:
    """Give layers that round the weights that are closest to the original of all that have the codes that were decided.
    places: taken out of here, as they are used."""

    def closest(layer: Layer) -> None:
        latent_NK = start_weight(decided[layer.name], places.pop(layer.name), layer.parameter.dtype)
        layer.part(layer.parameter.data).copy_(layer.stored(latent_NK))

    wide = _exact(residency)
    wide.stores = {}
    if any(table.name in places for table in plan.tables):
        with wide.open(model, plan.blocks - {model}, keep=True):
            for table in plan.tables:
                closest(table)
    for stack in plan.stacks:
        for name, block in stack.blocks:
            layers = [layer for layer in plan.layers[name] if layer.name in places]
            if not layers:
                continue
            with wide.open(block, keep=True):
                for layer in layers:
                    closest(layer)


def trained_decisions(
    model: nn.Module, plan: Plan, residency: Residency, before: Mapping[str, Decision]
) -> dict[str, Decision]:
    """{layer or table: what training has made of it}, read block by block. before: what was decided, and trained.
    Raises CompressError for scales that float16 has not."""
    exact, names = _exact(residency), plan.treated
    decisions: dict[str, Decision] = {}

    def read(layer: Layer, opened: Opened) -> None:
        weight_NK, dtype = layer.weight, opened.dtype_of(layer.parameter)
        decision = before.get(layer.name)
        if decision is None or not hasattr(layer.module, PARTS[0]):
            decisions[layer.name] = Decision(dense(weight_NK.to(dtype)))
        else:
            decisions[layer.name] = decision_after(layer, weight_NK, decision, dtype)
        check_scales({layer.name: decisions[layer.name]}, {layer.name: weight_NK})

    if plan.tables:
        with exact.open(model, plan.blocks - {model}, keep=False) as opened:
            for table in plan.tables:
                read(table, opened.inside(table.module))
    for stack in plan.stacks:
        for name, block in stack.blocks:
            with exact.open(block, keep=False) as opened:
                for layer in (layer for layer in plan.layers[name] if layer.name in names):
                    read(layer, opened)
    return decisions


def _exact(residency: Residency) -> Residency:
    """The same place, with parameters as they are trained, whatever dtype products have."""
    exact = copy.copy(residency)
    exact.dtype = None
    return exact


@dataclass
class TrainedCaches:
    """Rounding of keys and values in a model's attentions while it is trained: they are what the cache will hold, and
    gradients pass unchanged. decided: {attention: how it keeps them}.

    The hook is that of inference (`inference.load.kv_caches`), behind the rotation of keys, with the scales that were
    found before.
    """

    model: nn.Module
    decided: Mapping[str, CacheCodes]
    handles: list[RemovableHandle] = field(default_factory=list)

    def on(self) -> None:
        """Make attentions round keys and values. The scales are not in the model's state_dict."""
        for name, codes in self.decided.items():
            attention = self.model.get_submodule(name)
            if codes.scales is not None:
                device = next(attention.parameters()).device
                hold_scales(attention, [scale.to(device) for scale in codes.scales], persistent=False)
            self.handles.append(round_cache(attention, codes.scheme)[1])

    def off(self) -> None:
        """Stop rounding, and remove the scales."""
        while self.handles:
            self.handles.pop().remove()
        for name in self.decided:
            attention = self.model.get_submodule(name)
            for scale in SCALES:
                attention._buffers.pop(scale, None)
                attention._non_persistent_buffers_set.discard(scale)

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Calls `on` for the context, `off` after it."""
        try:
            self.on()
            yield
        finally:
            self.off()
