"""Refusals of what training cannot do with a model, before any work."""

from collections.abc import Sequence

from torch import nn

from compress.base.errors import InputError
from compress.engine.plan.plan import Plan
from compress.model.layers import Layer
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Learn


def check_trainable(model: nn.Module, plan: Plan) -> None:
    """Refuse activations that a model cannot compute again, and layers of a form of which nothing is trained."""
    for at, p in enumerate(plan.passes):
        learn = p.stage(Learn)
        if learn is None:
            continue
        if learn.options.checkpointing and not getattr(model, "supports_gradient_checkpointing", False):
            raise InputError(f"{type(model).__name__} cannot compute activations again; leave checkpointing out")
        check_forms(plan.passes[:at], [layer for layer in plan.all_layers if p.wants(layer.name)])


def check_forms(passes: Sequence[Pass], layers: Sequence[Layer]) -> None:
    """Refuse layers of which nothing is trained once these passes have stored them."""
    for layer in layers:
        stored = [p.stored(layer.name, layer.shape) for p in passes if p.wants(layer.name)]
        scheme = next((each for each in reversed(stored) if each is not None), None)
        if scheme is not None and not scheme.terms[0].trains:
            words = " + ".join(term.words(None) for term in scheme.terms)
            raise InputError(
                f"{layer.name} is stored as {words}, of which nothing is trained; quantize it by another pass, or "
                "train before"
            )
